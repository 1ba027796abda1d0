"""Masks given entry by entry: as a bool tensor, a function, blocks of a grid, or pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.fingerprint import accelerator_of, function_state, reads_tensors
from regard.geometry import CallSlice, Frame, Indices, broadcasts, format_shape, pad_leading, to_numpy
from regard.hashing import hash32
from regard.masks.algebra import EMPTY, PARTIAL, Boxes, Kinds, Mask, kinds, mark_traced
from regard.masks.arguments import check_int, check_int_tensor, short_repr
from regard.masks.from_tensors import from_tensors


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    tensor: Tensor  # bool, four axes, each full or 1

    def allows(self, at: Indices) -> Tensor:
        return at.take(self.tensor.to(at.j.device))

    def kinds(self, boxes: Boxes) -> Kinds:
        rows, columns = boxes.size
        least = most = to_numpy(self.tensor).view(np.uint8)
        for axis, size in ((3, columns), (2, rows)):
            cuts = np.arange(0, least.shape[axis], size)
            least, most = np.minimum.reduceat(least, cuts, axis), np.maximum.reduceat(most, cuts, axis)
        places = (boxes.b, boxes.h, boxes.i0 // rows, boxes.j0 // columns)
        index = tuple(np.zeros_like(at) if n == 1 else at for n, at in zip(least.shape, places, strict=True))
        return kinds(full=least[index] == 1, empty=most[index] == 0)

    def check(self, frame: Frame) -> None:
        sizes = (frame.B, frame.H, frame.Q, frame.K)
        if any(not broadcasts(n, size) for n, size in zip(self.tensor.shape, sizes, strict=True)):
            raise ValueError(
                f"mask must broadcast to (B, H, Q, K) = {sizes}, but is {format_shape(self.tensor)}; "
                "a (B, K) key mask is written mask[:, None, None, :]"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        axes = zip(self.tensor.shape, (slice(None), part.heads, part.rows, part.columns), strict=True)
        return mark_traced(Dense(self.tensor[tuple(slice(None) if n == 1 else edge for n, edge in axes)]))

    def expected_size(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape[2:]
        return rows if rows > 1 else columns, columns if columns > 1 else rows

    def __repr__(self) -> str:
        return f"dense({short_repr(self.tensor)})"


@dataclass(frozen=True, eq=False, repr=False)
class Where(Mask):
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def snapshot(self) -> Mask:
        return self if torch.compiler.is_compiling() else self.read()

    def read(self) -> Mask:
        """Return a mask of the same function with a record of all that it reads; the same object until that changes."""
        if "_content" in self.__dict__:
            return self
        known, now = self.__dict__.get("_snapshot"), function_state(self.function)
        if known is None or now is None or known.content() != now:
            known = Where(self.function)
            object.__setattr__(known, "_content", now)
            object.__setattr__(self, "_snapshot", known)
        return known

    @property
    def live(self) -> bool:
        return "_content" not in self.__dict__

    def content(self) -> Hashable | None:
        return self.__dict__.get("_content")

    @property
    def traced(self) -> bool:
        """Also true if the function reads tensors: a graph that has read them once would not notice a change."""
        return self.__dict__.get("_traced", False) or (torch.compiler.is_compiling() and _reads_tensors(self))

    def check_unchanged(self) -> None:
        before = self.content()
        if before is not None and function_state(self.function) != before:
            raise RuntimeError(
                f"{self!r}: a value that the function reads was changed between forward and backward, which "
                "calls it again; change it after backward, or close over a copy"
            )

    def allows(self, at: Indices) -> Tensor:
        indices = at.b, at.h, at.p, at.j
        device = None if torch.compiler.is_compiling() or not at.j.is_cpu else accelerator_of(self.function)
        if device is not None:  # a layout is built on the CPU, also where the function reads tensors of a GPU
            bits = self.function(*(index.to(device) for index in indices))
            bits = bits.cpu() if isinstance(bits, Tensor) else bits
        else:
            bits = self.function(*indices)
        if not isinstance(bits, Tensor) or bits.dtype != torch.bool:
            actual = f"a {bits.dtype} tensor" if isinstance(bits, Tensor) else type(bits).__name__
            raise TypeError(
                f"where: function must return a bool tensor of the indices (b, h, p, j), but returned {actual}"
            )
        return bits

    def extent(self, frame: Frame) -> tuple[int, int]:
        one = slice(0, 1)
        bits = pad_leading(self.allows(frame.indices(rows=one, columns=one)))
        return bits.shape[0], bits.shape[1]

    @property
    def opaque(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"where({getattr(self.function, '__name__', repr(self.function))})"


def _reads_tensors(mask: Where) -> bool:
    return reads_tensors(mask.function)


_reads_tensors._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Cells(Mask):
    """Base class of blocks, random blocks and edges: a set of cells of a grid over positions and keys."""

    def _cells(self, frame: Frame) -> tuple[int, tuple[np.ndarray, ...]]:
        """Return the side of a cell, and batch row, head, row and column of every set cell."""
        raise NotImplementedError

    def kinds(self, boxes: Boxes) -> Kinds:
        side, cells = self._cells(boxes.frame)
        batch, heads = self.extent(boxes.frame)
        offsets = np.asarray(boxes.frame.offsets(), np.int64)
        if len(offsets) > 1 and batch == 1:  # each batch row meets the same cells at other positions
            batch, count = len(offsets), len(cells[0])
            cells = (np.repeat(np.arange(batch), count), *(np.tile(axis, batch) for axis in cells[1:]))
        at = boxes.b if batch > 1 else np.zeros_like(boxes.b), boxes.h if heads > 1 else np.zeros_like(boxes.h)
        if min(boxes.size) < side or max(boxes.size) == side:
            return _kinds_by_cells(side, cells, boxes, at)
        return _kinds_by_boxes(side, cells, boxes, at, offsets)


def _kinds_by_cells(side: int, cells: tuple[np.ndarray, ...], boxes: Boxes, at: tuple[np.ndarray, ...]) -> Kinds:
    """Classify boxes that touch few cells, by looking up each of these."""
    r0, r1, c0, c1 = boxes.p0 // side, (boxes.p1 - 1) // side, boxes.j0 // side, (boxes.j1 - 1) // side
    matches = np.zeros(len(r0), np.int64)
    for r in range(int((r1 - r0).max(initial=0)) + 1):
        for c in range(int((c1 - c0).max(initial=0)) + 1):
            inside = (r0 + r <= r1) & (c0 + c <= c1)
            matches += inside & _is_member((*at, r0 + r, c0 + c), cells)
    return kinds(full=matches == (r1 - r0 + 1) * (c1 - c0 + 1), empty=matches == 0)


def _kinds_by_boxes(
    side: int, cells: tuple[np.ndarray, ...], boxes: Boxes, at: tuple[np.ndarray, ...], offsets: np.ndarray
) -> Kinds:
    """Classify boxes that hold many cells, by marking the boxes that the corners of a cell touch."""
    (height, width), (b, h, rows, columns) = boxes.size, cells
    top, left = rows * side - offsets[b if len(offsets) > 1 else 0], columns * side - boxes.left
    corners = [(i // height, j // width) for i in (top, top + side - 1) for j in (left, left + side - 1)]
    touched = np.tile(b, 4), np.tile(h, 4), *(np.concatenate(axis) for axis in zip(*corners, strict=True))
    matches = _is_member((*at, boxes.i0 // height, (boxes.j0 - boxes.left) // width), touched)
    return np.where(matches, PARTIAL, EMPTY).astype(np.int8)


def _is_member(entries: tuple[np.ndarray, ...], known: tuple[np.ndarray, ...]) -> np.ndarray:
    """Whether each entry (b, h, row, column) is in a set of entries; entries are encoded as small integers."""
    a, k = np.zeros(len(entries[0]), np.int64), np.zeros(len(known[0]), np.int64)
    for ours, theirs in zip(entries, known, strict=True):
        low = min(ours.min(initial=0), theirs.min(initial=0))
        size = max(ours.max(initial=0), theirs.max(initial=0)) - low + 1
        a, k = a * size + ours - low, k * size + theirs - low
    return np.isin(a, k)


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(_Cells):
    layout: Tensor  # bool, (B or 1, H or 1, rows, columns)
    size: int

    def allows(self, at: Indices) -> Tensor:
        layout = self.layout.to(at.j.device)
        row, column = at.p.div(self.size, rounding_mode="floor"), at.j // self.size
        inside = (row >= 0) & (row < layout.shape[2])
        b, h = (torch.zeros_like(x) if n == 1 else x for n, x in zip(layout.shape, (at.b, at.h), strict=False))
        return layout[b, h, row.clamp(0, layout.shape[2] - 1), column] & inside

    @cached_property
    def _set(self) -> tuple[np.ndarray, ...]:
        return np.nonzero(to_numpy(self.layout))

    def drop_cached(self) -> None:
        self.__dict__.pop("_set", None)

    def _cells(self, frame: Frame) -> tuple[int, tuple[np.ndarray, ...]]:
        return self.size, self._set

    def check(self, frame: Frame) -> None:
        batch, heads, rows, columns = self.layout.shape
        offsets = frame.offsets()  # torch.compile does not trace `max(..., default=0)`, nor max of one number
        last = (offsets[0] if len(offsets) == 1 else max(offsets, default=0)) + frame.Q
        if not broadcasts(batch, frame.B) or not broadcasts(heads, frame.H):
            raise ValueError(
                f"blocks: layout must be (rows, columns), (H, ...) or (B, H, ...) with B = {frame.B}, H = {frame.H}, "
                f"but is {format_shape(self.layout)}"
            )
        if columns * self.size < frame.K or rows * self.size < last:
            raise ValueError(
                f"blocks: layout of {rows} x {columns} blocks of {self.size} covers {rows * self.size} x "
                f"{columns * self.size} positions, but the call has {last} x {frame.K}"
            )

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.layout.shape[0], self.layout.shape[1]

    def expected_size(self) -> tuple[int, int]:
        return self.layout.shape[2] * self.size, self.layout.shape[3] * self.size

    def __repr__(self) -> str:
        return f"blocks({format_shape(self.layout)}, {self.size})"


@dataclass(frozen=True, eq=False, repr=False)
class RandomBlocks(_Cells):
    per_row: int
    size: int
    seed: int

    def allows(self, at: Indices) -> Tensor:
        row, column = at.p.div(self.size, rounding_mode="floor"), at.j // self.size
        drawn = (self._draw(row) == column.unsqueeze(-1)).any(-1) | (self._draw(column) == row.unsqueeze(-1)).any(-1)
        return drawn & (row >= 0)

    def _draw(self, block: Tensor) -> Tensor:
        """Return the blocks that each of these draws, (..., per_row): distinct ones of 0 ... block, padded with -1.

        Floyd's sampling. It depends on the block and the seed only, so that a longer sequence does not change it.
        """
        first = hash32((self.seed << 31) + block)
        drawn: list[Tensor] = []
        for k in range(self.per_row):
            last = block - self.per_row + 1 + k  # upper bound of this draw
            pick = hash32(first * self.per_row + k) % (last.clamp(min=0) + 1)
            is_taken = torch.zeros_like(pick, dtype=torch.bool)
            for other in drawn:
                is_taken = is_taken | (other == pick)
            drawn.append(torch.where(last < 0, -1, torch.where(is_taken, last, pick)))
        return torch.stack(drawn, -1)

    def _cells(self, frame: Frame) -> tuple[int, tuple[np.ndarray, ...]]:
        # Only the blocks of keys and of queries: an offset may be far from both.
        edges = [(0, frame.K), *((max(first, 0), first + frame.Q) for first in frame.offsets())]
        blocks = np.unique(np.concatenate([np.arange(a // self.size, -(-b // self.size)) for a, b in edges]))
        table = self._draw(torch.from_numpy(blocks)).numpy()
        drawing, drawn = np.repeat(blocks, self.per_row), table.reshape(-1)
        drawing, drawn = drawing[drawn >= 0], drawn[drawn >= 0]
        rows, columns = np.concatenate((drawing, drawn)), np.concatenate((drawn, drawing))
        return self.size, (np.zeros_like(rows), np.zeros_like(rows), rows, columns)

    def preview_size(self) -> int:
        return 16 * self.size

    def __repr__(self) -> str:
        return f"random_blocks({self.per_row}, {self.size}, seed={self.seed})"


@dataclass(frozen=True, eq=False, repr=False)
class Edges(_Cells):
    pairs: Tensor  # (2, E), sorted, without duplicates

    def allows(self, at: Indices) -> Tensor:
        known = (self.pairs[0] * at.frame.K + self.pairs[1]).to(at.j.device)
        entries = at.p * at.frame.K + at.j
        if not len(known):
            return torch.zeros_like(entries, dtype=torch.bool)
        return known[torch.searchsorted(known, entries).clamp(max=len(known) - 1)] == entries

    def _cells(self, frame: Frame) -> tuple[int, tuple[np.ndarray, ...]]:
        rows, columns = to_numpy(self.pairs)
        return 1, (np.zeros_like(rows), np.zeros_like(rows), rows, columns)

    def check(self, frame: Frame) -> None:
        if torch.compiler.is_compiling() or not self.pairs.numel():
            return
        if int(self.pairs[1].max()) >= frame.K:
            raise ValueError(f"edges: pairs contain key {int(self.pairs[1].max())}, but there are only {frame.K} keys")

    def preview_size(self) -> int:
        return int(self.pairs.max()) + 1 if self.pairs.numel() else 16

    def __repr__(self) -> str:
        few = self.pairs.numel() <= 8
        return f"edges({list(map(tuple, self.pairs.T.tolist())) if few else format_shape(self.pairs)})"


def dense(tensor: Tensor) -> Mask:
    """Any pattern as a bool tensor that broadcasts to (B, H, Q, K); `True` means may attend.

    The tensor is kept, not copied: in-place changes take effect in the next call.

    >>> import regard as rg, torch
    >>> rg.dense(torch.eye(3, dtype=torch.bool)).draw().splitlines()[1]
    '·█·'
    """
    return from_tensors(_dense, tensor) if isinstance(tensor, Tensor) else _dense(tensor)


def _dense(tensor: Any) -> Mask:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        actual = f"{tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        if isinstance(tensor, Tensor):
            hint = "to add numbers to the scores, pass them as bias="
        else:
            hint = "call it, as in causal()" if callable(tensor) else "convert it with torch.as_tensor"
        raise TypeError(f"mask must be a mask or a bool tensor in which True means may attend, but is {actual}; {hint}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"mask must be a dense tensor, but has the layout {tensor.layout}; pass mask.to_dense()")
    if tensor.dim() > 4:
        raise ValueError(f"mask must have at most four axes (B, H, Q, K), but is {format_shape(tensor)}")
    return Dense(pad_leading(tensor.detach()))


def where(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """A mask given by a function of the index tensors `(b, h, p, j)` that returns bools.

    The function may also read tensors and numbers from closures, defaults and globals; changes take effect in the next
    call. A function that reads anything else, such as attributes of an object, is evaluated in every call.

    >>> import regard as rg
    >>> print(rg.where(lambda b, h, p, j: (p + j) % 2 == 0).draw(3))
    █·█
    ·█·
    █·█
    """
    if not callable(function):
        raise TypeError(f"where: function must be callable with (b, h, p, j), but is {type(function).__name__}")
    return Where(function)


def blocks(layout: Tensor, size: int) -> Mask:
    """A mask of whole blocks: `layout[..., p // size, j // size]`; layout (rows, columns), (H, ...) or (B, H, ...).

    >>> import regard as rg, torch
    >>> print(rg.blocks(torch.tensor([[True, False], [True, True]]), 2).draw(4))
    ██··
    ██··
    ████
    ████
    """
    return from_tensors(_blocks, layout, size)


def _blocks(layout: Any, size: int) -> Mask:
    try:
        layout = torch.as_tensor(layout)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"blocks: layout must be a bool tensor, but is {type(layout).__name__}") from None
    if layout.dtype != torch.bool or not 2 <= layout.dim() <= 4 or not layout.numel():
        raise TypeError(
            f"blocks: layout must be a bool tensor (rows, columns), (H, ...) or (B, H, ...), "
            f"but is {layout.dtype} of shape {format_shape(layout)}"
        )
    return Blocks(pad_leading(layout.detach()), check_int("size", size, 1))


def random_blocks(per_row: int, size: int, seed: int = 0) -> Mask:
    """Random pairs of blocks of `size` positions that attend to each other; deterministic for a given seed.

    Every block draws `per_row` distinct blocks up to its own, or all if there are fewer, and attends to the blocks
    that it drew and those that drew it. The result does not depend on the number of keys: with `causal()`, decoding
    token by token from a cache gives the same pattern as one call.

    >>> import regard as rg
    >>> rg.random_blocks(2, 4, seed=1).draw(16) == rg.random_blocks(2, 4, seed=1).draw(16)
    True
    """
    return RandomBlocks(check_int("per_row", per_row, 1), check_int("size", size, 1), check_int("seed", seed, 0))


def edges(pairs: Tensor | Iterable[tuple[int, int]]) -> Mask:
    """The edges of a graph: (query, key) pairs, or a tensor (2, E) of queries (row 0) and keys (row 1).

    PyTorch Geometric's `edge_index` has sources in the first row and targets in the second, and targets attend to
    sources: pass `edges(edge_index.flip(0))`.

    >>> import regard as rg, torch
    >>> print(rg.edges([(0, 0), (1, 2), (2, 1)]).draw())
    █··
    ··█
    ·█·
    >>> rg.edges(torch.tensor([[0, 1, 2], [0, 2, 1]])) == rg.edges([(0, 0), (1, 2), (2, 1)])
    True
    """
    return from_tensors(_edges, pairs)


def _edges(pairs: Any) -> Mask:
    form = (
        "(query, key) tuples of whole numbers, or a tensor of whole numbers (2, E), queries in row 0 and keys in row 1"
    )
    if isinstance(pairs, Iterable) and not isinstance(pairs, Tensor | np.ndarray):
        tensor = _from_tuples(list(pairs), form)
    else:
        tensor = check_int_tensor("edges: pairs", pairs, form)
    if tensor.dim() != 2 or len(tensor) != 2:
        raise ValueError(
            f"edges: pairs must be {form}, but is of shape {format_shape(tensor)}; transpose a tensor (E, 2) with .T"
        )
    if tensor.numel() and int(tensor.min()) < 0:
        raise ValueError(f"edges: pairs must not be negative, but the smallest is {int(tensor.min())}")
    return Edges(tensor.unique(dim=1))


def _from_tuples(pairs: list[Any], form: str) -> Tensor:
    """Convert pairs to a tensor (2, E). Two lists of two numbers are ambiguous and raise."""
    lists = all(isinstance(pair, list) for pair in pairs)
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs) or (lists and len(pairs) == 2):
        raise ValueError(
            f"edges: pairs must be {form}, got {pairs[:4]!r}; write pairs as tuples, [(0, 1), (2, 3)], "
            "or queries and keys as a tensor, torch.tensor([queries, keys])"
        )
    return check_int_tensor("edges: pairs", pairs, form).T if pairs else torch.zeros(2, 0, dtype=torch.int64)
