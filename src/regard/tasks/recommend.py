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

from regard.models.language import LanguageConfig
from regard.models.recommend import Recommender
from regard.tasks import baselines, metrics
from regard.tasks.batches import Ragged
from regard.tasks.data import Row, first_cells, read, split
from regard.tasks.graphs import Graph, text_graph
from regard.tasks.labels import unseen
from regard.tasks.stages import track
from regard.tasks.task import Batch, Figures, Kit, Prediction, Recipe, Task, check_least, option
from regard.tasks.trouble import Bad, Trouble

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
    does: ClassVar[str] = "histories of items to what comes next"
    example: ClassVar[str] = "user,item,time\n7,Alien,881250949\n7,Aliens,881251000"
    columns: ClassVar[tuple[str, ...]] = ("user", "item", "time")
    takes_tabs: ClassVar[bool] = True
    recipe: ClassVar[Recipe] = Recipe(
        steps=2000, tokens=4096, rate=1e-3, warmup=100, decay=0.1, ema=0.99, evaluate_every=100, save_every=200,
        patience=5,
    )  # fmt: skip
    held: ClassVar[int] = 1_000_000  # users at most: the last item of each

    user: str = option("", "column of the user: a name, or a number from 1 where there is no header")
    item: str = option("", "column of the item")
    time: str = option("", "column of the time: a number, or 2024-01-31T12:00")
    again: bool = option(False, "what somebody has had may be recommended again")
    others: int = option(0, "items drawn for a step to tell the right ones from; 0 for all items")
    width: int = option(64, "of the hidden states")
    layers: int = option(2, "of the encoder")
    heads: int = option(2, "of the attention")
    dropout: float = option(0.3, "in training")
    longest: int = option(200, "items of a history that the model sees at most: the last ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, layers=1, longest=1, others=0)

    def read(self, source: str, bad: Bad) -> list[Row]:
        """A row for each user, in the order of the file: the user, the items in order of time, and the first asked."""
        histories: dict[str, list[tuple[float, str]]] = {}
        places: dict[str, str] = {}
        for row in read(source, self._columns(source), bad):
            user, item, time = row.values
            try:
                at = _moment(time)
            except ValueError:
                bad(f"{row.place}: expected a time, a number or such as 2024-01-31T12:00, but {time!r} came")
                continue
            histories.setdefault(user, []).append((at, item))
            places.setdefault(user, row.place)
        if not histories:
            raise Trouble(f"{source}:1: expected at least one line that can be used, but there is none")
        return [
            Row(places[user], (user, tuple(item for _, item in sorted(held, key=lambda one: one[0])), 1))
            for user, held in histories.items()
        ]

    def _columns(self, source: str) -> dict[str, str]:
        said = {name: getattr(self, name) for name in self.columns}
        if any(said.values()):
            return said
        cells = first_cells(source, Bad(skip=True))
        found = {name: next((each for each in known if each in cells), "") for name, known in NAMES.items()}
        return MOVIELENS if ".data" in Path(source).suffixes else found

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Histories without their last item to train on, and whole ones, of which the last is asked for."""
        long = [row for row in rows if len(row.values[1]) > 2]
        if not long:
            raise Trouble(f"{rows[0].place}: expected users with at least 3 items, but there are none; check --user")
        chosen = long if held >= len(long) else split(long, lambda row: str(row.values[0]), held, seed)[1]
        users = {row.values[0] for row in chosen}
        train = [_without_last(row) if row.values[0] in users else row for row in rows]
        return train, [Row(row.place, (*row.values[:2], len(row.values[1]) - 1)) for row in chosen]

    def choose_by(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        return self.hold_out(rows, held, seed)

    def learn(self, rows: Sequence[Row]) -> Kit:
        labels = tuple(sorted({item for row in rows for item in row.values[1]}))
        if len(labels) < 2:
            raise Trouble(f"{rows[0].place}: expected at least 2 items, but all are {labels[0]!r}; check --item")
        return Kit(labels=labels)

    def model(self, kit: Kit) -> nn.Module:
        return Recommender(
            LanguageConfig(
                vocabulary=len(kit.labels),
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                hidden=4 * self.width,
                positions=self.longest,
                dropout=self.dropout,
            )
        )

    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Histories:
        return Histories(self, kit, rows)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model, Recommender)
        after, others = batch.targets
        return model.loss(batch.inputs, after, smoothing=smoothing, others=others if len(others) else None)

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        number, found = _numbers(kit), []
        for row in rows:
            if any(item in number for item in row.values[1][:-1]):
                found.append(row)
            else:
                bad(f"{row.place}: the user {row.values[0]!r} has no item before the last that training had")
        return found

    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        assert isinstance(model, Recommender)
        asked, device = Asked(kit, rows), next(model.parameters()).device

        @torch.no_grad()
        def score(chosen: np.ndarray) -> Tensor:
            known = [torch.from_numpy(asked.before[n][-self.longest :]).to(device) for n in chosen]
            return model.following(known).float().cpu()

        return metrics.ranking(asked.ranks(score, again=self.again))

    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        asked, number = Asked(kit, held), _numbers(kit)
        past = [np.array([number[item] for item in row.values[1]], np.int64) for row in train]
        count = torch.from_numpy(np.bincount(np.concatenate(past), minlength=len(kit.labels)).astype(np.float32))
        neighbours = baselines.Neighbours(past, len(kit.labels))

        def near(chosen: np.ndarray, last: int = 0) -> Tensor:
            return torch.from_numpy(neighbours.scores([asked.before[n][-last:] for n in chosen]))

        ways: dict[str, Callable[[np.ndarray], Tensor]] = {
            "most popular": lambda chosen: count.expand(len(chosen), -1),
            "nearest items": near,
            "nearest to the last 10": partial(near, last=10),
        }
        return {name: metrics.ranking(asked.ranks(score, again=self.again)) for name, score in ways.items()}

    def read_inputs(self, source: str, bad: Bad) -> Iterable[Row]:
        """Everybody's history, all of it."""
        return self.read(source, bad)

    @torch.no_grad()
    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        """Items that come next, those that are there already left out. Items are parted by | or tabs, or by spaces."""
        assert isinstance(model, Recommender)
        number, device = _numbers(kit), next(model.parameters()).device
        for row in rows:
            said = items_of(row.values[0], number) if len(row.values) == 1 else row.values[1]
            if not said:
                bad(f"{row.place}: expected items, parted by |, but there are none")
                continue
            if unknown := next((item for item in said if item not in number), None):
                bad(f"{unseen(row.place, 'item', unknown, kit.labels)}; part items by |")
                continue
            ids = torch.tensor([number[item] for item in said], device=device)
            logits = model(ids[None, -self.longest :])[0, -1].float()  # a whole call, which a viewer sees
            if not self.again:
                logits[ids] = -torch.inf
            chances, best = (each.tolist() for each in logits.softmax(-1).topk(min(10, len(kit.labels))))
            found = {kit.labels[n]: chance for n, chance in zip(best, chances, strict=True) if chance > 0}
            told = " | ".join(f"{item} {chance:.3f}" for item, chance in found.items())
            yield Prediction(row.values[0], told, chances[0], {"items": found}, place=row.place)

    def name_tokens(self, model: nn.Module, kit: Kit, record: Any, said: Prediction) -> None:
        record.tokens([kit.labels[n] for n in record.inputs["source"].tolist()])

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        return (text_graph(model),)


class Histories:
    """Histories in windows of at most `longest` items, each of which is asked what comes after."""

    def __init__(self, task: Recommend, kit: Kit, rows: Sequence[Row]) -> None:
        self.others, self.count = task.others, len(kit.labels)
        number, parts, after, places = _numbers(kit), [], [], list[str]()
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
        others = torch.from_numpy(random.integers(0, self.count, self.others))
        return Batch(packed, (after, others), len(packed.values), int((after >= 0).sum()))


class Asked:
    """What is asked of histories: what came before, and the last item, -1 where training has never seen it."""

    def __init__(self, kit: Kit, rows: Sequence[Row]) -> None:
        number = _numbers(kit)
        known = [[number.get(item, -1) for item in row.values[1]] for row in rows]
        pairs = [(np.array([n for n in ids[:-1] if n >= 0], np.int64), ids[-1]) for ids in known]
        self.before = [before for before, _ in pairs]
        self.last = torch.tensor([last for _, last in pairs], dtype=torch.int64)

    def ranks(self, score: Callable[[np.ndarray], Tensor], *, again: bool) -> Tensor:
        """Where the last item stands among all items, from 1; what was there before does not count, unless `again`.

        Of equal scores the item that was named first wins. An item that was never seen is behind all others.
        """
        found = []
        for chosen in track(np.array_split(np.arange(len(self.before)), max(1, -(-len(self.before) // ROWS)))):
            scores, last = score(chosen).clone(), self.last[chosen]
            own = scores.gather(1, last.clamp(min=0)[:, None])
            if not again:
                for row, n in enumerate(chosen):
                    scores[row, torch.from_numpy(self.before[n])] = -torch.inf
            first = torch.arange(scores.shape[1]) < last[:, None]
            rank = 1 + ((scores > own) | (scores == own) & first).sum(1)
            found.append(torch.where(last < 0, scores.shape[1] + 1, rank))
        return torch.cat(found)


def items_of(text: str, known: dict[str, int]) -> list[str]:
    """The items that a text names: one, or parted by | or tabs, or by spaces.

    >>> from regard.tasks.recommend import items_of
    >>> items_of("Alien | Star Wars", {}), items_of("Star Wars", {"Star Wars": 0}), items_of("7 12", {})
    (['Alien', 'Star Wars'], ['Star Wars'], ['7', '12'])
    """
    if text in known:
        return [text]
    parts = re.split(r"[|\t]", text) if re.search(r"[|\t]", text) else text.split()
    return [part.strip() for part in parts if part.strip()]


def _numbers(kit: Kit) -> dict[str, int]:
    return {label: n for n, label in enumerate(kit.labels)}


def _without_last(row: Row) -> Row:
    user, items, first = row.values
    return Row(row.place, (user, items[:-1], first))


def _moment(text: str) -> float:
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
