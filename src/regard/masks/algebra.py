"""The base class of masks and their algebra: `&`, `|` and `~`, comparison by value, printing and drawing.

A mask built from tensors keeps these tensors (`from_tensors.py`). Every call takes a `snapshot`: the mask with copies
of their current values. Engines and caches see snapshots only, so they are never out of date.

A mask has two main methods: `allows(at)` returns a bool for every entry (query, key), and `kinds(boxes)` classifies
boxes of entries as EMPTY, PARTIAL or FULL. With EMPTY < PARTIAL < FULL as numbers, `&` is the minimum, `|` the maximum
and `~` the difference from FULL (three-valued logic), so that a composed mask costs the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.cache import size_of
from regard.fingerprint import fingerprint
from regard.geometry import CallSlice, Frame, Indices
from regard.masks.compiled import snapshot_in_graph

EMPTY, PARTIAL, FULL = 0, 1, 2
Kinds = np.ndarray
Intervals = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Boxes:
    """Boxes of one grid: batch row b, head h, rows i0 <= i < i1, positions p0 <= p < p1, keys j0 <= j < j1."""

    frame: Frame
    size: tuple[int, int]  # rows and columns of a box not cut by an edge
    b: np.ndarray
    h: np.ndarray
    i0: np.ndarray
    i1: np.ndarray
    p0: np.ndarray
    p1: np.ndarray
    j0: np.ndarray
    j1: np.ndarray
    left: int = 0  # first key of the grid


def kinds(full: np.ndarray, empty: np.ndarray) -> Kinds:
    """Combine bool arrays into EMPTY and FULL, with PARTIAL elsewhere."""
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL)).astype(np.int8)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to; `True` means may attend.

    >>> import regard as rg
    >>> rg.causal() & rg.window(2, 0)
    causal() & window(2, 0)
    >>> (rg.causal() & rg.window(2, 0)) == (rg.causal() & rg.window(2, 0))
    True
    """

    def snapshot(self) -> Mask:
        """Return the mask with copies of its tensors' current values; the same object until they change."""
        return self

    def read(self) -> Mask:
        """Return a snapshot, even while torch.compile is tracing."""
        return self

    @property
    def live(self) -> bool:
        """Whether the mask may change: it reads tensors that it was given, or calls a function."""
        return False

    @property
    def small(self) -> bool:
        """Whether it holds neither tensors nor functions, so that it can be kept at no cost."""
        known = self.__dict__.get("_small")
        if known is None:
            known = not self.live and not size_of(self)
            object.__setattr__(self, "_small", known)
        return known

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it was given and reads in every call; a snapshot has none."""
        return ()

    def content(self) -> Hashable | None:
        """Return a small cache key, equal for equal snapshots, or None if the content cannot be fingerprinted."""
        if "_content" not in self.__dict__:
            parts = [_content(value) for value in self._values()]
            known = None if None in parts else (type(self).__name__, *parts)
            object.__setattr__(self, "_content", known)
        return self.__dict__["_content"]

    def check_unchanged(self) -> None:
        """Raise if a snapshot no longer gives the same answers, because a function reads something that has changed."""

    def drop_cached(self) -> None:
        """Drop the intermediate results kept for `kinds` and `intervals`."""

    def allows(self, at: Indices) -> Tensor:
        """Return a bool tensor that broadcasts to the indices: True means may attend."""
        raise NotImplementedError

    def kinds(self, boxes: Boxes) -> Kinds:
        """Return EMPTY, PARTIAL or FULL for every box. PARTIAL is always a valid answer."""
        return np.full(len(boxes.i0), PARTIAL, np.int8)

    def intervals(self, frame: Frame) -> Intervals | None:
        """Return the starts and stops, (B or 1, H or 1, Q), if every row allows one interval of keys, else None."""
        return None

    def check(self, frame: Frame) -> None:
        """Raise if the mask does not fit a call of this size."""

    def extent(self, frame: Frame) -> tuple[int, int]:
        """Return (B or 1, H or 1): 1 where all batch rows or heads share one pattern."""
        return 1, 1

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        """Return the mask for a slice of a call, with heads and keys counted from the start of the slice.

        Query positions stay the same: in the slice, the offset is `offset + rows.start - columns.start`.
        """
        if (part.heads.start, part.heads.stop, part.columns.start) == (0, frame.H, 0) and part.columns.stop == frame.K:
            return self
        return mark_traced(NarrowedMask(self, frame.H, frame.K, part.heads.start, part.columns.start))

    def preview_size(self) -> int:
        """Return a number of tokens that shows the pattern well."""
        return 16

    def expected_size(self) -> tuple[int, int] | None:
        """Return the number of queries and keys that the mask was built for, or None if it fits any."""
        return None

    @property
    def opaque(self) -> bool:
        """Whether boxes can only be classified by evaluating their entries."""
        return False

    @property
    def traced(self) -> bool:
        """Whether it was built inside a function traced by torch.compile, so that its values cannot be read."""
        return self.__dict__.get("_traced", False)

    def __and__(self, other: Mask) -> Mask:
        return mark_traced(And(_flatten(And, self, _mask(other))))

    def __or__(self, other: Mask) -> Mask:
        return mark_traced(Or(_flatten(Or, self, _mask(other))))

    def __rand__(self, other: Any) -> Mask:
        return _mask(other) & self

    def __ror__(self, other: Any) -> Mask:
        return _mask(other) | self

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with &, | and ~ instead of and, or and not")

    def __invert__(self) -> Mask:
        return mark_traced(Not(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        ours, theirs = self.snapshot(), other.snapshot()
        if type(ours) is not type(theirs):
            return False
        return ours is theirs or all(_same(a, b) for a, b in zip(ours._values(), theirs._values(), strict=True))

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            # Tensor values are left out: a hash must not change when they do.
            kept = [value for value in self._values() if not isinstance(value, Tensor)]
            known = hash((type(self).__name__, *kept))
            object.__setattr__(self, "_hash", known)
        return known

    def _values(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def draw(self, queries: int | None = None, keys: int | None = None, *, width: int = 32) -> str:
        """Return the mask as text: one character per tile, `█` full, `▒` partial, `·` empty.

        >>> import regard as rg
        >>> print(rg.window(1, 0).draw(4))
        █···
        ██··
        ·██·
        ··██
        """
        from regard.masks.draw import draw

        return draw(self, queries, keys, width)

    def __str__(self) -> str:
        return f"{self!r}\n{self.draw()}"


def _mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        hint = "; wrap a bool tensor as regard.dense(tensor)" if isinstance(value, Tensor) else ""
        raise TypeError(f"a mask can only be combined with a mask, got {type(value).__name__}{hint}")
    return value


def mark_traced(mask: Mask) -> Mask:
    """Mark a mask that is built from others while torch.compile traces, since it exists only in the graph."""
    if torch.compiler.is_compiling():
        object.__setattr__(mask, "_traced", True)
    return mask


def _flatten(kind: type, *parts: Mask) -> tuple[Mask, ...]:
    return tuple(inner for part in parts for inner in (part.parts if isinstance(part, kind) else (part,)))  # type: ignore[attr-defined]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def _content(value: Any) -> Hashable | None:
    if isinstance(value, Tensor):
        return fingerprint(value)
    if isinstance(value, Mask):
        return value.content()
    if isinstance(value, tuple):
        parts = tuple(map(_content, value))
        return None if None in parts else parts
    return value


class _Composite(Mask):
    """Base class of masks built from other masks; a snapshot if its parts are."""

    def _masks(self) -> tuple[Mask, ...]:
        raise NotImplementedError

    def _rebuild(self, masks: tuple[Mask, ...]) -> Mask:
        """Return the same composition of other masks."""
        raise NotImplementedError

    @property
    def traced(self) -> bool:
        return self.__dict__.get("_traced", False) or any(mask.traced for mask in self._masks())

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self._masks() for tensor in mask.tensors())

    def snapshot(self) -> Mask:
        if torch.compiler.is_compiling():
            if not self.traced:
                return snapshot_in_graph(self)
            return mark_traced(self._rebuild(tuple(mask.snapshot() for mask in self._masks())))
        return self.read() if self.live else self

    @property
    def live(self) -> bool:
        if "_live" not in self.__dict__:
            object.__setattr__(self, "_live", any(mask.live for mask in self._masks()))
        return self.__dict__["_live"]

    def read(self) -> Mask:
        masks = self._masks()
        now = tuple([mask.read() for mask in masks])
        if all(a is b for a, b in zip(now, masks, strict=True)):
            return self
        known = self.__dict__.get("_snapshot")
        if known is None or any(a is not b for a, b in zip(now, known._masks(), strict=True)):
            known = self._rebuild(now)
            object.__setattr__(self, "_snapshot", known)
        return known

    def check_unchanged(self) -> None:
        for mask in self._masks():
            mask.check_unchanged()

    def drop_cached(self) -> None:
        for mask in self._masks():
            mask.drop_cached()


@dataclass(frozen=True, eq=False)
class Combination(_Composite):
    """Base class of `&` and `|`."""

    parts: tuple[Mask, ...]

    def _masks(self) -> tuple[Mask, ...]:
        return self.parts

    def _rebuild(self, masks: tuple[Mask, ...]) -> Mask:
        return type(self)(masks)

    def check(self, frame: Frame) -> None:
        for part in self.parts:
            part.check(frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        extents = [part.extent(frame) for part in self.parts]
        return max(b for b, _ in extents), max(h for _, h in extents)

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        return mark_traced(type(self)(tuple([mask.narrow(frame, part) for mask in self.parts])))

    def preview_size(self) -> int:
        return max(part.preview_size() for part in self.parts)

    def expected_size(self) -> tuple[int, int] | None:
        return next((size for part in self.parts if (size := part.expected_size())), None)

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class And(Combination):
    """Allowed by every part."""

    def allows(self, at: Indices) -> Tensor:
        first, *rest = (part.allows(at) for part in self.parts)
        for bits in rest:
            first = first & bits
        return first

    def kinds(self, boxes: Boxes) -> Kinds:
        return np.minimum.reduce([part.kinds(boxes) for part in self.parts])

    def intervals(self, frame: Frame) -> Intervals | None:
        parts = []
        for part in self.parts:
            if (rows := part.intervals(frame)) is None:
                return None
            parts.append(rows)
        start, stop = parts[0]
        for a, b in parts[1:]:
            start, stop = np.maximum(start, a), np.minimum(stop, b)
        return start, stop

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Or) else repr(part) for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Combination):
    """Allowed by some part."""

    def allows(self, at: Indices) -> Tensor:
        first, *rest = (part.allows(at) for part in self.parts)
        for bits in rest:
            first = first | bits
        return first

    def kinds(self, boxes: Boxes) -> Kinds:
        return np.maximum.reduce([part.kinds(boxes) for part in self.parts])

    def __repr__(self) -> str:
        return " | ".join(repr(part) for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Not(_Composite):
    """Allowed where the part is not."""

    negated: Mask

    def _masks(self) -> tuple[Mask, ...]:
        return (self.negated,)

    def _rebuild(self, masks: tuple[Mask, ...]) -> Mask:
        return Not(*masks)

    def allows(self, at: Indices) -> Tensor:
        return ~self.negated.allows(at)

    def kinds(self, boxes: Boxes) -> Kinds:
        return FULL - self.negated.kinds(boxes)

    def intervals(self, frame: Frame) -> Intervals | None:
        if (rows := self.negated.intervals(frame)) is None:
            return None
        start, stop = np.broadcast_arrays(*rows)
        if (start <= 0).all():  # the last keys are left
            return np.maximum(stop, 0), np.full_like(stop, frame.K)
        return None

    def check(self, frame: Frame) -> None:
        self.negated.check(frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.negated.extent(frame)

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        return mark_traced(Not(self.negated.narrow(frame, part)))

    def preview_size(self) -> int:
        return self.negated.preview_size()

    def expected_size(self) -> tuple[int, int] | None:
        return self.negated.expected_size()

    @property
    def opaque(self) -> bool:
        return self.negated.opaque

    def __invert__(self) -> Mask:
        return self.negated

    def __repr__(self) -> str:
        return f"~({self.negated!r})" if isinstance(self.negated, Combination) else f"~{self.negated!r}"


@dataclass(frozen=True, eq=False, repr=False)
class NarrowedMask(_Composite):
    """A mask for a slice of a call, with heads and positions counted from the start of the slice."""

    mask: Mask
    heads: int  # H of the whole call
    keys: int  # K of the whole call
    top: int  # first head of the slice
    left: int  # first key of the slice

    def _masks(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def _rebuild(self, masks: tuple[Mask, ...]) -> Mask:
        return replace(self, mask=masks[0])

    def allows(self, at: Indices) -> Tensor:
        box = None
        if at.box is not None:
            batch, heads, rows, columns = at.box
            heads, columns = (
                slice(edge.start + first, edge.stop + first)
                for edge, first in ((heads, self.top), (columns, self.left))
            )
            box = batch, heads, rows, columns
        return self.mask.allows(Indices(self._whole(at.frame), at.b, at.h + self.top, at.i, at.j + self.left, box))

    def kinds(self, boxes: Boxes) -> Kinds:
        moved = {name: getattr(boxes, name) + self.left for name in ("p0", "p1", "j0", "j1")}
        whole, left = self._whole(boxes.frame), boxes.left + self.left
        return self.mask.kinds(replace(boxes, frame=whole, h=boxes.h + self.top, left=left, **moved))

    def intervals(self, frame: Frame) -> Intervals | None:
        if (rows := self.mask.intervals(self._whole(frame))) is None:
            return None
        start, stop = (edge[:, self.top : self.top + frame.H] if edge.shape[1] > 1 else edge for edge in rows)
        return start - self.left, stop - self.left

    def check(self, frame: Frame) -> None:
        self.mask.check(self._whole(frame))

    def extent(self, frame: Frame) -> tuple[int, int]:
        batch, heads = self.mask.extent(self._whole(frame))
        return batch, min(heads, frame.H)

    def preview_size(self) -> int:
        return self.mask.preview_size()

    @property
    def opaque(self) -> bool:
        return self.mask.opaque

    def _whole(self, frame: Frame) -> Frame:
        return Frame(frame.B, self.heads, frame.Q, self.keys, frame.offset + self.left)

    def __repr__(self) -> str:
        return f"({self.mask!r} from head {self.top}, key {self.left} on)"


def query_positions(frame: Frame) -> np.ndarray:
    """Return the positions of the queries, (B or 1, 1, Q): one row if all batch rows share an offset."""
    return np.asarray(frame.offsets(), np.int64)[:, None, None] + np.arange(frame.Q)
