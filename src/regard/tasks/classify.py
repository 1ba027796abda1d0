"""Text to one of a few classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.parts import choose
from regard.models.text import POOLINGS, SequenceClassifier
from regard.tasks import baselines, metrics
from regard.tasks.batches import in_order
from regard.tasks.data import Row
from regard.tasks.graphs import Graph, text_graph
from regard.tasks.labels import classes_of, known
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, option
from regard.tasks.texts import TextItems, encoded, encoder_config, pretrained, started
from regard.tasks.tokens import learn
from regard.tasks.trouble import Bad, Trouble


@dataclass(frozen=True)
class Classify(Task):
    """An encoder of text and a head on the mean of its hidden states."""

    name: ClassVar[str] = "classify"
    does: ClassVar[str] = "text to one of a few classes"
    example: ClassVar[str] = "text,label\na gorgeous film,positive\ndull from the first minute,negative"
    columns: ClassVar[tuple[str, ...]] = ("text", "label")
    recipe: ClassVar[Recipe] = Recipe(
        steps=600, tokens=4096, rate=1e-3, warmup=60, decay=0.1, ema=0.99, evaluate_every=50, save_every=100, patience=5
    )

    text: str = option("", "column of the text: a name, or a number from 1 where there is no header")
    label: str = option("", "column of the class")
    start: str = option("", "begin with the encoder and tokenizer of this run (masked, embed) or checkpoint folder")
    vocabulary: int = option(8000, "tokens that the tokenizer learns at most")
    lower: bool = option(True, "the tokenizer makes all letters small")
    width: int = option(128, "of the hidden states")
    layers: int = option(2, "of the encoder")
    heads: int = option(4, "of the attention")
    dropout: float = option(0.3, "in training")
    longest: int = option(512, "tokens of a text at most")
    cut: bool = option(False, "leave out the middle of texts that are too long")
    pooling: str = option("mean", "mean, max, first or attention")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)

    def learn(self, rows: Sequence[Row]) -> Kit:
        labels = classes_of(rows)
        if len(labels) > max(2, len(rows) // 2):
            raise Trouble(f"{rows[0].place}: {len(labels)} classes in {len(rows)} rows; is --label the right column?")
        if self.start:
            kit = started(self.start)
            return Kit(kit.tokenizer, labels, kit.config)
        return Kit(learn((row.values[0] for row in rows), self.vocabulary, lower=self.lower), labels)

    def model(self, kit: Kit) -> nn.Module:
        return SequenceClassifier(encoder_config(kit, self, pooling=self.pooling, classes=len(kit.labels)))

    def begin(self, model: nn.Module) -> None:
        if self.start:
            assert isinstance(model, SequenceClassifier)
            model.encoder.load_state_dict(pretrained(self.start)[0].state_dict())

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> ClassifiedTexts:
        good, targets = known(kit.labels, rows, bad)
        ids, kept = self._encoded(kit, good, bad)
        return ClassifiedTexts(ids, [good[n].place for n in kept], targets[kept])

    def _encoded(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> tuple[list[np.ndarray], np.ndarray]:
        longest = self.longest if kit.config is None else min(self.longest, kit.config["positions"])
        return encoded(kit.texts(), rows, 0, bad, longest=longest, cut=self.cut)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        items = self.items(kit, rows, Bad())
        scores = _scores(model, items, len(kit.labels))
        targets = torch.from_numpy(items.targets)
        return {"loss": float(F.cross_entropy(scores.log(), targets))} | metrics.classification(scores, targets)

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        (train, ours), (held, theirs) = (known(kit.labels, rows, Bad()) for rows in (train, held))
        texts, held_texts = [row.values[0] for row in train], [row.values[0] for row in held]
        targets, held_targets = ours.tolist(), theirs.tolist()
        return {
            "most frequent class": baselines.most_frequent(targets, held_targets, len(kit.labels)),
            "TF-IDF + logistic regression": baselines.tfidf_regression(
                texts, targets, held_texts, held_targets, len(kit.labels)
            ),
        }

    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        ids, kept = self._encoded(kit, rows, bad)
        scores = _scores(model, ClassifiedTexts(ids, (), np.zeros(len(ids), np.int64)), len(kit.labels))
        for n, row in zip(kept, scores.tolist(), strict=True):
            best = int(np.argmax(row))
            more = dict(zip(kit.labels, row, strict=True))
            yield Prediction(rows[n].values[0], kit.labels[best], row[best], more, place=rows[n].place)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (text_graph(model),)


class ClassifiedTexts(TextItems):
    """Texts with their classes (n,)."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str], targets: np.ndarray) -> None:
        super().__init__(ids, places)
        self.targets = targets

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.ids.pack(chosen)
        return Batch(packed, torch.from_numpy(self.targets[chosen]), len(packed.values), len(chosen))


@torch.no_grad()
def _scores(model: nn.Module, items: ClassifiedTexts, classes: int) -> Tensor:
    """Probabilities (n, classes)."""
    scores = torch.zeros(len(items.sizes), classes)
    device = next(model.parameters()).device
    for chosen in track(in_order(items.sizes, budget=8192)):
        packed = items.ids.pack(chosen)
        scores[chosen] = model(packed.holding(packed.values.to(device))).float().softmax(-1).cpu()
    return scores
