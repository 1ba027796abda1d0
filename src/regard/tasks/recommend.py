"""What somebody chose before to what comes next."""

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
from regard.models.language import LanguageConfig
from regard.models.recommend import Recommender
from regard.progress import track
from regard.training import baselines, metrics
from regard.training.onnx_graphs import Graph, text_graph
from regard.training.recipe import Recipe, check_minimum, option
from regard.training.task import Batch, Metrics, Prediction, Task

NAMES = {
    "user": ("user", "userId", "user_id", "user_id:token"),
    "item": ("item", "movieId", "item_id", "item_id:token"),
    "time": ("time", "timestamp", "timestamp:float"),
}
MOVIELENS = {"user": "1", "item": "2", "time": "4"}  # u.data has no header: user, item, rating, time
ROWS = 512  # histories whose scores of all items are held at a time


@dataclass(frozen=True)
class Recommend(Task):
    """A causal encoder over histories of items. Of everybody, the last item is measured on, the one before chooses."""

    name: ClassVar[str] = "recommend"
    description: ClassVar[str] = "histories of items to what comes next"
    example: ClassVar[str] = "user,item,time\n7,Alien,881250949\n7,Aliens,881251000"
    columns: ClassVar[tuple[str, ...]] = ("user", "item", "time")
    splits_at_tabs: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, learning_rate=1e-3, warmup=100, weight_decay=0.1, ema=0.99, evaluate_every=100,
        save_every=200,
        patience=5,
    )  # fmt: skip
    held_out: ClassVar[int] = 1_000_000  # users at most: the last item of each

    user: str = option("", "column of the user: a name, or a number from 1 where there is no header")
    item: str = option("", "column of the item")
    time: str = option("", "column of the time: a number, or 2024-01-31T12:00")
    allow_repeats: bool = option(False, "what somebody has had may be recommended again")
    negatives: int = option(0, "items drawn for a step to tell the right ones from; 0 for all items")
    d_model: int = option(64, "width of the hidden states")
    layers: int = option(2, "of the encoder")
    heads: int = option(2, "of the attention")
    dropout: float = option(0.3, "in training")
    longest: int = option(200, "items of a history that the model sees at most: the last ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, layers=1, longest=1, negatives=0)

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """A row for each user, in the order of the file: the user, the items in order of time, and the first asked."""
        histories: dict[str, list[tuple[float, str]]] = {}
        places: dict[str, str] = {}
        for row in read_rows(source, self._columns(source), bad):
            user, item, time = row.values
            try:
                at = _parse_time(time)
            except ValueError:
                bad.add(f"{row.place}: expected a time, a number or such as 2024-01-31T12:00, but {time!r} came")
                continue
            histories.setdefault(user, []).append((at, item))
            places.setdefault(user, row.place)
        if not histories:
            raise UserError(f"{source}:1: expected at least one line that can be used, but there is none")
        return [
            Row(places[user], (user, tuple(item for _, item in sorted(history, key=lambda one: one[0])), 1))
            for user, history in histories.items()
        ]

    def _columns(self, source: str) -> dict[str, str]:
        columns = {name: getattr(self, name) for name in self.columns}
        if any(columns.values()):
            return columns
        cells = first_cells(source, BadRows(skip=True))
        found = {name: next((each for each in known if each in cells), "") for name, known in NAMES.items()}
        return MOVIELENS if ".data" in Path(source).suffixes else found

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Histories without their last item to train on, and whole ones, of which the last is asked for."""
        long = [row for row in rows if len(row.values[1]) > 2]
        if not long:
            raise UserError(f"{rows[0].place}: expected users with at least 3 items, but there are none; check --user")
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
        number, found = _item_ids(processor), []
        for row in rows:
            if any(item in number for item in row.values[1][:-1]):
                found.append(row)
            else:
                bad.add(f"{row.place}: the user {row.values[0]!r} has no item before the last that training had")
        return found

    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        assert isinstance(model, Recommender)
        asked, device = HeldOutItems(processor, rows), next(model.parameters()).device

        @torch.no_grad()
        def score(chosen: np.ndarray) -> Tensor:
            known = [torch.from_numpy(asked.before[n][-self.longest :]).to(device) for n in chosen]
            return model.next_item_logits(known).float().cpu()

        return metrics.ranking(asked.ranks(score, allow_repeats=self.allow_repeats))

    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        asked, number = HeldOutItems(processor, held_out), _item_ids(processor)
        past = [np.array([number[item] for item in row.values[1]], np.int64) for row in train]
        count = torch.from_numpy(np.bincount(np.concatenate(past), minlength=len(processor.labels)).astype(np.float32))
        neighbours = baselines.Neighbours(past, len(processor.labels))

        def near(chosen: np.ndarray, last: int = 0) -> Tensor:
            return torch.from_numpy(neighbours.scores([asked.before[n][-last:] for n in chosen]))

        ways: dict[str, Callable[[np.ndarray], Tensor]] = {
            "most popular": lambda chosen: count.expand(len(chosen), -1),
            "nearest items": near,
            "nearest to the last 10": partial(near, last=10),
        }
        return {
            name: metrics.ranking(asked.ranks(score, allow_repeats=self.allow_repeats)) for name, score in ways.items()
        }

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        """Everybody's history, all of it."""
        return self.read(source, bad)

    @torch.no_grad()
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Items that come next, those that are there already left out. Items are parted by | or tabs, or by spaces."""
        assert isinstance(model, Recommender)
        number, device = _item_ids(processor), next(model.parameters()).device
        for row in rows:
            history_items = parse_items(row.values[0], number) if len(row.values) == 1 else row.values[1]
            if not history_items:
                bad.add(f"{row.place}: expected items, parted by |, but there are none")
                continue
            if unknown := next((item for item in history_items if item not in number), None):
                bad.add(f"{unseen_message(row.place, 'item', unknown, processor.labels)}; part items by |")
                continue
            ids = torch.tensor([number[item] for item in history_items], device=device)
            logits = model(ids[None, -self.longest :])[0, -1].float()  # a whole call, which a viewer sees
            if not self.allow_repeats:
                logits[ids] = -torch.inf
            chances, best = (each.tolist() for each in logits.softmax(-1).topk(min(10, len(processor.labels))))
            found = {processor.labels[n]: chance for n, chance in zip(best, chances, strict=True) if chance > 0}
            listed = " | ".join(f"{item} {chance:.3f}" for item, chance in found.items())
            yield Prediction(row.values[0], listed, chances[0], {"items": found}, place=row.place)

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        record.set_tokens([processor.labels[n] for n in record.inputs["source"].tolist()])

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        return (text_graph(model),)


class Histories:
    """Histories in windows of at most `longest` items, each of which is asked what comes after."""

    def __init__(self, task: Recommend, processor: Processor, rows: Sequence[Row]) -> None:
        self.negatives, self.count = task.negatives, len(processor.labels)
        number, parts, after, places = _item_ids(processor), [], [], list[str]()
        for row in rows:
            ids = np.array([number.get(item, -1) for item in row.values[1]], np.int64)
            asked = (np.arange(len(ids)) >= row.values[2]) & (ids >= 0)
            ids, asked = ids[ids >= 0], asked[ids >= 0]  # what training has never seen
            for stop in range(len(ids), 1, -task.longest):
                start = max(0, stop - task.longest - 1)
                targets = np.where(asked[start + 1 : stop], ids[start + 1 : stop], -1)
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
    """What is asked of histories: what came before, and the last item, -1 where training has never seen it."""

    def __init__(self, processor: Processor, rows: Sequence[Row]) -> None:
        number = _item_ids(processor)
        known = [[number.get(item, -1) for item in row.values[1]] for row in rows]
        pairs = [(np.array([n for n in ids[:-1] if n >= 0], np.int64), ids[-1]) for ids in known]
        self.before = [before for before, _ in pairs]
        self.last = torch.tensor([last for _, last in pairs], dtype=torch.int64)

    def ranks(self, score: Callable[[np.ndarray], Tensor], *, allow_repeats: bool) -> Tensor:
        """Where the last item stands among all items, from 1; what was there before does not count, unless
        `allow_repeats`.

        Of equal scores the item that was named first wins. An item that was never seen is behind all others.
        """
        found = []
        for chosen in track(np.array_split(np.arange(len(self.before)), max(1, -(-len(self.before) // ROWS)))):
            scores, last = score(chosen).clone(), self.last[chosen]
            own = scores.gather(1, last.clamp(min=0)[:, None])
            if not allow_repeats:
                for row, n in enumerate(chosen):
                    scores[row, torch.from_numpy(self.before[n])] = -torch.inf
            first = torch.arange(scores.shape[1]) < last[:, None]
            rank = 1 + ((scores > own) | (scores == own) & first).sum(1)
            found.append(torch.where(last < 0, scores.shape[1] + 1, rank))
        return torch.cat(found)


def parse_items(text: str, known: dict[str, int]) -> list[str]:
    """The items that a text names: one, or parted by | or tabs, or by spaces.

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
    """Seconds, or whatever the number counts."""
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
