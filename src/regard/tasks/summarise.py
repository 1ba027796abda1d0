"""A text to its summary."""

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
    encode_pairs,
    encode_sources,
    generate_targets,
    transformer_config,
)
from regard.training.task import Batch, Metrics, Prediction, Task

CUT = " or cut long texts with --cut,"


@dataclass(frozen=True)
class Summarise(Task):
    """An encoder-decoder that may copy words of the text, and tells how much it looked at each."""

    name: ClassVar[str] = "summarise"
    description: ClassVar[str] = "a text to its summary"
    example: ClassVar[str] = "A long text, all of it in one line.\tIts summary\nAnother text.\tAnother summary"
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

    text: str = option("", "column of the text: a name, or a number from 1 where there is no header")
    summary: str = option("", "column of its summary")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most, for both")
    d_model: int = option(192, "width of the hidden states")
    layers: int = option(2, "of the encoder, and of the decoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    window: int = option(128, "tokens to each side that the encoder sees, so that long texts cost no more; 0 for all")
    longest: int = option(1024, "tokens of a text at most")
    cut: bool = option(False, "cut texts that are too long")
    max_new_tokens: int = option(64, "tokens of a summary at most")
    beam: int = option(4, "summaries that are followed at a time when writing")

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
        """A summary that is longer than the model's may be is a reference all the same."""
        _, kept = encode_sources(processor, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        return [rows[n] for n in kept]

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        assert isinstance(model, PointerTransformer)
        sources, _ = encode_sources(processor, rows, BadRows(), longest=self.longest, cut=self.cut, more=CUT)
        outputs = [""] * len(rows)
        for n, ids, _ in generate_targets(model, sources, beam=self.beam, max_new_tokens=self.max_new_tokens):
            outputs[n] = processor.require_tokenizer().decode(ids.tolist())
        return metrics.summaries(outputs, [row.values[1] for row in rows])

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """The beginning of the text: its first sentences, and as many words as summaries have in training."""
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
        """The summary of each text. `more` has how much it looked at each token of the text, which sums to its own
        tokens: [token, how much] for all."""
        assert isinstance(model, PointerTransformer)
        sources, kept = encode_sources(processor, rows, bad, longest=self.longest, cut=self.cut, more=CUT)
        generated = {
            each.number: each
            for each in generate_targets(model, sources, beam=self.beam, max_new_tokens=self.max_new_tokens)
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
    """The first sentences of a text.

    >>> lead("It is 3.5 m long. It floats! Does it sink?", 2)
    'It is 3.5 m long. It floats!'
    """
    return " ".join(re.split(r"(?<=[.!?])\s+(?=\W*[A-Z0-9])", text)[:count])


def token_coverage(
    model: PointerTransformer, processor: Processor, text: str, source: np.ndarray, generated: Tensor
) -> list[tuple[str, float]]:
    """The tokens of a text as they stand in it, and how much its summary looked at each; the last is the end."""
    start = generated.new_tensor([model.config.start])
    coverage = model.coverage(torch.from_numpy(source).to(generated.device), torch.cat((start, generated)))
    processor.require_tokenizer().encode_special_tokens = True
    spans = processor.require_tokenizer().encode(text, add_special_tokens=False).offsets[: len(source) - 1]
    return list(zip([text[first:last] for first, last in spans] + [END], coverage.tolist(), strict=True))
