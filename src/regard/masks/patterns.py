"""Masks that are told by positions: who stands where, which document, how long. All follow the queries' offset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import At, Frame, lead, shape_of
from regard.masks.algebra import Boxes, Intervals, Kinds, Mask, integers, kinds, made, positions_of, short, whole


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    def allows(self, at: At) -> Tensor:
        return at.j <= at.p

    def kinds(self, boxes: Boxes) -> Kinds:
        return kinds(full=boxes.j1 - 1 <= boxes.p0, empty=boxes.j0 > boxes.p1 - 1)

    def intervals(self, frame: Frame) -> Intervals:
        stop = positions_of(frame) + 1
        return np.zeros_like(stop), stop

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    before: int
    after: int

    def allows(self, at: At) -> Tensor:
        distance = at.j - at.p
        return (distance >= -self.before) & (distance <= self.after)

    def kinds(self, boxes: Boxes) -> Kinds:
        first, last = boxes.p0, boxes.p1 - 1
        return kinds(
            full=(last - self.before <= boxes.j0) & (boxes.j1 - 1 <= first + self.after),
            empty=(boxes.j1 - 1 < first - self.before) | (boxes.j0 > last + self.after),
        )

    def intervals(self, frame: Frame) -> Intervals:
        p = positions_of(frame)
        return p - self.before, p + self.after + 1

    def span(self) -> int:
        return max(16, 4 * (max(self.before, self.after) + 1))

    def __repr__(self) -> str:
        return f"window({self.before}, {self.after})"


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Mask):
    width: int
    step: int

    def allows(self, at: At) -> Tensor:
        distance = at.p - at.j
        return (distance.abs() <= self.width * self.step) & (distance % self.step == 0)

    def kinds(self, boxes: Boxes) -> Kinds:
        reach = self.width * self.step
        if self.step == 1:
            return Window(reach, reach).kinds(boxes)
        nearest, farthest = boxes.j0 - (boxes.p1 - 1), boxes.j1 - 1 - boxes.p0  # a box holds all distances between
        first, last = -(-nearest.clip(-reach) // self.step), farthest.clip(max=reach) // self.step
        return kinds(full=nearest == farthest, empty=first > last)

    def span(self) -> int:
        return max(16, 3 * (self.width + 1) * self.step)

    def __repr__(self) -> str:
        return f"dilated({self.width}, {self.step})"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    length: int | Tensor

    def allows(self, at: At) -> Tensor:
        return (at.j < _per_row(self.length, at)) | (at.j <= at.p)

    def kinds(self, boxes: Boxes) -> Kinds:
        length = _lengths(self.length)[_row(self.length, boxes)]
        return np.maximum(kinds(full=boxes.j1 <= length, empty=boxes.j0 >= length), Causal().kinds(boxes))

    def intervals(self, frame: Frame) -> Intervals:
        stop = np.maximum(positions_of(frame) + 1, _lengths(self.length)[:, None, None])
        return np.zeros_like(stop), stop

    def check(self, frame: Frame) -> None:
        _check_rows("length", self.length, frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(_lengths(self.length)), 1

    def span(self) -> int:
        return max(16, 2 * int(_lengths(self.length).max(initial=0)))

    def __repr__(self) -> str:
        return f"prefix({short(self.length)})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    lengths: int | Tensor

    def allows(self, at: At) -> Tensor:
        return at.j < _per_row(self.lengths, at)

    def kinds(self, boxes: Boxes) -> Kinds:
        length = _lengths(self.lengths)[_row(self.lengths, boxes)]
        return kinds(full=boxes.j1 <= length, empty=boxes.j0 >= length)

    def intervals(self, frame: Frame) -> Intervals:
        stop = np.broadcast_to(_lengths(self.lengths)[:, None, None], (len(_lengths(self.lengths)), 1, frame.Q))
        return np.zeros_like(stop), stop

    def check(self, frame: Frame) -> None:
        _check_rows("lengths", self.lengths, frame)
        if not torch.compiler.is_compiling() and (longest := int(_lengths(self.lengths).max(initial=0))) > frame.K:
            raise ValueError(
                f"lengths must be at most the number of keys, K = {frame.K}, but the longest is {longest}; "
                "lengths count keys, so a cache's length includes the tokens that it held before"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(_lengths(self.lengths)), 1

    def span(self) -> int:
        return max(16, int(_lengths(self.lengths).max(initial=0) * 4 // 3))

    def __repr__(self) -> str:
        return f"padding({short(self.lengths)})"


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    ids: Tensor  # (N,) or (B, N)

    def allows(self, at: At) -> Tensor:
        ids, p = lead(self.ids, 2).to(at.p.device), at.p
        if not ids.shape[1]:
            return p == at.j  # there are no keys, so there are no bits
        row = at.b if len(ids) > 1 else torch.zeros_like(at.b)
        inside = (p >= 0) & (p < ids.shape[1])
        return (ids[row, p.clamp(0, max(ids.shape[1] - 1, 0))] == ids[row, at.j]) & inside

    @cached_property
    def _ranks(self) -> np.ndarray:
        ids = lead(self.ids, 2).cpu().numpy()
        return np.unique(ids, return_inverse=True)[1].reshape(ids.shape).astype(np.int32)

    @cached_property
    def _runs(self) -> Intervals | None:
        """Where every token's document starts and stops, (B or 1, N); None if one is torn apart."""
        ranks = self._ranks
        starts, stops = np.empty(ranks.shape, np.int64), np.empty(ranks.shape, np.int64)
        for row, start, stop in zip(ranks, starts, stops, strict=True):
            cuts = np.flatnonzero(np.diff(row)) + 1
            edges = np.concatenate([[0], cuts, [len(row)]]) if len(row) else np.zeros(1, np.int64)
            if len(np.unique(row)) != len(edges) - 1:
                return None
            start[:], stop[:] = np.repeat(edges[:-1], np.diff(edges)), np.repeat(edges[1:], np.diff(edges))
        return starts, stops

    def intervals(self, frame: Frame) -> Intervals | None:
        if self._runs is None:
            return None
        if not frame.K:
            return np.zeros((1, 1, frame.Q), np.int64), np.zeros((1, 1, frame.Q), np.int64)
        p = positions_of(frame)[:, 0]
        p = np.broadcast_to(p, (max(len(p), len(self._ranks)), frame.Q))
        inside, at = (p >= 0) & (p < frame.K), p.clip(0, max(frame.K - 1, 0))
        row = np.arange(len(p))[:, None] if len(self._ranks) > 1 else np.zeros((len(p), 1), int)
        start, stop = (np.where(inside, edge[row, at], 0)[:, None] for edge in self._runs)
        return start, stop

    @cached_property
    def _ranges(self) -> _RangeMinMax:
        return _RangeMinMax(self._ranks)

    def kinds(self, boxes: Boxes) -> Kinds:
        row, n = (boxes.b if len(self._ranks) > 1 else np.zeros_like(boxes.b)), self._ranks.shape[1]
        p0, p1 = boxes.p0.clip(0, n), boxes.p1.clip(0, n)
        outside = p1 <= p0
        query_low, query_high = self._ranges(row, np.minimum(p0, n - 1), np.maximum(p1, 1))
        key_low, key_high = self._ranges(row, boxes.j0, boxes.j1)
        one = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
        return kinds(
            full=one & (p0 == boxes.p0) & (p1 == boxes.p1),
            empty=outside | (query_high < key_low) | (key_high < query_low),
        )

    def check(self, frame: Frame) -> None:
        if self.ids.shape[-1] != frame.K:
            raise ValueError(
                f"documents: ids must name a document for each of the {frame.K} keys, but has length "
                f"{self.ids.shape[-1]}; ids are per key, also for queries that start later (they stand at offset + i)"
            )
        if self.ids.dim() == 2 and len(self.ids) not in (1, frame.B):
            raise ValueError(f"documents: ids must be (K,) or (B, K) with B = {frame.B}, but is {shape_of(self.ids)}")

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(lead(self.ids, 2)), 1

    def made_for(self) -> tuple[int, int]:
        return self.ids.shape[-1], self.ids.shape[-1]

    def __repr__(self) -> str:
        return f"documents({short(self.ids)})"


