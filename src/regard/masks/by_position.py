"""Masks given per position: a document id per token, or an interval of keys per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import Frame, Indices, broadcasts, format_shape, pad_leading, to_numpy
from regard.masks.algebra import Boxes, Intervals, Kinds, Mask, kinds, query_positions
from regard.masks.arguments import check_int_tensor, short_repr
from regard.masks.from_tensors import from_tensors


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    ids: Tensor  # (N,) or (B, N)

    def allows(self, at: Indices) -> Tensor:
        ids, p = pad_leading(self.ids, 2).to(at.p.device), at.p
        if not ids.shape[1]:
            return p == at.j  # no keys: the result is empty
        row = at.b if len(ids) > 1 else torch.zeros_like(at.b)
        inside = (p >= 0) & (p < ids.shape[1])
        return (ids[row, p.clamp(0, max(ids.shape[1] - 1, 0))] == ids[row, at.j]) & inside

    @cached_property
    def _ranks(self) -> np.ndarray:
        ids = to_numpy(pad_leading(self.ids, 2))
        return np.unique(ids, return_inverse=True)[1].reshape(ids.shape).astype(np.int32)

    @cached_property
    def _runs(self) -> Intervals | None:
        """Return the start and stop of every token's document, (B or 1, N); None if a document is not contiguous."""
        ranks = self._ranks
        starts, stops = np.empty(ranks.shape, np.int64), np.empty(ranks.shape, np.int64)
        for row, start, stop in zip(ranks, starts, stops, strict=True):
            cuts = np.flatnonzero(np.diff(row)) + 1
            edges = np.concatenate([[0], cuts, [len(row)]]) if len(row) else np.zeros(1, np.int64)
            if len(np.unique(row)) != len(edges) - 1:
                return None
            start[:], stop[:] = np.repeat(edges[:-1], np.diff(edges)), np.repeat(edges[1:], np.diff(edges))
        return starts, stops

    def drop_cached(self) -> None:
        for name in ("_ranks", "_runs", "_ranges"):
            self.__dict__.pop(name, None)

    def intervals(self, frame: Frame) -> Intervals | None:
        return None if self._runs is None else _query_intervals(frame, *self._runs)

    @cached_property
    def _ranges(self) -> RangeMinMax:
        return RangeMinMax(self._ranks)

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
                f"documents: ids must have one id for each of the {frame.K} keys, but has length "
                f"{self.ids.shape[-1]}; ids are per key, also for queries that start later (at offset + i)"
            )
        if self.ids.dim() == 2 and not broadcasts(len(self.ids), frame.B):
            raise ValueError(
                f"documents: ids must be (K,) or (B, K) with B = {frame.B}, but is {format_shape(self.ids)}"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(pad_leading(self.ids, 2)), 1

    def expected_size(self) -> tuple[int, int]:
        return self.ids.shape[-1], self.ids.shape[-1]

    def __repr__(self) -> str:
        return f"documents({short_repr(self.ids)})"


@dataclass(frozen=True, eq=False, repr=False)
class Ranges(Mask):
    start: Tensor  # (N,) or (B, N), for N query positions
    stop: Tensor

    def allows(self, at: Indices) -> Tensor:
        (start, stop), p = (pad_leading(x, 2).to(at.j.device) for x in (self.start, self.stop)), at.p
        row, n = (at.b if len(start) > 1 else torch.zeros_like(at.b)), start.shape[1]
        if not n:
            return (p < 0) & (at.j < 0)
        q = p.clamp(0, n - 1)
        return (at.j >= start[row, q]) & (at.j < stop[row, q]) & (p >= 0) & (p < n)

    def intervals(self, frame: Frame) -> Intervals:
        return _query_intervals(frame, *(to_numpy(pad_leading(x, 2)) for x in (self.start, self.stop)))

    def kinds(self, boxes: Boxes) -> Kinds:
        row, n = (boxes.b if len(pad_leading(self.start, 2)) > 1 else np.zeros_like(boxes.b)), self.start.shape[-1]
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

    def drop_cached(self) -> None:
        self.__dict__.pop("_edges", None)

    @cached_property
    def _edges(self) -> tuple[RangeMinMax, RangeMinMax]:
        most = np.iinfo(np.int32)  # no key is beyond it
        start, stop = (to_numpy(pad_leading(x, 2)).clip(most.min, most.max) for x in (self.start, self.stop))
        return RangeMinMax(start.astype(np.int32)), RangeMinMax(stop.astype(np.int32))

    def check(self, frame: Frame) -> None:
        if self.start.dim() == 2 and not broadcasts(len(self.start), frame.B):
            raise ValueError(
                f"ranges: start and stop must be (N,) or (B, N) with B = {frame.B}, but are {format_shape(self.start)}"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(pad_leading(self.start, 2)), 1

    def expected_size(self) -> tuple[int, int]:
        return self.start.shape[-1], int(self.stop.max()) if self.stop.numel() else 0

    def __repr__(self) -> str:
        return f"ranges({short_repr(self.start)}, {short_repr(self.stop)})"


def _query_intervals(frame: Frame, starts: np.ndarray, stops: np.ndarray) -> Intervals:
    """Select the intervals of a call's queries from intervals per position, (B or 1, N); empty beyond N."""
    p, n = query_positions(frame)[:, 0], starts.shape[1]
    if not n:
        return np.zeros((1, 1, frame.Q), np.int64), np.zeros((1, 1, frame.Q), np.int64)
    p = np.broadcast_to(p, (max(len(p), len(starts)), frame.Q))
    row = np.arange(len(p))[:, None] if len(starts) > 1 else np.zeros((len(p), 1), int)
    inside, at = (p >= 0) & (p < n), p.clip(0, n - 1)
    return np.where(inside, starts[row, at], 0)[:, None], np.where(inside, stops[row, at], 0)[:, None]


class RangeMinMax:
    """Minimum and maximum of `values[row, start:stop]` for many ranges, by a sparse table of powers of two."""

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


def documents(ids: Sequence[int] | Tensor) -> Mask:
    """A mask that allows keys of the same document: `ids[b, p] == ids[b, j]`, ids (K,) or (B, K).

    >>> import regard as rg
    >>> print(rg.documents([0, 0, 1, 1, 1]).draw())
    ██···
    ██···
    ··███
    ··███
    ··███
    """
    return from_tensors(_documents, ids)


def _documents(ids: Any) -> Mask:
    tensor = check_int_tensor("documents: ids", ids, "whole numbers (K,) or (B, K)")
    if not broadcasts(tensor.dim(), 2):
        raise ValueError(f"documents: ids must be whole numbers (K,) or (B, K), but is of shape {format_shape(tensor)}")
    return Documents(tensor)


def ranges(start: Sequence[int] | Tensor, stop: Sequence[int] | Tensor) -> Mask:
    """An interval of keys per query: `start[b, p] <= j < stop[b, p]`; start and stop (N,) or (B, N) for N positions.

    Expresses patterns that document ids cannot, such as the source sentence that each target token of a packed batch
    attends to. Indexed by query position: if keys and queries are different sequences, use `offset=0`.

    >>> import regard as rg
    >>> print(rg.ranges([0, 0, 1], [2, 2, 3]).draw(3))
    ██·
    ██·
    ·██
    """
    return from_tensors(_ranges, start, stop)


def _ranges(start: Any, stop: Any) -> Mask:
    first = check_int_tensor("ranges: start", start, "whole numbers (N,) or (B, N)")
    last = check_int_tensor("ranges: stop", stop, "whole numbers (N,) or (B, N)")
    if first.shape != last.shape or not broadcasts(first.dim(), 2):
        raise ValueError(
            "ranges: start and stop must both be whole numbers (N,) or (B, N), but are of shapes "
            f"{format_shape(first)} and {format_shape(last)}"
        )
    return Ranges(first, last)
