"""Masks given by a rule on positions: windows, prefixes, lengths, global tokens. All respect the offset of queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import CallSlice, Frame, Indices, broadcasts, format_shape, to_numpy
from regard.masks.algebra import Boxes, Combination, Intervals, Kinds, Mask, Not, kinds, query_positions
from regard.masks.arguments import check_int, check_int_tensor, short_repr
from regard.masks.from_tensors import from_tensors


class DistanceMask(Mask):
    """Base class of masks that depend on the distance `j - p` only: every slice of a call has the same mask."""

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        return self


def mask_by_distance(mask: Mask | None) -> bool:
    """Whether the mask depends only on distances between queries and keys."""
    if isinstance(mask, Combination):
        return all(map(mask_by_distance, mask.parts))
    return mask_by_distance(mask.negated) if isinstance(mask, Not) else mask is None or isinstance(mask, DistanceMask)


@dataclass(frozen=True, eq=False, repr=False)
class Causal(DistanceMask):
    def allows(self, at: Indices) -> Tensor:
        return at.j <= at.p

    def kinds(self, boxes: Boxes) -> Kinds:
        return kinds(full=boxes.j1 - 1 <= boxes.p0, empty=boxes.j0 > boxes.p1 - 1)

    def intervals(self, frame: Frame) -> Intervals:
        stop = query_positions(frame) + 1
        return np.zeros_like(stop), stop

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, eq=False, repr=False)
class Window(DistanceMask):
    before: int
    after: int

    def allows(self, at: Indices) -> Tensor:
        distance = at.j - at.p
        return (distance >= -self.before) & (distance <= self.after)

    def kinds(self, boxes: Boxes) -> Kinds:
        first, last = boxes.p0, boxes.p1 - 1
        return kinds(
            full=(last - self.before <= boxes.j0) & (boxes.j1 - 1 <= first + self.after),
            empty=(boxes.j1 - 1 < first - self.before) | (boxes.j0 > last + self.after),
        )

    def intervals(self, frame: Frame) -> Intervals:
        p = query_positions(frame)
        return p - self.before, p + self.after + 1

    def preview_size(self) -> int:
        return max(16, 4 * (max(self.before, self.after) + 1))

    def __repr__(self) -> str:
        return f"window({self.before}, {self.after})"


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(DistanceMask):
    width: int
    step: int

    def allows(self, at: Indices) -> Tensor:
        distance = at.p - at.j
        return (distance.abs() <= self.width * self.step) & (distance % self.step == 0)

    def kinds(self, boxes: Boxes) -> Kinds:
        reach = self.width * self.step
        if self.step == 1:
            return Window(reach, reach).kinds(boxes)
        nearest, farthest = (
            boxes.j0 - (boxes.p1 - 1),
            boxes.j1 - 1 - boxes.p0,
        )  # a box holds all distances between these
        first, last = -(-nearest.clip(-reach) // self.step), farthest.clip(max=reach) // self.step
        return kinds(full=nearest == farthest, empty=first > last)

    def preview_size(self) -> int:
        return max(16, 3 * (self.width + 1) * self.step)

    def __repr__(self) -> str:
        return f"dilated({self.width}, {self.step})"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    length: int | Tensor

    def allows(self, at: Indices) -> Tensor:
        return (at.j < _per_row(self.length, at)) | (at.j <= at.p)

    def kinds(self, boxes: Boxes) -> Kinds:
        length = _lengths(self.length)[_row(self.length, boxes)]
        return np.maximum(kinds(full=boxes.j1 <= length, empty=boxes.j0 >= length), Causal().kinds(boxes))

    def intervals(self, frame: Frame) -> Intervals:
        stop = np.maximum(query_positions(frame) + 1, _lengths(self.length)[:, None, None])
        return np.zeros_like(stop), stop

    def check(self, frame: Frame) -> None:
        _check_rows("length", self.length, frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return _count(self.length), 1

    def preview_size(self) -> int:
        return max(16, 2 * int(_lengths(self.length).max(initial=0)))

    def __repr__(self) -> str:
        return f"prefix({short_repr(self.length)})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    lengths: int | Tensor

    def allows(self, at: Indices) -> Tensor:
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
                "lengths count keys, including the tokens already in a cache"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return _count(self.lengths), 1

    def preview_size(self) -> int:
        return max(16, int(_lengths(self.lengths).max(initial=0) * 4 // 3))

    def __repr__(self) -> str:
        return f"padding({short_repr(self.lengths)})"


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    positions: tuple[tuple[int, ...], ...]  # one list for all batch rows, or one per row

    def __hash__(self) -> int:
        return hash(GlobalTokens)  # positions may be read from a tensor, and change

    def allows(self, at: Indices) -> Tensor:
        longest = max(map(len, self.positions))
        padded = [
            (*row, *[-(2**62)] * (longest - len(row))) for row in self.positions
        ]  # padded with a position that no token has
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
        if not broadcasts(len(self.positions), frame.B):
            raise ValueError(
                f"global_tokens: positions must be one list, or one list for each of the {frame.B} batch rows, "
                f"got {len(self.positions)} lists"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(self.positions), 1

    def preview_size(self) -> int:
        return max(16, 2 * max((p + 1 for row in self.positions for p in row), default=0))

    def __repr__(self) -> str:
        lists = [list(row) for row in self.positions]
        return f"global_tokens({lists[0] if len(lists) == 1 else lists})"


def _lengths(value: int | Tensor) -> np.ndarray:
    return np.atleast_1d(np.asarray(to_numpy(value) if isinstance(value, Tensor) else value, np.int64))


def _count(value: int | Tensor) -> int:
    return len(value) if isinstance(value, Tensor) else 1


def _per_row(value: int | Tensor, at: Indices) -> int | Tensor:
    if not isinstance(value, Tensor):
        return value
    return value.to(at.j.device)[at.b if len(value) > 1 else torch.zeros_like(at.b)]


def _row(value: int | Tensor, boxes: Boxes) -> np.ndarray:
    return boxes.b if _count(value) > 1 else np.zeros_like(boxes.b)


def _check_rows(name: str, value: int | Tensor, frame: Frame) -> None:
    if isinstance(value, Tensor) and not broadcasts(len(value), frame.B):
        raise ValueError(
            f"{name} must have one number for each of the {frame.B} batch rows, got {len(value)}; "
            "pass an int if all rows share it"
        )


def _integers(name: str, value: int | Sequence[int] | Tensor) -> int | Tensor:
    if isinstance(value, int) and not isinstance(value, bool):
        return check_int(name, value, 0)
    tensor = check_int_tensor(name, value, "whole numbers, one or one per batch row")
    if tensor.dim() > 1:
        raise TypeError(
            f"{name} must be whole numbers, one or one per batch row, but is of shape {format_shape(tensor)}"
        )
    if not torch.compiler.is_compiling() and tensor.numel() and int(tensor.min()) < 0:
        raise ValueError(f"{name} must not be negative, but the smallest is {int(tensor.min())}")
    return tensor.reshape(-1)


_CAUSAL = Causal()


def causal() -> Mask:
    """A causal mask: `j <= p`.

    >>> import regard as rg
    >>> print(rg.causal().draw(4))
    █···
    ██··
    ███·
    ████
    """
    return _CAUSAL


def window(before: int, after: int) -> Mask:
    """A sliding window of `before` keys before the query and `after` after it: `p - before <= j <= p + after`.

    >>> import regard as rg
    >>> print(rg.window(1, 1).draw(4))
    ██··
    ███·
    ·███
    ··██
    """
    return Window(check_int("before", before, 0), check_int("after", after, 0))


def dilated(width: int, step: int) -> Mask:
    """A window of `width` keys per side with a stride of `step`: `abs(p - j) <= width * step`, divisible by `step`.

    >>> import regard as rg
    >>> print(rg.dilated(1, 2).draw(5))
    █·█··
    ·█·█·
    █·█·█
    ·█·█·
    ··█·█
    """
    return Dilated(check_int("width", width, 0), check_int("step", step, 1))


def prefix(length: int | Sequence[int] | Tensor) -> Mask:
    """A causal mask with a visible prefix: `j < length or j <= p`. One length, or one per batch row.

    >>> import regard as rg
    >>> print(rg.prefix(2).draw(4))
    ██··
    ██··
    ███·
    ████
    """
    return from_tensors(_prefix, length)


def _prefix(length: Any) -> Mask:
    return Prefix(_integers("length", length))


def padding(lengths: int | Sequence[int] | Tensor) -> Mask:
    """A padding mask: only the first `lengths[b]` keys of batch row `b` are visible, `j < lengths[b]`.

    >>> import regard as rg
    >>> print(rg.padding([2]).draw(3, 4))
    ██··
    ██··
    ██··
    """
    return from_tensors(_padding, lengths)


def _padding(lengths: Any) -> Mask:
    return Padding(_integers("lengths", lengths))


def global_tokens(positions: Iterable[int] | Iterable[Iterable[int]] | Tensor) -> Mask:
    """Global tokens: `p` or `j` is one of the positions, a list of integers or one list per batch row.

    >>> import regard as rg
    >>> print(rg.global_tokens([0]).draw(4))
    ████
    █···
    █···
    █···
    """
    return from_tensors(_global_tokens, positions)


def _global_tokens(positions: Any) -> Mask:
    rows: Any = positions.tolist() if isinstance(positions, Tensor) else positions
    try:
        rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
        nested = any(isinstance(row, Iterable) for row in rows)
        lists = tuple(tuple(sorted({_as_position(p) for p in row})) for row in (rows if nested else [rows]))
    except TypeError:
        raise TypeError(
            f"global_tokens: positions must be whole numbers, or a list of them per batch row, but is {positions!r}"
        ) from None
    if any(p < 0 for row in lists for p in row):
        raise ValueError(f"global_tokens: positions are counted from 0 and must not be negative, but are {rows!r}")
    return GlobalTokens(lists)


def _as_position(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)