@dataclass(frozen=True, eq=False, repr=False)
class Ranges(Mask):
    start: Tensor  # (N,) or (B, N), N positions of queries
    stop: Tensor

    def allows(self, at: At) -> Tensor:
        (start, stop), p = (lead(x, 2).to(at.j.device) for x in (self.start, self.stop)), at.p
        row, n = (at.b if len(start) > 1 else torch.zeros_like(at.b)), start.shape[1]
        if not n:
            return (p < 0) & (at.j < 0)
        q = p.clamp(0, n - 1)
        return (at.j >= start[row, q]) & (at.j < stop[row, q]) & (p >= 0) & (p < n)

    def intervals(self, frame: Frame) -> Intervals:
        start, stop = (lead(x, 2).cpu().numpy() for x in (self.start, self.stop))
        p, n = positions_of(frame)[:, 0], start.shape[1]
        p = np.broadcast_to(p, (max(len(p), len(start)), frame.Q))
        row = np.arange(len(p))[:, None] if len(start) > 1 else np.zeros((len(p), 1), int)
        inside, at = (p >= 0) & (p < n), p.clip(0, max(n - 1, 0))
        if not n:
            return np.zeros((1, 1, frame.Q), np.int64), np.zeros((1, 1, frame.Q), np.int64)
        return np.where(inside, start[row, at], 0)[:, None], np.where(inside, stop[row, at], 0)[:, None]

    def kinds(self, boxes: Boxes) -> Kinds:
        row, n = (boxes.b if len(lead(self.start, 2)) > 1 else np.zeros_like(boxes.b)), self.start.shape[-1]
        p0, p1 = boxes.p0.clip(0, n), boxes.p1.clip(0, n)
        if not n:
            return kinds(full=np.zeros(len(row), bool), empty=np.ones(len(row), bool))
        first, last = np.minimum(p0, n - 1), np.maximum(p1, 1)
        starts, stops = self._edges
        (low, inner_low), (inner_high, high) = starts(row, first, last), stops(row, first, last)
        return kinds(
            full=(inner_low <= boxes.j0) & (boxes.j1 <= inner_high) & (p0 == boxes.p0) & (p1 == boxes.p1),
            empty=(p1 <= p0) | (high <= boxes.j0) | (boxes.j1 <= low),
        )

    @cached_property
    def _edges(self) -> tuple[_RangeMinMax, _RangeMinMax]:
        start, stop = (lead(x, 2).cpu().numpy().astype(np.int32) for x in (self.start, self.stop))
        return _RangeMinMax(start), _RangeMinMax(stop)

    def check(self, frame: Frame) -> None:
        if self.start.dim() == 2 and len(self.start) not in (1, frame.B):
            raise ValueError(
                f"ranges: start and stop must be (N,) or (B, N) with B = {frame.B}, but are {shape_of(self.start)}"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(lead(self.start, 2)), 1

    def made_for(self) -> tuple[int, int]:
        return self.start.shape[-1], int(self.stop.max()) if self.stop.numel() else 0

    def __repr__(self) -> str:
        return f"ranges({short(self.start)}, {short(self.stop)})"


class _RangeMinMax:
    """Minimum and maximum of `values[row, start:stop]` for many ranges at once, by a sparse table of powers of two."""

    def __init__(self, values: np.ndarray) -> None:
        self.levels = [(values, values)]
        while (half := 1 << (len(self.levels) - 1)) * 2 <= values.shape[1]:
            low, high = self.levels[-1]
            low, high = np.minimum(low[:, :-half], low[:, half:]), np.maximum(high[:, :-half], high[:, half:])
            self.levels.append((low, high))

    def __call__(self, row: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        level = np.frexp(np.maximum(stop - start, 1))[1] - 1
        low, high = np.empty(len(row), np.int32), np.empty(len(row), np.int32)
        for k in np.unique(level):
            at = level == k
            a, b = start[at], np.maximum(stop[at] - (1 << k), start[at])
            low[at] = np.minimum(self.levels[k][0][row[at], a], self.levels[k][0][row[at], b])
            high[at] = np.maximum(self.levels[k][1][row[at], a], self.levels[k][1][row[at], b])
        return low, high


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    positions: tuple[tuple[int, ...], ...]  # one list for all batch rows, or one a row

    def allows(self, at: At) -> Tensor:
        longest = max(map(len, self.positions))
        padded = [(*row, *[-(2**62)] * (longest - len(row))) for row in self.positions]  # where nobody stands
        table = torch.tensor(padded, dtype=torch.int64, device=at.j.device).reshape(len(padded), longest)
        chosen = table[at.b if len(padded) > 1 else torch.zeros_like(at.b)]
        return (at.p.unsqueeze(-1) == chosen).any(-1) | (at.j.unsqueeze(-1) == chosen).any(-1)

    def kinds(self, boxes: Boxes) -> Kinds:
        among_rows, among_keys = self._count(boxes, boxes.p0, boxes.p1), self._count(boxes, boxes.j0, boxes.j1)
        return kinds(
            full=(among_rows == boxes.p1 - boxes.p0) | (among_keys == boxes.j1 - boxes.j0),
            empty=(among_rows == 0) & (among_keys == 0),
        )

    def _count(self, boxes: Boxes, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        counts = [np.searchsorted(row, stop) - np.searchsorted(row, start) for row in map(np.asarray, self.positions)]
        return counts[0] if len(counts) == 1 else np.stack(counts)[boxes.b, np.arange(len(start))]

    def check(self, frame: Frame) -> None:
        if len(self.positions) not in (1, frame.B):
            raise ValueError(
                f"global_tokens: positions must be one list, or one list for each of the {frame.B} batch rows, "
                f"but {len(self.positions)} lists came"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(self.positions), 1

    def span(self) -> int:
        return max(16, 2 * max((p + 1 for row in self.positions for p in row), default=0))

    def __repr__(self) -> str:
        lists = [list(row) for row in self.positions]
        return f"global_tokens({lists[0] if len(lists) == 1 else lists})"


def _lengths(value: int | Tensor) -> np.ndarray:
    return np.atleast_1d(np.asarray(value.cpu() if isinstance(value, Tensor) else value, np.int64))


def _per_row(value: int | Tensor, at: At) -> int | Tensor:
    if not isinstance(value, Tensor):
        return value
    return value.to(at.j.device)[at.b if len(value) > 1 else torch.zeros_like(at.b)]


def _row(value: int | Tensor, boxes: Boxes) -> np.ndarray:
    return boxes.b if len(_lengths(value)) > 1 else np.zeros_like(boxes.b)


def _check_rows(name: str, value: int | Tensor, frame: Frame) -> None:
    if isinstance(value, Tensor) and len(value) not in (1, frame.B):
        raise ValueError(
            f"{name} must be one number for each of the {frame.B} batch rows, but {len(value)} came; "
            "pass a plain number if all rows share it"
        )


def _integers(name: str, value: int | Sequence[int] | Tensor) -> int | Tensor:
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(name, value, 0)
    tensor = integers(name, value, "whole numbers, one or one per batch row")
    if tensor.dim() > 1:
        raise TypeError(f"{name} must be whole numbers, one or one per batch row, but is of shape {shape_of(tensor)}")
    if not torch.compiler.is_compiling() and tensor.numel() and int(tensor.min()) < 0:
        raise ValueError(f"{name} must not be negative, but the least is {int(tensor.min())}")
    return tensor.reshape(-1)


_CAUSAL = Causal()


def causal() -> Mask:
    """A query sees the keys up to its own place: `j <= p`.

    >>> import regard as rg
    >>> print(rg.causal().draw(4))
    █···
    ██··
    ███·
    ████
    """
    return _CAUSAL


def window(before: int, after: int) -> Mask:
    """A query sees `before` keys before its place, its own, and `after` after it: `p - before <= j <= p + after`.

    >>> import regard as rg
    >>> print(rg.window(1, 1).draw(4))
    ██··
    ███·
    ·███
    ··██
    """
    return Window(whole("before", before, 0), whole("after", after, 0))


def dilated(width: int, step: int) -> Mask:
    """Every `step`-th key on both sides, `width` of them: `abs(p - j) <= width * step`, `p - j` divisible by `step`.

    >>> import regard as rg
    >>> print(rg.dilated(1, 2).draw(5))
    █·█··
    ·█·█·
    █·█·█
    ·█·█·
    ··█·█
    """
    return Dilated(whole("width", width, 0), whole("step", step, 1))


def prefix(length: int | Sequence[int] | Tensor) -> Mask:
    """All see the first `length` keys, then it is causal: `j < length or j <= p`. One length, or one a batch row.

    >>> import regard as rg
    >>> print(rg.prefix(2).draw(4))
    ██··
    ██··
    ███·
    ████
    """
    return made(Prefix(_integers("length", length)))


def padding(lengths: int | Sequence[int] | Tensor) -> Mask:
    """Only the first `lengths[b]` keys of batch row `b` are real: `j < lengths[b]`.

    >>> import regard as rg
    >>> print(rg.padding([2]).draw(3, 4))
    ██··
    ██··
    ██··
    """
    return made(Padding(_integers("lengths", lengths)))


def documents(ids: Sequence[int] | Tensor) -> Mask:
    """Tokens see their own document: `ids[b, p] == ids[b, j]`, ids (K,) or (B, K).

    >>> import regard as rg
    >>> print(rg.documents([0, 0, 1, 1, 1]).draw())
    ██···
    ██···
    ··███
    ··███
    ··███
    """
    tensor = integers("documents: ids", ids, "whole numbers (K,) or (B, K)")
    if tensor.dim() not in (1, 2):
        raise ValueError(f"documents: ids must be whole numbers (K,) or (B, K), but is of shape {shape_of(tensor)}")
    return made(Documents(tensor))


def ranges(start: Sequence[int] | Tensor, stop: Sequence[int] | Tensor) -> Mask:
    """Every query has an interval of keys of its own: `start[b, p] <= j < stop[b, p]`; (N,) or (B, N) for N positions.

    What no vector of document ids can say: which source sentence each target token of a packed batch looks at. Queries
    are counted by position, so with keys of another kind than the queries use `offset=0`.

    >>> import regard as rg
    >>> print(rg.ranges([0, 0, 1], [2, 2, 3]).draw(3))
    ██·
    ██·
    ·██
    """
    first = integers("ranges: start", start, "whole numbers (N,) or (B, N)")
    last = integers("ranges: stop", stop, "whole numbers (N,) or (B, N)")
    if first.shape != last.shape or first.dim() not in (1, 2):
        raise ValueError(
            "ranges: start and stop must both be whole numbers (N,) or (B, N), but are of shapes "
            f"{shape_of(first)} and {shape_of(last)}"
        )
    return made(Ranges(first, last))


def global_tokens(positions: Iterable[int] | Iterable[Iterable[int]] | Tensor) -> Mask:
    """Some positions see all and are seen by all: `p` or `j` is one of them. One list, or one a batch row.

    >>> import regard as rg
    >>> print(rg.global_tokens([0]).draw(4))
    ████
    █···
    █···
    █···
    """
    rows: Any = positions.tolist() if isinstance(positions, Tensor) else positions
    try:
        rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
        nested = any(isinstance(row, Iterable) for row in rows)
        lists = tuple(tuple(sorted({_place(p) for p in row})) for row in (rows if nested else [rows]))
    except TypeError:
        raise TypeError(
            f"global_tokens: positions must be whole numbers, or a list of them per batch row, but is {positions!r}"
        ) from None
    if any(p < 0 for row in lists for p in row):
        raise ValueError(f"global_tokens: positions count from the first key, 0, and must not be negative: {rows!r}")
    return GlobalTokens(lists)


def _place(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)
