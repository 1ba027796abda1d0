"""Blocks of keys chosen for each query, as by the indexer of a sparse attention: `selected`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import CallSlice, Frame, Indices, broadcasts, format_shape, pad_leading, to_numpy
from regard.masks.algebra import Boxes, Kinds, Mask, kinds, mark_traced
from regard.masks.arguments import check_int, check_int_tensor
from regard.masks.from_tensors import from_tensors


@dataclass(frozen=True, eq=False, repr=False)
class Selected(Mask):
    indices: Tensor  # (B or 1, H or 1, Q, n): numbers of blocks; negative ones select nothing
    size: int  # keys in a block
    left: int = -1  # first key of a slice of a call; -1 for a whole call

    def allows(self, at: Indices) -> Tensor:
        batch, heads, rows, _ = self.indices.shape
        b, h = (torch.zeros_like(x) if n == 1 else x for n, x in ((batch, at.b), (heads, at.h)))
        block = (at.j + max(self.left, 0)) // self.size
        entries = ((b * heads + h) * rows + at.i) * self._blocks + block.clamp(max=self._blocks - 1)
        known = torch.from_numpy(self._cells).to(at.j.device)
        if not len(known):
            return torch.zeros_like(entries, dtype=torch.bool)
        known = known[torch.searchsorted(known, entries).clamp(max=len(known) - 1)]
        return (known == entries) & (block < self._blocks)

    @cached_property
    def _blocks(self) -> int:
        """One past the last selected block."""
        return max(int(self.indices.max()) + 1, 1) if self.indices.numel() else 1

    @cached_property
    def _cells(self) -> np.ndarray:
        """The selected blocks as sorted numbers `row * blocks + block`, where rows count batch, heads and queries."""
        indices = to_numpy(self.indices)
        rows = np.arange(indices[..., 0].size).reshape(*indices.shape[:3], 1) if indices.shape[3] else indices
        return np.unique((rows * self._blocks + indices)[indices >= 0])

    def drop_cached(self) -> None:
        self.__dict__.pop("_cells", None)

    def kinds(self, boxes: Boxes) -> Kinds:
        (height, width), (batch, heads, rows, _) = boxes.size, self.indices.shape
        across = -(-(boxes.frame.K + width) // width)
        lead = (boxes.b if batch > 1 else 0) * heads + (boxes.h if heads > 1 else 0)
        row, block = np.divmod(self._cells, self._blocks)
        down = -(-rows // height)
        line = row // rows * down + row % rows // height
        start = block * self.size - max(self.left, 0)
        first, last = start.clip(0, boxes.frame.K), (start + self.size).clip(0, boxes.frame.K)
        marks, areas = [], []
        for step in range(-(-self.size // width) + 1):  # the boxes that a block overlaps
            column = first // width + step
            overlap = np.minimum(last, (column + 1) * width) - np.maximum(first, column * width)
            inside = overlap > 0
            marks.append((line * across + column)[inside])
            areas.append(overlap[inside])
        place, inverse = np.unique(np.concatenate(marks), return_inverse=True)
        area = np.bincount(inverse, np.concatenate(areas), len(place))
        box = (lead * down + boxes.i0 // height) * across + boxes.j0 // width
        if not len(place):
            return np.zeros(len(box), np.int8)
        at = np.searchsorted(place, box).clip(max=len(place) - 1)
        covered = np.where(place[at] == box, area[at], 0)
        return kinds(full=covered == (boxes.i1 - boxes.i0) * (boxes.j1 - boxes.j0), empty=covered == 0)

    def check(self, frame: Frame) -> None:
        batch, heads, rows, _ = self.indices.shape
        if not broadcasts(batch, frame.B) or not broadcasts(heads, frame.H) or rows != frame.Q:
            raise ValueError(
                f"selected: indices must be (Q, n), (H, Q, n) or (B, H, Q, n), where B and H may be 1, with "
                f"B, H, Q = {frame.B}, {frame.H}, {frame.Q}, but is {format_shape(self.indices)}"
            )
        if self.left < 0 and (self._blocks - 1) * self.size >= max(frame.K, 1):
            raise ValueError(
                f"selected: indices contain block {self._blocks - 1}, but {frame.K} keys have only "
                f"{-(-frame.K // self.size)} blocks of {self.size}"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.indices.shape[0], self.indices.shape[1]

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        heads = slice(None) if self.indices.shape[1] == 1 else part.heads
        left = max(self.left, 0) + part.columns.start
        return mark_traced(Selected(self.indices[:, heads, part.rows], self.size, left))

    def expected_size(self) -> tuple[int, int]:
        return self.indices.shape[2], self._blocks * self.size

    def __repr__(self) -> str:
        return f"selected({format_shape(self.indices)}, {self.size})"


def selected(indices: Tensor, size: int = 1) -> Mask:
    """Blocks of `size` keys chosen for each query: key `j` is visible if `j // size` is among `indices[b, h, i]`.

    `indices` is (Q, n), (H, Q, n) or (B, H, Q, n), where B and H may be 1; negative entries select nothing, repeated
    ones count once. The rows are those of the call: `offset` has no effect. Sparse attention with an indexer has this
    form: blocks in NSA and MoBA, single keys (`size=1`) in DeepSeek's. Combine with `causal()` if the choice may look
    ahead.

    >>> import regard as rg, torch
    >>> print(rg.selected(torch.tensor([[0, -1], [0, 2], [1, 2]]), 2).draw(3, 6))
    ██····
    ██··██
    ··████
    """
    return from_tensors(_selected, indices, size)


def _selected(indices: Any, size: int) -> Mask:
    form = "whole numbers (Q, n), (H, Q, n) or (B, H, Q, n)"
    tensor = check_int_tensor("selected: indices", indices, form)
    if not 2 <= tensor.dim() <= 4:
        raise ValueError(f"selected: indices must be {form}, but is of shape {format_shape(tensor)}")
    return Selected(pad_leading(tensor), check_int("size", size, 1))
