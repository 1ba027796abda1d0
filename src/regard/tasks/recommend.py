"""Sequential recommendation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.batches import Ragged
from regard.data.labels import unseen_message
from regard.data.processor import Processor
from regard.data.readers import Row, first_cells, read_rows
from regard.data.splits import split
from regard.errors import BadRows, UserError
from regard.field_types import check_minimum
from regard.models.language import LanguageConfig
from regard.models.recommend import Recommender
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.recipe import Recipe, option
from regard.training.task import Batch, Metrics, Prediction, Task

NAMES = {
    "user": ("user", "userId", "user_id", "user_id:token"),
    "item": ("item", "movieId", "item_id", "item_id:token"),
    "time": ("time", "timestamp", "timestamp:float"),
}
MOVIELENS = {"user": "1", "item": "2", "time": "4"}  # u.data has no header: user, item, rating, time
ROWS = 512  # histories scored against all items per batch


@dataclass(frozen=True)
class Recommend(Task):
    """A causal encoder over item histories. A user's last item is for testing, the one before for validation."""

    name: ClassVar[str] = "recommend"
    description: ClassVar[str] = "sequential recommendation: the next item of a history"
    example: ClassVar[str] = "user,item,time\n7,Alien,881250949\n7,Aliens,881251000"
    columns: ClassVar[tuple[str, ...]] = ("user", "item", "time")
    splits_at_tabs: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, learning_rate=1e-3, warmup=100, weight_decay=0.1, ema=0.99, evaluate_every=100,
        save_every=200,
        patience=5,
    )  # fmt: skip
    held_out: ClassVar[int] = 1_000_000  # users at most, with their last item

    user: str = option("", "column of the user: its name, or its number (from 1) in a file without a header")
    item: str = option("", "column of the item")
    time: str = option("", "column of the time: a number, or 2024-01-31T12:00")
    allow_repeats: bool = option(False, "items of the history may be recommended again")
    negatives: int = option(0, "random negative items per step; 0 uses all items")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "encoder layers")
    heads: int = option(2, "attention heads")
    dropout: float = option(0.3, "dropout probability")
    longest: int = option(200, "maximum number of items per history; the last ones are kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, layers=1, longest=1, negatives=0)

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """Read one row per user, in file order: the user, the items by time, and the index of the first target."""
        histories: dict[str, list[tuple[float, str]]] = {}
        places: dict[str, str] = {}
        for row in read_rows(source, self._columns(source), bad):
            user, item, time = row.values
            try:
                at = _parse_time(time)
            except ValueError:
                bad.add(f"{row.place}: expected a time, as a number or like 2024-01-31T12:00, got {time!r}")
                continue
            histories.setdefault(user, []).append((at, item))
            places.setdefault(user, row.place)
        if not histories:
            raise UserError(f"{source}:1: no line can be used")
        return [
            Row(places[user], (user, tuple(item for _, item in sorted(history, key=lambda one: one[0])), 1))
            for user, history in histories.items()
        ]

    def _columns(self, source: str) -> dict[str, str]:
        columns = {name: getattr(self, name) for name in self.columns}
        if any(columns.values()):
            return columns
        cells = first_cells(source, BadRows(skip=True))
        detected = {name: next((each for each in known if each in cells), "") for name, known in NAMES.items()}
        return MOVIELENS if ".data" in Path(source).suffixes else detected

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Split into histories without their last item, and complete ones whose last item is the target."""
        long = [row for row in rows if len(row.values[1]) > 2]
        if not long:
            raise UserError(f"{rows[0].place}: expected users with at least 3 items, found none; check --user")
        chosen = long if held_out >= len(long) else split(long, lambda row: str(row.values[0]), held_out, seed)[1]
        users = {row.values[0] for row in chosen}
        train = [_without_last(row) if row.values[0] in users else row for row in rows]
        return train, [Row(row.place, (*row.values[:2], len(row.values[1]) - 1)) for row in chosen]

    def split_validation(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        return self.hold_out(rows, held_out, seed)

    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        labels = tuple(sorted({item for row in rows for item in row.values[1]}))
        if len(labels) < 2:
            raise UserError(f"{rows[0].place}: expected at least 2 items, but all are {labels[0]!r}; check --item")
        return Processor(labels=labels)

    def model(self, processor: Processor) -> nn.Module:
        return Recommender(
            LanguageConfig(
                vocabulary=len(processor.labels),
                d_model=self.d_model,
                layers=self.layers,
                heads=self.heads,
                d_hidden=4 * self.d_model,
                positions=self.longest,
                dropout=self.dropout,
            )
        )

    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Histories:
        return Histories(self, processor, rows)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Recommender)
        after, negatives = batch.targets
        return model.loss(batch.inputs, after, smoothing=smoothing, negatives=negatives if len(negatives) else None)

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        number, usable = _item_ids(processor), []
        for row in rows:
            if any(item in number for item in row.values[1][:-1]):
                usable.append(row)
            else:
                bad.add(f"{row.place}: the user {row.values[0]!r} has no item seen in training before the last one")
        return usable

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        assert isinstance(model, Recommender)
        held_out, device = HeldOutItems(processor, rows), next(model.parameters()).device

        @torch.no_grad()
        def score(chosen: np.ndarray) -> Tensor:
            known = [torch.from_numpy(held_out.before[n][-self.longest :]).to(device) for n in chosen]
            return model.next_item_logits(known).float().cpu()

        return metrics.ranking(held_out.ranks(score, allow_repeats=self.allow_repeats))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        targets, number = HeldOutItems(processor, held_out), _item_ids(processor)
        past = [np.array([number[item] for item in row.values[1]], np.int64) for row in train]
        count = torch.from_numpy(np.bincount(np.concatenate(past), minlength=len(processor.labels)).astype(np.float32))
        neighbours = baselines.Neighbours(past, len(processor.labels))

        def near(chosen: np.ndarray, last: int = 0) -> Tensor:
            return torch.from_numpy(neighbours.scores([targets.before[n][-last:] for n in chosen]))

        methods: dict[str, Callable[[np.ndarray], Tensor]] = {
            "most popular": lambda chosen: count.expand(len(chosen), -1),
            "nearest items": near,
            "nearest to the last 10": partial(near, last=10),
        }
        return {
            name: metrics.ranking(targets.ranks(score, allow_repeats=self.allow_repeats))
            for name, score in methods.items()
        }

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        """Read the complete history of every user."""
        return self.read(source, bad)

    @torch.no_grad()
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield the most probable next items. Items of an input are separated by | or tabs, or else by spaces."""
        assert isinstance(model, Recommender)
        number, device = _item_ids(processor), next(model.parameters()).device
        for row in rows:
            history_items = parse_items(row.values[0], number) if len(row.values) == 1 else row.values[1]
            if not history_items:
                bad.add(f"{row.place}: expected items separated by |, got none")
                continue
            if unknown := next((item for item in history_items if item not in number), None):
                bad.add(f"{unseen_message(row.place, 'item', unknown, processor.labels)}; separate items by |")
                continue
            ids = torch.tensor([number[item] for item in history_items], device=device)
            logits = model(ids[None, -self.longest :])[
                0, -1
            ].float()  # call the model, not a method of it, so that the viewer records it
            if not self.allow_repeats:
                logits[ids] = -torch.inf
            chances, best = (each.tolist() for each in logits.softmax(-1).topk(min(10, len(processor.labels))))
            items = {processor.labels[n]: chance for n, chance in zip(best, chances, strict=True) if chance > 0}
            listed = " | ".join(f"{item} {chance:.3f}" for item, chance in items.items())
            yield Prediction(row.values[0], listed, chances[0], {"items": items}, place=row.place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        record.set_tokens([processor.labels[n] for n in record.inputs["source"].tolist()])

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class Histories:
    """Histories in windows of at most `longest` items; each item predicts the next one."""

    def __init__(self, task: Recommend, processor: Processor, rows: Sequence[Row]) -> None:
        self.negatives, self.count = task.negatives, len(processor.labels)
        number, parts, after, places = _item_ids(processor), [], [], list[str]()
        for row in rows:
            ids = np.array([number.get(item, -1) for item in row.values[1]], np.int64)
            is_target = (np.arange(len(ids)) >= row.values[2]) & (ids >= 0)
            ids, is_target = ids[ids >= 0], is_target[ids >= 0]  # drop items not seen in training
            for stop in range(len(ids), 1, -task.longest):
                start = max(0, stop - task.longest - 1)
                targets = np.where(is_target[start + 1 : stop], ids[start + 1 : stop], -1)
                if (targets >= 0).any():
                    parts.append(ids[start : stop - 1])
                    after.append(targets)
                    places.append(row.place)
        self.ids, self.after = Ragged(parts), Ragged(after)
        self.places: Sequence[str] = places
        self.sizes = self.ids.lengths

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        packed, after = self.ids.pack(chosen), self.after.pack(chosen).values
        negatives = torch.from_numpy(random.integers(0, self.count, self.negatives))
        return Batch(packed, (after, negatives), len(packed.values), int((after >= 0).sum()))


class HeldOutItems:
    """Histories without their last item, and the last item as the target (-1 if it was not seen in training)."""

    def __init__(self, processor: Processor, rows: Sequence[Row]) -> None:
        number = _item_ids(processor)
        known = [[number.get(item, -1) for item in row.values[1]] for row in rows]
        pairs = [(np.array([n for n in ids[:-1] if n >= 0], np.int64), ids[-1]) for ids in known]
        self.before = [before for before, _ in pairs]
        self.last = torch.tensor([last for _, last in pairs], dtype=torch.int64)

    def ranks(self, score: Callable[[np.ndarray], Tensor], *, allow_repeats: bool) -> Tensor:
        """Rank of the last item among all items, from 1; items of the history are excluded, unless `allow_repeats`.

        Ties are broken by the lower index. An item not seen in training ranks last.
        """
        ranks = []
        for chosen in track(np.array_split(np.arange(len(self.before)), max(1, -(-len(self.before) // ROWS)))):
            scores, last = score(chosen).clone(), self.last[chosen]
            own = scores.gather(1, last.clamp(min=0)[:, None])
            if not allow_repeats:
                for row, n in enumerate(chosen):
                    scores[row, torch.from_numpy(self.before[n])] = -torch.inf
            first = torch.arange(scores.shape[1]) < last[:, None]
            rank = 1 + ((scores > own) | (scores == own) & first).sum(1)
            ranks.append(torch.where(last < 0, scores.shape[1] + 1, rank))
        return torch.cat(ranks)


def parse_items(text: str, known: dict[str, int]) -> list[str]:
    """Parse a text as one known item, or as items separated by | or tabs, or else by spaces.

    >>> from regard.tasks.recommend import parse_items
    >>> parse_items("Alien | Star Wars", {}), parse_items("Star Wars", {"Star Wars": 0}), parse_items("7 12", {})
    (['Alien', 'Star Wars'], ['Star Wars'], ['7', '12'])
    """
    if text in known:
        return [text]
    parts = re.split(r"[|\t]", text) if re.search(r"[|\t]", text) else text.split()
    return [part.strip() for part in parts if part.strip()]


def _item_ids(processor: Processor) -> dict[str, int]:
    return {label: n for n, label in enumerate(processor.labels)}


def _without_last(row: Row) -> Row:
    user, items, first = row.values
    return Row(row.place, (user, items[:-1], first))


def _parse_time(text: str) -> float:
    """Parse a number, or an ISO date as seconds."""
    try:
        at = float(text)
    except ValueError:
        try:
            at = datetime.fromisoformat(text).timestamp()
        except (OverflowError, OSError) as error:
            raise ValueError(text) from error
    if not np.isfinite(at):
        raise ValueError(text)
    return at
