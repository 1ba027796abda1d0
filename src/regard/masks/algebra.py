"""Masks are values: they combine with `&`, `|` and `~`, compare by value, print their formula and draw themselves.

A mask of tensors holds the tensors that it was given (`from_tensors.py`). Every call takes a `snapshot`: the mask with
copies of what its tensors hold now. Engines and caches see snapshots only, so none of them can be out of date.

A mask answers two questions. Which places are allowed: `allows(at)`, bits. What is a box of places: `kinds(boxes)`,
empty, partial or full. With EMPTY < PARTIAL < FULL as numbers, `&` is the minimum, `|` the maximum and `~` the
difference from FULL, which is three-valued logic: a composed mask costs what its parts cost.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from regard.cache import size_of
from regard.fingerprint import fingerprint
from regard.geometry import CallSlice, Frame, Indices, format_shape

EMPTY, PARTIAL, FULL = 0, 1, 2
Kinds = np.ndarray
Intervals = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Boxes:
    """Many boxes of one grid: batch row b, head h, rows i0 <= i < i1, positions p0 <= p < p1, keys j0 <= j < j1."""

    frame: Frame
    size: tuple[int, int]  # rows and columns of a box that no edge cuts
    b: np.ndarray
    h: np.ndarray
    i0: np.ndarray
    i1: np.ndarray
    p0: np.ndarray
    p1: np.ndarray
    j0: np.ndarray
    j1: np.ndarray
    left: int = 0  # the key at which the grid begins


def kinds(full: np.ndarray, empty: np.ndarray) -> Kinds:
    """FULL and EMPTY where told, PARTIAL elsewhere."""
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL)).astype(np.int8)


@dataclass(frozen=True, eq=False)
class Mask:
    """Who may look at whom. `True` means may attend.

    >>> import regard as rg
    >>> rg.causal() & rg.window(2, 0)
    causal() & window(2, 0)
    >>> (rg.causal() & rg.window(2, 0)) == (rg.causal() & rg.window(2, 0))
    True
    """

    def snapshot(self) -> Mask:
        """The mask with copies of what its tensors hold now; the same object until they change."""
        return self

    def read(self) -> Mask:
        """A snapshot, also where torch.compile is tracing."""
        return self

    @property
    def live(self) -> bool:
        """Whether it may change: it looks at tensors that it was given, or at what a function reads."""
        return False

    @property
    def small(self) -> bool:
        """Whether it holds neither tensors nor functions, so that keeping it costs nothing."""
        known = self.__dict__.get("_small")
        if known is None:
            known = not self.live and not size_of(self)
            object.__setattr__(self, "_small", known)
        return known

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it was given and looks at in every call; a snapshot has none."""
        return ()

    def content(self) -> Hashable | None:
        """What caches know a snapshot by: equal for equal masks, and small. None where nothing can tell."""
        if "_content" not in self.__dict__:
            parts = [_content(value) for value in self._values()]
            known = None if None in parts else (type(self).__name__, *parts)
            object.__setattr__(self, "_content", known)
        return self.__dict__["_content"]

    def check_unchanged(self) -> None:
        """Raise if a snapshot would not answer as it did when it was taken: a function may read what has changed."""

    def drop_cached(self) -> None:
        """Drop what was worked out to answer `kinds` and `intervals`."""

    def allows(self, at: Indices) -> Tensor:
        """Bool tensor that broadcasts to the places: may they be attended to?"""
        raise NotImplementedError

    def kinds(self, boxes: Boxes) -> Kinds:
        """EMPTY, PARTIAL or FULL for every box. PARTIAL is always a right answer."""
        return np.full(len(boxes.i0), PARTIAL, np.int8)

    def intervals(self, frame: Frame) -> Intervals | None:
        """For a mask whose rows are intervals of keys: their starts and stops, (B or 1, H or 1, Q)."""
        return None

    def check(self, frame: Frame) -> None:
        """Raise if the mask does not fit a call of this size."""

    def extent(self, frame: Frame) -> tuple[int, int]:
        """(B or 1, H or 1): how many different masks it is over batch rows and heads."""
        return 1, 1

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        """The mask of a part of a call of this frame: heads and keys are counted from the first that the part has.

        Queries stand where they stood: in the part their offset is `offset + rows.start - columns.start`.
        """
        if (part.heads.start, part.heads.stop, part.columns.start) == (0, frame.H, 0) and part.columns.stop == frame.K:
            return self
        return NarrowedMask(self, frame.H, frame.K, part.heads.start, part.columns.start)

    def preview_size(self) -> int:
        """A number of tokens that shows the pattern well."""
        return 16

    def expected_size(self) -> tuple[int, int] | None:
        """The number of queries and keys that the mask was made for, if it was."""
        return None

    @property
    def opaque(self) -> bool:
        """Whether only its bits tell what a box is."""
        return False

    @property
    def traced(self) -> bool:
        """Whether it was made inside a function that torch.compile traces: then it cannot be read."""
        return self.__dict__.get("_traced", False)

    def __and__(self, other: Mask) -> Mask:
        return _mark_traced(And(_flatten(And, self, _mask(other))))

    def __or__(self, other: Mask) -> Mask:
        return _mark_traced(Or(_flatten(Or, self, _mask(other))))

    def __rand__(self, other: Any) -> Mask:
        return _mask(other) & self

    def __ror__(self, other: Any) -> Mask:
        return _mask(other) | self

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with &, | and ~ instead of and, or and not")

    def __invert__(self) -> Mask:
        return _mark_traced(Not(self))

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
            # What tensors hold does not count: a hash must stay as it is when they change.
            kept = [value for value in self._values() if not isinstance(value, Tensor)]
            known = hash((type(self).__name__, *kept))
            object.__setattr__(self, "_hash", known)
        return known

    def _values(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def draw(self, queries: int | None = None, keys: int | None = None, *, width: int = 32) -> str:
        """The mask as text: one character a tile, `█` full, `▒` partial, `·` empty.

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
        raise TypeError(f"masks combine with masks, not with {type(value).__name__}{hint}")
    return value


def _mark_traced(mask: Mask) -> Mask:
    """The mask, with a note if a graph that torch.compile traces combines it: then only the graph has it."""
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


# torch.compile reads a mask once, while it traces. The graph checks in every call that the tensors still hold the same.


def _snapshot_now(mask: Mask) -> str:
    """Take a snapshot, which the mask keeps, and return what it was taken of."""
    mask.read()
    return repr([fingerprint(tensor) for tensor in mask.tensors()])


_snapshot_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
_CHECKED = torch.zeros(0)  # the check says that it writes here, so that no compiler leaves it out


@torch.library.custom_op("regard::check_mask", mutates_args=("checked",))
def _check_mask(checked: Tensor, tensors: list[Tensor], before: str) -> None:
    if repr([fingerprint(tensor) for tensor in tensors]) != before:
        raise RuntimeError(
            "a tensor of a mask was changed after torch.compile had read it; make the mask inside the compiled "
            "function, of a tensor that is an argument, or call torch.compiler.reset() after the change"
        )


@_check_mask.register_fake
def _(checked: Tensor, tensors: list[Tensor], before: str) -> None:
    return None


def snapshot_in_graph(mask: Mask) -> Mask:
    """The snapshot of a mask that was made before the graph."""
    if not mask.tensors():
        return mask
    torch.ops.regard.check_mask(_CHECKED, list(mask.tensors()), _snapshot_now(mask))
    return mask._snapshot  # type: ignore[attr-defined]


class _Composite(Mask):
    """What masks made of masks share: they are snapshots if their parts are."""

    def _masks(self) -> tuple[Mask, ...]:
        raise NotImplementedError

    def _rebuild(self, masks: tuple[Mask, ...]) -> Mask:
        """The same of other masks."""
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
            return _mark_traced(self._rebuild(tuple(mask.snapshot() for mask in self._masks())))
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
class _Combination(_Composite):
    """What `&` and `|` share: their parts are asked, their answers folded."""

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
        return type(self)(tuple(mask.narrow(frame, part) for mask in self.parts))

    def preview_size(self) -> int:
        return max(part.preview_size() for part in self.parts)

    def expected_size(self) -> tuple[int, int] | None:
        return next((size for part in self.parts if (size := part.expected_size())), None)

    @property
    def opaque(self) -> bool:
        return any(part.opaque for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class And(_Combination):
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
class Or(_Combination):
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
        if (start <= 0).all():  # what is left are the last keys
            return np.maximum(stop, 0), np.full_like(stop, frame.K)
        return None

    def check(self, frame: Frame) -> None:
        self.negated.check(frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.negated.extent(frame)

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        return Not(self.negated.narrow(frame, part))

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
        return f"~({self.negated!r})" if isinstance(self.negated, _Combination) else f"~{self.negated!r}"


@dataclass(frozen=True, eq=False, repr=False)
class NarrowedMask(_Composite):
    """A mask seen from a part of its call: heads and positions are counted from the first that the part has."""

    mask: Mask
    heads: int  # of the whole, H
    keys: int  # of the whole, K
    top: int  # the first head of the part
    left: int  # its first key

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
    """Where the queries stand, (B or 1, 1, Q): one row if all batch rows share an offset."""
    return np.asarray(frame.offsets(), np.int64)[:, None, None] + np.arange(frame.Q)


def short_repr(value: int | Tensor) -> str:
    """A value for a mask's formula: few numbers as they are, of many the shape."""
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.tolist()) if value.numel() <= 8 and not value.is_floating_point() else format_shape(value)


def check_int(name: str, value: object, least: int) -> int:
    """A whole number of at least so much, from whatever Python takes for one."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}")
    value = operator.index(value)
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, beyond which positions overflow, but is {value}")
    return value


def check_int_tensor(name: str, value: Any, form: str) -> Tensor:
    """A tensor of whole numbers, from whatever torch takes for one."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be {form}, but is {type(value).__name__}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be {form}, but is {tensor.dtype} of shape {format_shape(tensor)}")
    return tensor.detach().to(torch.int64)
