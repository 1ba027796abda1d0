"""The tokens of a tree that continue one sequence, as in speculative decoding: `tree`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import Frame, Indices, broadcasts, format_shape, pad_leading, to_numpy
from regard.masks.algebra import Boxes, Kinds, Mask, kinds
from regard.masks.arguments import check_int_tensor, short_repr
from regard.masks.by_position import RangeMinMax
from regard.masks.from_tensors import from_tensors


@dataclass(frozen=True, eq=False, repr=False)
class Tree(Mask):
    parents: Tensor  # (B or 1, N)
    enter: Tensor  # (B or 1, N): number of a node in depth-first order
    leave: Tensor  # (B or 1, N): one past the number of its last descendant

    def allows(self, at: Indices) -> Tensor:
        enter, leave = self.enter.to(at.j.device), self.leave.to(at.j.device)
        before = at.frame.K - enter.shape[1]  # keys before the tree
        bits = (at.j <= at.p) & (at.j < before)
        if not enter.shape[1]:
            return bits
        row = at.b if len(enter) > 1 else torch.zeros_like(at.b)
        query, key = ((x - before).clamp(0, enter.shape[1] - 1) for x in (at.p, at.j))
        number = enter[row, query]
        ancestor = (enter[row, key] <= number) & (number < leave[row, key])
        return torch.where((at.p >= before) & (at.j >= before), ancestor & (at.p < at.frame.K), bits)

    @cached_property
    def _ranges(self) -> tuple[RangeMinMax, RangeMinMax]:
        enter, leave = (to_numpy(x).astype(np.int32) for x in (self.enter, self.leave))
        return RangeMinMax(enter), RangeMinMax(leave)

    def drop_cached(self) -> None:
        self.__dict__.pop("_ranges", None)

    def kinds(self, boxes: Boxes) -> Kinds:
        nodes = self.enter.shape[1]
        before = boxes.frame.K - nodes
        full = (boxes.j1 - 1 <= boxes.p0) & (boxes.j1 <= before)
        empty = boxes.j0 > boxes.p1 - 1
        if nodes:
            inside = (boxes.p0 >= before) & (boxes.j0 >= before) & (boxes.p1 <= boxes.frame.K)
            row = boxes.b if len(self.enter) > 1 else np.zeros_like(boxes.b)
            p0, p1, j0, j1 = (np.where(inside, x - before, n) for x, n in (
                (boxes.p0, 0), (boxes.p1, 1), (boxes.j0, 0), (boxes.j1, 1)))  # fmt: skip
            enters, leaves = self._ranges
            (query_low, query_high), (key_low, key_high) = enters(row, p0, p1), enters(row, j0, j1)
            leave_low, leave_high = leaves(row, j0, j1)
            empty = empty | (inside & ((query_high < key_low) | (leave_high <= query_low)))
            full = full | (inside & (key_high <= query_low) & (query_high < leave_low))
        return kinds(full=full, empty=empty)

    def check(self, frame: Frame) -> None:
        batch, nodes = self.parents.shape
        if not broadcasts(batch, frame.B):
            raise ValueError(
                f"tree: parents must be (N,) or (B, N) with B = {frame.B}, but is {format_shape(self.parents)}"
            )
        if nodes > frame.K:
            raise ValueError(f"tree: parents has {nodes} nodes, but there are only {frame.K} keys")

    def extent(self, frame: Frame) -> tuple[int, int]:
        return len(self.parents), 1

    def preview_size(self) -> int:
        return self.parents.shape[1] + 4

    def __repr__(self) -> str:
        return f"tree({short_repr(self.parents[0] if len(self.parents) == 1 else self.parents)})"


def tree(parents: Sequence[int] | Tensor) -> Mask:
    """A tree of tokens that continue one sequence: each token attends to itself, its ancestors and all keys before.

    The last N positions are the nodes of the tree, `parents[i] < i` is the parent of node `i`, -1 if it continues the
    sequence directly. Positions before the tree are causal. `parents` is (N,) or (B, N). Speculative decoding verifies
    several continuations in one call this way.

    >>> import regard as rg
    >>> print(rg.tree([-1, 0, 0, 1]).draw(4, 6))
    ███···
    ████··
    ███·█·
    ████·█
    """
    return from_tensors(_tree, parents)


def _tree(parents: Any) -> Mask:
    tensor = check_int_tensor("tree: parents", parents, "whole numbers (N,) or (B, N)")
    if not broadcasts(tensor.dim(), 2):
        raise ValueError(f"tree: parents must be (N,) or (B, N), but is of shape {format_shape(tensor)}")
    table = to_numpy(pad_leading(tensor, 2))
    nodes = np.arange(table.shape[1])
    if ((table >= nodes) | (table < -1)).any():
        raise ValueError(
            f"tree: parents[i] must be an earlier node, or -1 for a node that continues the sequence, but are "
            f"{short_repr(tensor)}; sort the nodes so that parents come first"
        )
    size = np.ones_like(table)  # nodes of each subtree
    enter = np.zeros_like(table)
    for above, count, number in zip(table, size, enter, strict=True):
        for node in nodes[::-1]:
            if above[node] >= 0:
                count[above[node]] += count[node]
        free = np.zeros(len(nodes) + 1, table.dtype)  # the next number below each node, the last for the sequence
        for node in nodes:
            number[node] = free[above[node]]
            free[above[node]] += count[node]
            free[node] = number[node] + 1
    return Tree(pad_leading(tensor, 2), torch.from_numpy(enter), torch.from_numpy(enter + size))
