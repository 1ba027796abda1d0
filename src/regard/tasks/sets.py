"""Classification and regression of sets of points."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batches import Ragged, in_order
from regard.data.labels import collect_classes, unseen_message
from regard.data.processor import Processor
from regard.data.readers import Row
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_minimum
from regard.models.sets import SetConfig, SetTransformer
from regard.nn import Packed
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task


@dataclass(frozen=True)
class Form:
    """Mean and standard deviation of the features, and of the targets (`middle`, `spread`) in regression."""

    features: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    middle: float = 0.0
    spread: float = 1.0

    @staticmethod
    def from_processor(processor: Processor) -> Form:
        """Read and check the settings that `Sets.fit_processor` saved."""
        form = processor.settings_as(Form)
        if not len(form.mean) == len(form.deviation) == form.features or min(form.deviation, default=0) <= 0:
            raise UserError("config must have as many means and positive deviations as features")
        if form.spread <= 0:
            raise UserError(f"config.spread must be positive, but is {form.spread}")
        return form


@dataclass(frozen=True)
class Sets(Task):
    """A Set Transformer: induced points and attention pooling, invariant to the order of the elements."""

    name: ClassVar[str] = "sets"
    description: ClassVar[str] = "classification or regression of sets of points"
    example: ClassVar[str] = 'set,label\n0.5 1; 2 3.5; 1 1,round\n4 4; 5 5,straight\nor {"set": [[0.5, 1]], "label": 7}'
    columns: ClassVar[tuple[str, ...]] = ("set", "label")
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000,
        tokens=4096,
        learning_rate=1e-3,
        warmup=100,
        weight_decay=0.05,
        ema=0.99,
        evaluate_every=200,
        save_every=200,
    )

    set: str = option("", "column of the set, written `1 2; 3 4` or [[1, 2], [3, 4]]: its name, or its number (from 1)")
    label: str = option("", "column of the class, or of the number")
    number: bool = option(False, "predict a number instead of a class")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "blocks of attention through induced points")
    points: int = option(16, "induced points per block")
    seeds: int = option(1, "vectors to which a set is pooled")
    heads: int = option(4, "attention heads")
    dropout: float = option(0.0, "dropout probability")
    longest: int = option(1024, "maximum number of elements per set")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, points=1, seeds=1)

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return split(rows, _set_key, held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        sets, kept = self._read(rows, 0, BadRows(skip=True))
        if not sets:
            self._read(rows[:1], 0, BadRows())  # raises the error of the first row
        every = np.concatenate(sets)
        scale = np.maximum(every.std(0), 1e-6)
        config = {"features": every.shape[1], "mean": every.mean(0).tolist(), "deviation": scale.tolist()}
        if self.number:
            numbers = [value for n in kept if (value := _parse_number(rows[n].values[1])) is not None]
            if not numbers:
                raise UserError(f"{rows[0].place}: expected a number, got {rows[0].values[1]!r}; check --label")
            return Processor(
                config=config | {"middle": float(np.mean(numbers)), "spread": float(np.std(numbers)) or 1.0}
            )
        labels = collect_classes(rows)
        if len(labels) > max(2, len(rows) // 2):
            raise UserError(
                f"{rows[0].place}: {len(labels)} classes in {len(rows)} rows; are they numbers (use --number)?"
            )
        return Processor(labels=labels, config=config)

    def model(self, processor: Processor) -> nn.Module:
        return SetTransformer(
            SetConfig(
                features=Form.from_processor(processor).features,
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=2 * self.d_model,
                points=self.points,
                seeds=self.seeds,
                classes=1 if self.number else len(processor.labels),
                dropout=self.dropout,
            )
        )

    def _read(self, rows: Sequence[Row], features: int, bad: BadRows) -> tuple[list[np.ndarray], list[int]]:
        """Parse sets (n, features) and return the indices of their rows; features=0 takes those of the first set."""
        sets, kept = [], []
        for n, row in enumerate(rows):
            try:
                points = parse_set(row.values[0])
            except ValueError as error:
                bad.add(f"{row.place}: {error}")
                continue
            features = features or points.shape[1]
            if points.shape[1] != features:
                bad.add(f"{row.place}: expected elements of {features} numbers, got {points.shape[1]}")
            elif len(points) > self.longest:
                bad.add(
                    f"{row.place}: has {len(points)} elements, but the model takes at most {self.longest}; "
                    f"train with --longest {len(points)}"
                )
            else:
                sets.append(points)
                kept.append(n)
        return sets, kept

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> LabelledSets:
        form = Form.from_processor(processor)
        known, good, targets = {label: n for n, label in enumerate(processor.labels)}, [], []
        for row in rows:
            label = row.values[1]
            target = _parse_number(label) if self.number else known.get(label)
            if target is not None:
                good.append(row)
                targets.append((target - form.middle) / form.spread if self.number else target)
            elif self.number:
                bad.add(f"{row.place}: expected a number, got {label!r}")
            else:
                bad.add(unseen_message(row.place, "label", label, processor.labels))
        sets, kept = self._read(good, form.features, bad)
        kind = np.float32 if self.number else np.int64
        return LabelledSets(
            [_normalize(points, processor) for points in sets], [good[n].place for n in kept],
            np.array([targets[n] for n in kept], kind),
        )  # fmt: skip

    @property
    def supports_label_smoothing(self) -> bool:
        return not self.number

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        outputs = model(batch.inputs)
        if self.number:
            return F.mse_loss(outputs[:, 0], batch.targets, reduction="sum")
        return F.cross_entropy(outputs, batch.targets, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        items = self.dataset(processor, rows, BadRows())
        outputs, targets = _predict(model, items), torch.from_numpy(items.targets)
        if self.number:
            return metrics.regression(
                self._denormalize(processor, outputs[:, 0]), self._denormalize(processor, targets)
            )
        return {"loss": float(F.cross_entropy(outputs, targets))} | metrics.classification(outputs, targets)

    def _denormalize(self, processor: Processor, values: Tensor) -> np.ndarray:
        """Convert outputs of the model to the scale of the data."""
        form = Form.from_processor(processor)
        return values.double().numpy() * form.spread + form.middle

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        ours, theirs = (self.dataset(processor, rows, BadRows()) for rows in (train, held_out))
        if self.number:
            true = self._denormalize(processor, torch.from_numpy(theirs.targets))
            fitted = baselines.ridge_regression(ours.summary(), ours.targets, theirs.summary())
            return {
                "always the mean": metrics.regression(
                    np.full(len(true), self._denormalize(processor, torch.zeros(1))[0]), true
                ),
                "linear on count, mean, deviation, least and most": metrics.regression(
                    self._denormalize(processor, torch.from_numpy(fitted)), true
                ),
            }
        classes = len(processor.labels)
        return {
            "most frequent class": baselines.most_frequent(ours.targets.tolist(), theirs.targets.tolist(), classes),
            "logistic regression on count, mean, deviation, least and most": baselines.logistic_regression(
                ours.summary(), ours.targets, theirs.summary(), theirs.targets, classes
            ),
        }

    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield the class and its probability; in regression, the number as text and as score."""
        sets, kept = self._read(rows, Form.from_processor(processor).features, bad)
        outputs = _predict(
            model, LabelledSets([_normalize(points, processor) for points in sets], (), np.zeros(len(sets)))
        )
        for n, row in zip(kept, outputs, strict=True):
            if self.number:
                value = float(self._denormalize(processor, row)[0])
                yield Prediction(rows[n].values[0], f"{value:.6g}", value, place=rows[n].place)
                continue
            chances = row.softmax(-1).tolist()
            best = int(np.argmax(chances))
            more = dict(zip(processor.labels, chances, strict=True))
            yield Prediction(rows[n].values[0], processor.labels[best], chances[best], more, place=rows[n].place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        """Name elements by their features; induced points and seeds stay numbered."""
        form = Form.from_processor(processor)
        points = record.inputs["source"] * torch.tensor(form.deviation) + torch.tensor(form.mean)
        names = [" ".join(f"{value:.3g}" for value in point) for point in points.tolist()]
        for stream, entry in record.streams.items():
            if len(entry.tokens) == len(names) != self.points:
                record.set_tokens(**{stream: names})


class LabelledSets:
    """Sets of elements (n, features) with targets (sets,): classes or numbers."""

    def __init__(self, sets: Sequence[np.ndarray], places: Sequence[str], targets: np.ndarray) -> None:
        self.sets, self.places, self.targets = Ragged(sets), places, targets
        self.sizes = self.sets.lengths

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed = self.sets.pack(chosen)
        return Batch(packed, torch.from_numpy(self.targets[chosen]), len(packed.values), len(chosen))

    def summary(self) -> np.ndarray:
        """Summary statistics for baselines: count, and mean, deviation, minimum and maximum of each feature."""
        sets = [self.sets[n] for n in range(len(self.sets))]
        return np.stack([np.concatenate([[len(x)], x.mean(0), x.std(0), x.min(0), x.max(0)]) for x in sets])


def parse_set(text: str) -> np.ndarray:
    """Parse a set into (n, features): `1 2; 3 4`, [[1, 2], [3, 4]], or [1, 3] for single numbers.

    >>> from regard.tasks.sets import parse_set
    >>> parse_set("1 2; 3 4").tolist(), parse_set("[5, 6]").tolist()
    ([[1.0, 2.0], [3.0, 4.0]], [[5.0], [6.0]])
    """
    try:
        elements = json.loads(text) if text.lstrip().startswith("[") else _parse_elements(text)
        points = np.array([each if isinstance(each, list) else [each] for each in elements], np.float32)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"expected a set such as `1 2; 3 4` or [[1, 2], [3, 4]], got {text[:40]!r}") from error
    if points.ndim != 2 or not points.size:
        raise ValueError(f"expected a set of at least one element, got {text[:40]!r}")
    if not np.isfinite(points).all():
        raise ValueError(f"expected finite numbers, got {text[:40]!r}")
    return points


def _set_key(row: Row) -> str:
    """A key that is equal for sets of the same elements, in any order and notation."""
    try:
        return json.dumps(sorted(parse_set(row.values[0]).tolist()))
    except ValueError:  # reported by `dataset`
        return str(row.values[0])


def _parse_elements(text: str) -> list[list[float]]:
    return [[float(value) for value in part.split()] for part in text.split(";") if part.strip()]


def _normalize(points: np.ndarray, processor: Processor) -> np.ndarray:
    form = Form.from_processor(processor)
    return ((points - np.array(form.mean)) / np.array(form.deviation)).astype(np.float32)


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


@torch.no_grad()
def _predict(model: nn.Module, items: LabelledSets) -> Tensor:
    """Outputs of the model, (sets, classes)."""
    device = next(model.parameters()).device
    outputs = torch.zeros(len(items.sizes), model.config.classes)  # type: ignore[union-attr, arg-type]
    for chosen in track(in_order(items.sizes, budget=16384)):
        packed = items.sets.pack(chosen)
        outputs[chosen] = model(Packed(packed.values.to(device), packed.lengths)).float().cpu()
    return outputs
