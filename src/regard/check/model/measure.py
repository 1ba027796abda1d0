"""Measure which tokens each layer sees in a scenario, and compare its outputs with those of each text alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.check.model.driver import Driver
from regard.check.model.layout import Row, Scenario, alone
from regard.check.model.probe import Layer, Probe
from regard.check.model.promise import Promise

FACTOR = 30.0  # of a changed token: shows in any output
CERTAIN = 1000.0  # factor that confirms that a token is not seen
TOKENS_PER_PASS = 32768  # of a batch, to bound the memory of one pass
MAX_COLUMNS = 24  # keys that are changed, one at a time, in a row


@dataclass(frozen=True)
class Visibility:
    """Which keys the queries of one row see.

    columns: the keys that were changed. seen: bools (Q, columns). queries, keys: the layout of the row.
    """

    queries: Row
    keys: Row
    columns: Tensor
    seen: Tensor

    def expected(self, promise: Promise) -> Tensor:
        return promise.visible(self.queries, self.keys)[:, self.columns]

    def wrong(self, promise: Promise) -> Tensor:
        """Pairs of a real query and a key that differ from the promise."""
        return (self.seen != self.expected(promise)) & self.queries.real[:, None]


@dataclass(frozen=True)
class Measurement:
    """What one layer does in a scenario: visibility by row, and outputs of the unchanged rows (B, N, C)."""

    rows: tuple[Visibility, ...]
    outputs: Tensor


def columns(row: Row, behind: Sequence[int]) -> Tensor:
    """The keys to change: all of a short row; of a long one, its ends, its middle, and the edges of windows."""
    length = len(row.texts)
    if length <= MAX_COLUMNS:
        return torch.arange(length)
    wanted = {0, 1, 2, length // 2, length - 3, length - 2, length - 1}
    edges = [length - 1 - back + near for back in behind for near in (-1, 0, 1)]
    starts = [n for n in range(1, length) if row.texts[n] != row.texts[n - 1]]
    wanted |= {n + near for n in starts for near in (-1, 0)} | {*edges}
    return torch.tensor(sorted(n for n in wanted if 0 <= n < length))


@dataclass(frozen=True)
class Alone:
    """The outputs for one text of a scenario without the others: of each layer, and of the model (1, N, C).

    row: the row of the text. places: where it lies, by sequence of the model.
    """

    row: int
    places: dict[str, slice]
    layers: dict[str, Tensor]
    model: Tensor


@dataclass
class Meter:
    """Measures the layers of a model with one attention implementation.

    tokens: the longest text. behind: reach of the windows, to change keys at their edges.
    """

    driver: Driver
    layers: list[Layer]
    tokens: int
    behind: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.problems: dict[str, str] = {}  # why layers could not be measured
        self.inside = ""  # the layer that raised an error
        self._alone: dict[Scenario, tuple[dict[str, Tensor], Tensor]] = {}

    @property
    def main(self) -> str:
        return "decoder" if self.driver.two_sequences else "self"

    def sequences(self, scenario: Scenario) -> dict[str, tuple[Row, ...]]:
        """The rows of each sequence of the model."""
        return {self.main: scenario.rows} | ({"encoder": scenario.encoder} if scenario.encoder else {})

    def visibility(self, scenario: Scenario, factor: float = FACTOR) -> dict[str, Measurement]:
        """Measure all layers: every row is repeated, each time with one other token changed."""
        rows = self.sequences(scenario)
        changed = {name: [columns(row, self.behind) for row in each] for name, each in rows.items()}
        variants = 2 * max(len(each) for lists in changed.values() for each in lists)  # each key times both factors
        step = max(TOKENS_PER_PASS // sum(len(row.texts) for each in rows.values() for row in each) - 1, 1)
        limit = max(4 * self.driver.precision, 1e-5)  # changes up to this are rounding
        outputs: dict[str, Tensor] = {}
        differs: dict[str, list[Tensor]] = {}
        for start in range(0, variants, step):
            part = range(start, min(start + step, variants))
            repeats = 1 + len(part)
            base = {
                name: torch.stack([row.tokens for row in each for _ in range(repeats)]) for name, each in rows.items()
            }
            tokens = {name: each.clone() for name, each in base.items()}
            for name, lists in changed.items():
                for n, keys in enumerate(lists):
                    for copy, variant in enumerate(part, n * repeats + 1):
                        if variant // 2 < len(keys):  # the same token times `factor`, or times `-factor`
                            tokens[name][copy, keys[variant // 2]] += (1 + variant % 2) * 2 * self.tokens
            for layer, output in self._outputs(scenario, base, tokens, factor, repeats):
                copies = output.unflatten(0, (-1, repeats))  # (B, 1 + variants, N, C)
                real = torch.stack([row.real for row in rows[self.main if layer.role == "cross" else layer.role]])
                differs.setdefault(layer.name, []).append(_differs(copies, real.to(output.device), limit))
                outputs.setdefault(layer.name, copies[:, 0])
        measurements = {}
        for layer in self.layers:
            if layer.name in outputs:
                keys_of = "encoder" if layer.role == "cross" else layer.role
                sides = rows[self.main if layer.role == "cross" else layer.role], rows[keys_of], changed[keys_of]
                each = torch.cat(differs[layer.name], dim=1).cpu()  # (B, variants, N)
                rows_seen = [
                    Visibility(query, key, places, differ[: 2 * len(places)].unflatten(0, (-1, 2)).any(1).T)
                    for query, key, places, differ in zip(*sides, each, strict=True)
                ]
                measurements[layer.name] = Measurement(tuple(rows_seen), outputs[layer.name])
        return measurements

    def alone(self, scenario: Scenario) -> Iterator[Alone]:
        """Measure every text of a scenario alone: without padding, mask or cache."""
        for n, row in enumerate(scenario.rows):
            source = next(scenario.encoder[n].slices()) if scenario.encoder else None
            for place, text in row.slices():
                single = alone(text, source[1] if source else None)
                if single not in self._alone:
                    self._alone[single] = self.run(single), self.driver.run(self.driver.calls(single))
                places = {self.main: place} | ({"encoder": source[0]} if source else {})
                yield Alone(n, places, *self._alone[single])

    def run(self, scenario: Scenario) -> dict[str, Tensor]:
        """The outputs (B, N, C) of every layer."""
        rows = self.sequences(scenario)
        tokens = {name: torch.stack([row.tokens for row in each]) for name, each in rows.items()}
        return {layer.name: output for layer, output in self._outputs(scenario, tokens, tokens, FACTOR, 1)}

    def _outputs(
        self, scenario: Scenario, queries: dict[str, Tensor], keys: dict[str, Tensor], factor: float, repeats: int
    ) -> list[tuple[Layer, Tensor]]:
        probe = Probe(self.layers, queries, keys, 2 * self.tokens, factor)
        self.inside = ""
        try:
            with probe.active():
                calls = self.driver.calls(scenario, repeats)
                if "logits_to_keep" in self.driver.parameters:
                    calls = [call | {"logits_to_keep": 1} for call in calls]  # only the layers are of interest
                self.driver.run(calls, probe.begin)
        except Exception:
            self.inside = probe.inside
            raise
        self.problems |= probe.problems
        return [
            (layer, probe.output(layer))
            for layer in probe.layers
            if probe.outputs[layer.name] and layer.name not in probe.problems
        ]


def _differs(copies: Tensor, real: Tensor, limit: float) -> Tensor:
    """Which outputs (B, 1 + variants, N, C) differ from the first of their row, as bools (B, variants, N)."""
    base = copies[:, :1]
    size = base.abs().amax(-1).masked_fill(~real[:, None], 0).amax(-1, keepdim=True)
    change = (copies[:, 1:] - base).abs().amax(-1) / size.clamp_min(torch.finfo(base.dtype).tiny)
    return ~(change <= limit)  # NaN differs


def merge(one: Measurement, other: Measurement) -> Measurement:
    """A key is seen if either measurement shows it."""
    rows = tuple(
        Visibility(a.queries, a.keys, a.columns, a.seen | b.seen) for a, b in zip(one.rows, other.rows, strict=True)
    )
    return Measurement(rows, one.outputs)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest of the values; infinite if one is not finite."""
    size = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)
    far = float((one - other).abs().max() / size)
    return far if far == far else float("inf")
