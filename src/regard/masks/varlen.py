"""Sequences of different lengths, packed one after another: `varlen`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.geometry import CallSlice, Frame, Indices, format_shape, to_numpy
from regard.masks.algebra import PARTIAL, Boxes, Intervals, Kinds, Mask, kinds, mark_traced
from regard.masks.arguments import check_int_tensor, short_repr
from regard.masks.from_tensors import from_tensors
from regard.masks.patterns import mask_by_distance

FAR = 1 << 40  # a position with more keys before it than any call has


@dataclass(frozen=True, eq=False, repr=False)
class Varlen(Mask):
    start: Tensor  # (Q,): the first key of the sequence that query row i belongs to
    stop: Tensor  # (Q,): one past its last key
    position: Tensor  # (Q,): the position of the query among the keys
    total: int  # the number of keys
    inside: tuple[Mask, ...]  # at most one mask that applies inside each sequence
    name: str

    def allows(self, at: Indices) -> Tensor:
        start, stop, position = (edge.to(at.j.device) for edge in (self.start, self.stop, self.position))
        bits = (at.j >= start[at.i]) & (at.j < stop[at.i])
        for mask in self.inside:
            bits = bits & mask.allows(Indices(replace(at.frame, offset=0), at.b, at.h, position[at.i], at.j))
        return bits

    def intervals(self, frame: Frame) -> Intervals | None:
        start, stop, position = map(to_numpy, (self.start, self.stop, self.position))
        for mask in self.inside:
            if (reach := mask.intervals(Frame(1, 1, 1, 1, FAR))) is None:
                return None
            before, after = (int(edge.flat[0]) - FAR for edge in reach)
            start, stop = np.maximum(start, position + before), np.minimum(stop, position + after)
        return start[None, None], stop[None, None]

    def kinds(self, boxes: Boxes) -> Kinds:
        start, stop, position = map(to_numpy, (self.start, self.stop, self.position))
        first, last = boxes.i0, boxes.i1 - 1
        one = (start[first] == start[last]) & (position[last] - position[first] == last - first)  # one sequence
        result = kinds(
            full=one & (start[first] <= boxes.j0) & (boxes.j1 <= stop[first]),
            empty=(boxes.j1 <= start[first]) | (stop[last] <= boxes.j0),
        )
        for mask in self.inside:
            p0, p1 = position[first], position[first] + (boxes.i1 - boxes.i0)
            result = np.minimum(result, np.where(one, mask.kinds(replace(boxes, p0=p0, p1=p1)), PARTIAL))
        return result.astype(np.int8)

    def check(self, frame: Frame) -> None:
        if (len(self.start), self.total) != (frame.Q, frame.K):
            raise ValueError(
                f"varlen: the last entries of cu_seqlens_q and cu_seqlens_k must be the numbers of queries and keys, "
                f"{frame.Q} and {frame.K}, but are {len(self.start)} and {self.total}"
            )

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        left, total = part.columns.start, part.columns.stop - part.columns.start
        if (part.rows.start, left, len(self.start), self.total) == (0, 0, part.rows.stop, total):
            return self
        start, stop, position = (edge[part.rows] - left for edge in (self.start, self.stop, self.position))
        return mark_traced(
            Varlen(start, stop, position, total, self.inside, f"({self.name} from row {part.rows.start})")
        )

    def expected_size(self) -> tuple[int, int]:
        return len(self.start), self.total

    def __repr__(self) -> str:
        return self.name


def varlen(
    cu_seqlens_q: Sequence[int] | Tensor,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    *,
    mask: Mask | None = None,
) -> Mask:
    """Sequences of different lengths, packed one after another: each query attends to the keys of its own sequence.

    Queries of sequence `s` are the rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, its keys those of `cu_seqlens_k`
    (FlashAttention's convention; without it, the same as the queries). `mask` applies inside each sequence, where the
    last query is at the last key: `causal()`, `window(...)`, `dilated(...)` or a combination of them. The rows are
    those of the call: `offset` has no effect.

    >>> import regard as rg
    >>> print(rg.varlen([0, 2, 5], mask=rg.causal()).draw())
    █····
    ██···
    ··█··
    ··██·
    ··███
    >>> print(rg.varlen([0, 1, 3], [0, 2, 5], mask=rg.causal()).draw())
    ██···
    ··██·
    ··███
    """
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"varlen: mask must be a mask such as causal(), but is {type(mask).__name__}")
    if mask is not None and not mask_by_distance(mask):
        raise ValueError(
            f"varlen: mask must depend on the distance of query and key only, such as causal() or window(...), but is "
            f"{mask!r}; combine other masks with varlen(...) by &"
        )
    given = (cu_seqlens_q,) if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    return from_tensors(_varlen, mask, *given)


def _varlen(mask: Mask | None, *given: Any) -> Mask:
    cut = [_read_cuts(name, value) for name, value in zip(("cu_seqlens_q", "cu_seqlens_k"), given, strict=False)]
    queries, keys = cut[0], cut[-1]
    if len(queries) != len(keys):
        raise ValueError(
            f"varlen: cu_seqlens_q and cu_seqlens_k must have one entry more than there are sequences, but have "
            f"{len(queries)} and {len(keys)} entries"
        )
    count, total = queries.diff(), int(queries[-1])
    start, stop, last = (edge.repeat_interleave(count) for edge in (keys[:-1], keys[1:], queries[1:]))
    position = stop - last + torch.arange(total)
    shown = [short_repr(each) for each in cut] + ([] if mask is None else [f"mask={mask!r}"])
    inside = () if mask is None else (mask,)
    return Varlen(start, stop, position, int(keys[-1]), inside, f"varlen({', '.join(shown)})")


def _read_cuts(name: str, value: Any) -> Tensor:
    cuts = check_int_tensor(f"varlen: {name}", value, "whole numbers (sequences + 1,)").cpu()
    if cuts.dim() != 1 or not len(cuts):
        raise ValueError(f"varlen: {name} must be (sequences + 1,), but is of shape {format_shape(cuts)}")
    if int(cuts[0]) or (len(cuts) > 1 and int(cuts.diff().min()) < 0):
        raise ValueError(f"varlen: {name} must start with 0 and not decrease, but is {short_repr(cuts)}")
    return cuts
