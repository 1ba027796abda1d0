"""Neighborhood attention on a line, an image or a volume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from regard.geometry import Frame, Indices
from regard.masks.algebra import Boxes, Intervals, Kinds, Mask, kinds, query_positions
from regard.masks.arguments import check_int
from regard.masks.by_position import RangeMinMax

Axes = tuple[int, ...]
Edges = tuple[np.ndarray, np.ndarray]  # starts and stops


@dataclass(frozen=True, eq=False, repr=False)
class Neighborhood(Mask):
    shape: Axes
    window: Axes
    dilation: Axes

    def allows(self, at: Indices) -> Tensor:
        p, j = at.p, at.j
        bits = (p >= 0) & (p < math.prod(self.shape))
        for n, width, step in reversed(list(zip(self.shape, self.window, self.dilation, strict=True))):
            start, place = _window_start(p % n, n, width, step), j % n
            bits = bits & (place >= start) & (place < start + width * step) & ((place - start) % step == 0)
            p, j = p // n, j // n
        return bits

    def intervals(self, frame: Frame) -> Intervals | None:
        if len(self.shape) > 1 or self.dilation != (1,):
            return None
        p = query_positions(frame)
        start = _window_start(torch.from_numpy(p), self.shape[0], self.window[0], 1).numpy()
        return start, np.where((p >= 0) & (p < self.shape[0]), start + self.window[0], start)

    @cached_property
    def _starts(self) -> list[RangeMinMax]:
        """The least and largest start of a window over ranges of coordinates, per axis."""
        return [
            RangeMinMax(_window_start(torch.arange(n), n, width, step).numpy()[None].astype(np.int32))
            for n, width, step in zip(self.shape, self.window, self.dilation, strict=True)
        ]

    def drop_cached(self) -> None:
        self.__dict__.pop("_starts", None)

    def kinds(self, boxes: Boxes) -> Kinds:
        total = math.prod(self.shape)
        p0, p1 = boxes.p0.clip(0, total), boxes.p1.clip(0, total)
        full, empty = (p0 == boxes.p0) & (p1 == boxes.p1), np.ones(len(p0), bool)
        for query, key in product(_cuboids(self.shape, p0, p1), _cuboids(self.shape, boxes.j0, boxes.j1)):
            real = np.logical_and.reduce([start < stop for start, stop in (*query, *key)])
            all_seen, none_seen = np.ones(len(p0), bool), ~real
            for axis, (ours, theirs) in enumerate(zip(query, key, strict=True)):
                width, step = self.window[axis], self.dilation[axis]
                first = np.where(real, ours[0], 0)
                low, high = self._starts[axis](np.zeros_like(first), first, np.where(real, ours[1], 1))
                none_seen |= (theirs[1] <= low) | (high + (width - 1) * step < theirs[0])
                inside = (high <= theirs[0]) & (theirs[1] <= low + (width - 1) * step + 1)
                all_seen &= inside & ((step == 1) | ((low == high) & (theirs[1] - theirs[0] == 1) & (low == theirs[0])))
            full &= all_seen | ~real
            empty &= none_seen
        return kinds(full=full & ~empty, empty=empty)

    def check(self, frame: Frame) -> None:
        total = math.prod(self.shape)
        if total != frame.K:
            raise ValueError(
                f"neighborhood: the shape {_show(self.shape)} has {total} positions, but there are {frame.K} keys"
            )

    def preview_size(self) -> int:
        return math.prod(self.shape)

    def expected_size(self) -> tuple[int, int]:
        return math.prod(self.shape), math.prod(self.shape)

    def __repr__(self) -> str:
        steps = "" if set(self.dilation) == {1} else f", {_show(self.dilation)}"
        return f"neighborhood({_show(self.shape)}, {_show(self.window)}{steps})"


def _window_start(place: Tensor, n: int, width: int, step: int) -> Tensor:
    """Return the first coordinate of each window: every `step`-th place, centred, moved inside at the borders."""
    phase = place % step
    count = torch.div(n - 1 - phase, step, rounding_mode="floor") + 1  # places of this phase
    first = torch.minimum((place // step - width // 2).clamp(min=0), count - width)
    return first * step + phase


def _cuboids(shape: Axes, start: np.ndarray, stop: np.ndarray) -> list[tuple[Edges, ...]]:
    """Split ranges of flat positions into cuboids, each a start and stop per axis; some of them are empty."""
    if len(shape) == 1:
        return [((start, stop),)]
    size = math.prod(shape[1:])
    first, last = start // size, np.maximum(stop - 1, start) // size
    one = first == last
    head = _cuboids(shape[1:], start - first * size, np.where(one, stop - first * size, size))
    tail = _cuboids(shape[1:], np.zeros_like(start), np.where(one, 0, stop - last * size))
    whole = tuple((np.zeros_like(start), np.full_like(start, n)) for n in shape[1:])
    return [
        *(((first, first + 1), *rest) for rest in head),
        ((first + 1, last), *whole),
        *(((last, last + 1), *rest) for rest in tail),
    ]


def _show(axes: Axes) -> str:
    return str(axes[0] if len(axes) == 1 else axes)


def neighborhood(shape: int | Sequence[int], window: int | Sequence[int], dilation: int | Sequence[int] = 1) -> Mask:
    """Neighborhood attention (NATTEN) on a line, image or volume of tokens in row-major order.

    Each query attends to the `window` keys around it on each of the one to three axes of `shape`, every
    `dilation`-th place. At the borders the window is moved inside, so every query has the same number of keys.

    >>> import regard as rg
    >>> print(rg.neighborhood(5, 3).draw())
    ███··
    ███··
    ·███·
    ··███
    ··███
    >>> rg.neighborhood((64, 64), (7, 7))
    neighborhood((64, 64), (7, 7))
    """
    sizes = _read_axes("shape", shape, None)
    windows, steps = _read_axes("window", window, len(sizes)), _read_axes("dilation", dilation, len(sizes))
    for n, width, step in zip(sizes, windows, steps, strict=True):
        if width * step > n:
            raise ValueError(
                f"neighborhood: window times dilation must be at most the size of its axis, but {width} x {step} > {n}"
            )
    return Neighborhood(sizes, windows, steps)


def _read_axes(name: str, value: int | Sequence[int], axes: int | None) -> Axes:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * (axes or 1)
    if not 1 <= len(values) <= 3 or (axes is not None and len(values) != axes):
        expected = "one to three numbers" if axes is None else f"one number, or one for each of the {axes} axes"
        raise ValueError(f"neighborhood: {name} must be {expected}, but is {value!r}")
    return tuple(check_int(f"neighborhood: {name}", each, 1) for each in values)
