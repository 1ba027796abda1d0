"""Translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import TATOEBA, Row
from regard.data.tokenizer import train_tokenizer
from regard.errors import BadRows
from regard.models.translation import Transformer
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


@dataclass(frozen=True)
class Translate(Task):
    """An encoder-decoder Transformer with one vocabulary for both languages and tied embeddings."""

    name: ClassVar[str] = "translate"
    description: ClassVar[str] = "translation of sentences"
    example: ClassVar[str] = "I am hungry.\tJ'ai faim.\nGo home.\tRentre chez toi."
    columns: ClassVar[tuple[str, ...]] = ("source", "target")
    data: ClassVar[str] = TATOEBA
    held_out: ClassVar[int] = 2000
    recipe: ClassVar[Recipe] = Recipe(
        steps=1200,
        tokens=4096,
        learning_rate=2e-3,
        warmup=150,
        label_smoothing=0.1,
        ema=0.998,
        evaluate_every=250,
        save_every=250,
    )

    source: str = option("", "column of the sentence: its name, or its number (from 1) in a file without a header")
    target: str = option("", "column of its translation")
    vocabulary: int = option(8000, "maximum size of the vocabulary, shared by both languages")
    d_model: int = option(256, "width of the hidden states")
    layers: int = option(3, "layers of the encoder and of the decoder")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.1, "dropout probability")
    longest: int = option(256, "maximum number of tokens per sentence")
    beam: int = option(4, "beam width of the search")

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        return Processor(train_tokenizer((text for row in rows for text in row.values), self.vocabulary))

    def model(self, processor: Processor) -> nn.Module:
        return Transformer(transformer_config(processor, self))

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> SourceTargetPairs:
        return encode_pairs(processor, rows, bad, longest=self.longest)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Transformer)
        source, before = batch.inputs
        return model.loss(source, before, batch.targets, smoothing=smoothing)

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """Keep rows whose translation exceeds `longest`: it is still a valid reference."""
        return [rows[n] for n in encode_sources(processor, rows, bad, longest=self.longest)[1]]

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        references = _references(rows)
        places = {row.values[0]: row.place for row in reversed(rows)}  # the first row of each
        sources = [Row(places[source], (source,)) for source in references]
        outputs = [generated.output for generated in self.predict(model, processor, sources, BadRows())]
        return metrics.translation(outputs, list(references.values()))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        references = _references(held_out)
        return {"copy of the source": metrics.translation(list(references), list(references.values()))}

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        assert isinstance(model, Transformer)
        sources, kept = encode_sources(processor, rows, bad, longest=self.longest)
        outputs, scores = [""] * len(kept), [0.0] * len(kept)
        for n, ids, score in generate_targets(
            model, sources, strategy=beam_strategy(self.beam), max_new_tokens=self.longest
        ):
            outputs[n], scores[n] = processor.require_tokenizer().decode(ids.tolist()), score
        for row, output, score in zip(kept, outputs, scores, strict=True):
            yield Prediction(rows[row].values[0], output, score, place=rows[row].place)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        assert isinstance(model, Transformer)
        return pair_graphs(model)


def _references(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return all reference translations of each sentence."""
    references: dict[str, list[str]] = {}
    for row in rows:
        references.setdefault(row.values[0], []).append(row.values[1])
    return references
