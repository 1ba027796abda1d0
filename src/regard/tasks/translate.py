"""A sentence to its translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from regard.models.translation import Transformer
from regard.tasks import metrics
from regard.tasks.data import TATOEBA, Row
from regard.tasks.graphs import Graph, pair_graphs
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.tokens import learn
from regard.tasks.trouble import Bad
from regard.tasks.writing import Pairs, config_of, paired, sources_of, written


@dataclass(frozen=True)
class Translate(Task):
    """The Transformer, with one vocabulary for both languages and one table for all embeddings."""

    name: ClassVar[str] = "translate"
    does: ClassVar[str] = "a sentence to its translation"
    example: ClassVar[str] = "I am hungry.\tJ'ai faim.\nGo home.\tRentre chez toi."
    columns: ClassVar[tuple[str, ...]] = ("source", "target")
    data: ClassVar[str] = TATOEBA
    held: ClassVar[int] = 2000
    recipe: ClassVar[Recipe] = Recipe(
        steps=1200, tokens=4096, rate=2e-3, warmup=150, smoothing=0.1, ema=0.998, evaluate_every=250, save_every=250
    )

    source: str = option("", "column of the sentence: a name, or a number from 1 where there is no header")
    target: str = option("", "column of its translation")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most, for both languages")
    width: int = option(256, "of the hidden states")
    layers: int = option(3, "of the encoder, and of the decoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.1, "in training")
    longest: int = option(256, "tokens of a sentence at most")
    beam: int = option(4, "sentences that are followed at a time when translating")

    def learn(self, rows: Sequence[Row]) -> Kit:
        return Kit(learn((text for row in rows for text in row.values), self.vocabulary))

    def model(self, kit: Kit) -> nn.Module:
        return Transformer(config_of(kit, self))

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Pairs:
        return paired(kit, rows, bad, longest=self.longest)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Transformer)
        source, before = batch.inputs
        return model.loss(source, before, batch.targets, smoothing=smoothing)

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        """A translation that is longer than the model's may be is a reference all the same."""
        return [rows[n] for n in sources_of(kit, rows, bad, longest=self.longest)[1]]

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        references = _references(rows)
        places = {row.values[0]: row.place for row in reversed(rows)}  # the first of each
        one = [Row(places[source], (source,)) for source in references]
        outputs = [made.output for made in self.predict(model, kit, one, Bad())]
        return metrics.translation(outputs, list(references.values()))

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        references = _references(held)
        return {"copy of the source": metrics.translation(list(references), list(references.values()))}

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        assert isinstance(model, Transformer)
        sources, kept = sources_of(kit, rows, bad, longest=self.longest)
        outputs, scores = [""] * len(kept), [0.0] * len(kept)
        for n, ids, score in written(model, sources, beam=self.beam, limit=self.longest):
            outputs[n], scores[n] = kit.texts().decode(ids.tolist()), score
        for row, output, score in zip(kept, outputs, scores, strict=True):
            yield Prediction(rows[row].values[0], output, score, place=rows[row].place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        assert isinstance(model, Transformer)
        return pair_graphs(model)


def _references(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Every translation of each sentence, in order."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.values[0], []).append(row.values[1])
    return found
