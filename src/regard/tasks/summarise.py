"""Summarisation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.tokenizer import END, train_tokenizer
from regard.errors import BadRows
from regard.models.pointer import PointerTransformer
from regard.training import metrics
from regard.training.onnx_graphs import Graph, pair_graphs
from regard.training.recipe import Recipe, option
from regard.training.seq2seq import (
    SourceTargetPairs,
    beam_strategy,
    encode_pairs,
    encode_sources,
    generate_targets,
    transformer_config,
)
from regard.training.task import Batch, Metrics, Prediction, Task

CUT = " truncate long texts with --cut,"


@dataclass(frozen=True)
class Summarise(Task):
    """A pointer-generator Transformer: it can copy tokens of the text, and reports how much it attended to each."""

    name: ClassVar[str] = "summarise"
    description: ClassVar[str] = "summarisation: a text to a short version of it"
    example: ClassVar[str] = "A long text, on one line.\tIts summary\nAnother text.\tAnother summary"
    columns: ClassVar[tuple[str, ...]] = ("text", "summary")
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000,
        tokens=4096,
        learning_rate=2e-3,
        warmup=200,
        label_smoothing=0.0,
        ema=0.995,
        evaluate_every=250,
        save_every=250,
    )

    text: str = option("", "column of the text: its name, or its number (from 1) in a file without a header")
    summary: str = option("", "column of its summary")
    vocabulary: int = option(8000, "maximum size of the vocabulary, shared by texts and summaries")
    d_model: int = option(192, "width of the hidden states")
    layers: int = option(2, "layers of the encoder and of the decoder")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    window: int = option(
        128, "tokens on each side that the encoder attends to, so that cost is linear in length; 0 for all"
    )
    longest: int = option(1024, "maximum number of tokens per text")
    cut: bool = option(False, "truncate texts that are too long")
    max_new_tokens: int = option(64, "maximum number of tokens per summary")
    beam: int = option(4, "beam width of the search")

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        return Processor(train_tokenizer((text for row in rows for text in row.values), self.vocabulary))

    def model(self, processor: Processor) -> nn.Module:
        return PointerTransformer(transformer_config(processor, self, window=self.window))

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> SourceTargetPairs:
        return encode_pairs(
            processor, rows, bad, longest=self.longest, max_new_tokens=self.max_new_tokens, cut=self.cut, more=CUT
        )

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, PointerTransformer)
        source, before = batch.inputs
        return model.loss(source, before, batch.targets, smoothing=smoothing)

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """Keep rows whose summary exceeds `max_new_tokens`: it is still a valid reference."""
        _, kept = encode_sources(processor, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        return [rows[n] for n in kept]

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        assert isinstance(model, PointerTransformer)
        sources, _ = encode_sources(processor, rows, BadRows(), longest=self.longest, cut=self.cut, more=CUT)
        outputs = [""] * len(rows)
        for n, ids, _ in generate_targets(
            model, sources, strategy=beam_strategy(self.beam), max_new_tokens=self.max_new_tokens
        ):
            outputs[n] = processor.require_tokenizer().decode(ids.tolist())
        return metrics.summaries(outputs, [row.values[1] for row in rows])

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """The start of the text: its first sentences, and as many words as the mean training summary has."""
        texts, references = [row.values[0] for row in held_out], [row.values[1] for row in held_out]
        words = round(np.mean([len(row.values[1].split()) for row in train]))
        return {
            "lead-1": metrics.summaries([lead(text, 1) for text in texts], references),
            "lead-3": metrics.summaries([lead(text, 3) for text in texts], references),
            f"first {words} words": metrics.summaries([" ".join(text.split()[:words]) for text in texts], references),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield the summary of each text. `more` has the coverage: pairs of a token of the text and the attention that
        it received, which sum to the number of tokens of the summary."""
        assert isinstance(model, PointerTransformer)
        sources, kept = encode_sources(processor, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        generated = {
            each.number: each
            for each in generate_targets(
                model, sources, strategy=beam_strategy(self.beam), max_new_tokens=self.max_new_tokens
            )
        }
        for n, row in enumerate(kept):
            text = rows[row].values[0]
            output = processor.require_tokenizer().decode(generated[n].ids.tolist())
            more = {"coverage": token_coverage(model, processor, text, sources[n], generated[n].ids)}
            yield Prediction(text, output, generated[n].score, more, place=rows[row].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        assert isinstance(model, PointerTransformer)
        return pair_graphs(model)


def lead(text: str, count: int) -> str:
    """Return the first `count` sentences of a text.

    >>> lead("It is 3.5 m long. It floats! Does it sink?", 2)
    'It is 3.5 m long. It floats!'
    """
    return " ".join(re.split(r"(?<=[.!?])\s+(?=\W*[A-Z0-9])", text)[:count])


def token_coverage(
    model: PointerTransformer, processor: Processor, text: str, source: np.ndarray, generated: Tensor
) -> list[tuple[str, float]]:
    """Pairs of each token of a text, as spelled in it, and the attention it received; the last is the end token."""
    start = generated.new_tensor([model.config.start])
    coverage = model.coverage(torch.from_numpy(source).to(generated.device), torch.cat((start, generated)))
    processor.require_tokenizer().encode_special_tokens = True
    spans = processor.require_tokenizer().encode(text, add_special_tokens=False).offsets[: len(source) - 1]
    return list(zip([text[first:last] for first, last in spans] + [END], coverage.tolist(), strict=True))
