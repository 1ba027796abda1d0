"""Tile tables: the tiles of a call that a mask does not leave empty, found from coarse to fine.

For every row of tiles, a table lists runs of adjacent tiles that are full or partial. Empty tiles are left out, so a
causal mask over a million keys takes two runs per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from regard.cache import CACHE
from regard.fingerprint import without_transforms
from regard.geometry import Frame, Indices, to_numpy
from regard.masks.algebra import EMPTY, FULL, PARTIAL, Boxes, Intervals, Kinds, Mask, kinds

START_BOXES = 1 << 14  # grid size at which the search starts
# up to this size the tiles of an opaque mask are evaluated; beyond, they count as partial
OPAQUE_ENTRIES = 1 << 26
CHUNK_ENTRIES = 1 << 20  # entries of an opaque mask evaluated per chunk


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles to compute; `runs(b, h, r)` iterates over the runs of tile row `r`.

    >>> import regard as rg
    >>> from regard.geometry import Frame
    >>> from regard.masks.tiles import tiles
    >>> table = tiles(rg.causal(), Frame(1, 1, 256, 256, 0), (64, 64))
    >>> table.visited, table.total
    (10, 16)
    """

    frame: Frame
    size: tuple[int, int]
    extent: tuple[int, int]  # (B or 1, H or 1)
    pointer: np.ndarray  # (leads * tile rows + 1,): index of the first run of a tile row
    start: np.ndarray  # first tile of a run
    stop: np.ndarray  # one past its last tile
    full: np.ndarray  # whether the tiles of a run are full

    @property
    def grid(self) -> tuple[int, int]:
        """Tile rows and tile columns."""
        return -(-self.frame.Q // self.size[0]), -(-self.frame.K // self.size[1])

    @property
    def total(self) -> int:
        return self.extent[0] * self.extent[1] * self.grid[0] * self.grid[1]

    @property
    def visited(self) -> int:
        return int((self.stop - self.start).sum())

    @property
    def partial(self) -> int:
        return int((self.stop - self.start)[~self.full].sum())

    def entries(self) -> int:
        """Return the number of entries (b', h', i, j) in the visited tiles."""
        rows = np.repeat(np.arange(len(self.pointer) - 1) % max(self.grid[0], 1), np.diff(self.pointer))
        height = np.minimum((rows + 1) * self.size[0], self.frame.Q) - rows * self.size[0]
        width = np.minimum(self.stop * self.size[1], self.frame.K) - self.start * self.size[1]
        return int((height * width).sum())

    def runs(self, b: int, h: int, r: int) -> Iterator[tuple[int, int, bool]]:
        row = ((b if self.extent[0] > 1 else 0) * self.extent[1] + (h if self.extent[1] > 1 else 0)) * self.grid[0] + r
        for n in range(self.pointer[row], self.pointer[row + 1]):
            yield int(self.start[n]), int(self.stop[n]), bool(self.full[n])

    def row(self, b: int, h: int, r: int) -> Iterator[tuple[slice, bool]]:
        """Iterate over the tiles of a tile row: column slice, and whether the tile is full."""
        for start, stop, full in self.runs(b, h, r):
            for c in range(start, stop):
                yield slice(c * self.size[1], min((c + 1) * self.size[1], self.frame.K)), full


def tiles(mask: Mask | None, frame: Frame, size: tuple[int, int]) -> Tiles:
    """Return the tile table of a mask, cached by the mask's content."""
    mask, key = None if mask is None else mask.snapshot(), frame.cache_key()
    content = "all" if mask is None else mask.content()
    known = None if content is None else ("tiles", content, key, size)
    with without_transforms():
        return CACHE.get_or_build(known, lambda: build_tiles(mask, key, size), owner=mask)


def build_tiles(mask: Mask | None, key: tuple, size: tuple[int, int]) -> Tiles:
    """Build the tile table of a mask snapshot, for the frame with this key."""
    B, H, Q, K, offsets = key
    frame = Frame(B, H, Q, K, offsets[0] if len(offsets) == 1 else torch.tensor(offsets))
    if mask is None:
        start = np.zeros((1, 1, frame.Q), np.int64)
        return _from_intervals(frame, size, (start, start + frame.K))
    if (intervals := mask.intervals(frame)) is not None:
        table = _from_intervals(frame, size, intervals)
    else:
        table = _from_boxes(mask, frame, size)
    mask.drop_cached()
    return table


def _from_intervals(frame: Frame, size: tuple[int, int], intervals: Intervals) -> Tiles:
    """Build a table from row intervals: a tile row has at most three runs, partial, full, partial."""
    start, stop = (np.clip(edge, 0, frame.K) for edge in np.broadcast_arrays(*intervals))
    extent = start.shape[0], start.shape[1]
    start, stop = (edge.reshape(extent[0] * extent[1], frame.Q) for edge in (start, stop))
    height, width = size
    cuts = np.arange(0, frame.Q, height)
    if not len(cuts) or not frame.K:
        no_runs = np.zeros(0, np.int64)
        pointer = np.zeros(len(start) * len(cuts) + 1, np.int64)
        return Tiles(frame, size, extent, pointer, no_runs, no_runs, no_runs.astype(bool))
    empty = start >= stop
    low = np.minimum.reduceat(np.where(empty, frame.K, start), cuts, 1).reshape(-1)
    high = np.maximum.reduceat(np.where(empty, 0, stop), cuts, 1).reshape(-1)
    inner_low = np.maximum.reduceat(start, cuts, 1).reshape(-1)
    inner_high = np.minimum.reduceat(stop, cuts, 1).reshape(-1)  # an empty row leaves no full tile
    first, last = low // width, -(-high // width)
    full_first = -(-inner_low // width)
    full_last = np.where(inner_high == frame.K, -(-frame.K // width), inner_high // width)
    none = full_first >= full_last
    full_first, full_last = np.where(none, last, full_first), np.where(none, last, full_last)
    edges = np.stack([first, full_first, full_last, np.maximum(last, full_last)], 1)  # (tile rows, 4)
    starts, stops = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    full, keep = np.tile([False, True, False], len(edges)), starts < stops
    pointer = np.concatenate([[0], np.cumsum(keep.reshape(-1, 3).sum(1))])
    return Tiles(frame, size, extent, pointer, starts[keep], stops[keep], full[keep])


def _from_boxes(mask: Mask, frame: Frame, size: tuple[int, int]) -> Tiles:
    """Build a table by classifying large boxes and splitting partial ones in four until they are tiles."""
    batch, heads = mask.extent(frame)
    batch = max(batch, len(frame.offsets()))
    down, across = -(-frame.Q // size[0]), -(-frame.K // size[1])
    level = 0
    while batch * heads * (-(-down >> level)) * (-(-across >> level)) > START_BOXES and max(down, across) >> level > 1:
        level += 1
    lead, r, c = (
        axis.reshape(-1)
        for axis in np.meshgrid(
            np.arange(batch * heads), np.arange(-(-down >> level)), np.arange(-(-across >> level)), indexing="ij"
        )
    )
    runs: list[np.ndarray] = []  # columns: lead, tile row, first tile, one past the last tile, full
    while True:
        kind = _kinds(mask, frame, size, level, batch, heads, lead, r, c)
        full = kind == FULL
        done = full if level else kind != EMPTY
        runs.append(_split_rows(lead[done], r[done], c[done], full[done], level, down, across))
        if not level:
            break
        rest = kind == PARTIAL
        level -= 1
        lead, r, c = (
            np.repeat(lead[rest], 4),
            (2 * r[rest, None] + np.array([0, 0, 1, 1])).reshape(-1),
            (2 * c[rest, None] + np.array([0, 1, 0, 1])).reshape(-1),
        )
        inside = (r < -(-down >> level)) & (c < -(-across >> level))
        lead, r, c = lead[inside], r[inside], c[inside]
    return _merge_runs(frame, size, (batch, heads), np.concatenate(runs), down)


def _kinds(
    mask: Mask, frame: Frame, size: tuple[int, int], level: int, batch: int, heads: int,
    lead: np.ndarray, r: np.ndarray, c: np.ndarray,
) -> Kinds:  # fmt: skip
    height, width = size[0] << level, size[1] << level
    b, i0, j0 = lead // heads, r * height, c * width
    i1, j1 = np.minimum(i0 + height, frame.Q), np.minimum(j0 + width, frame.K)
    offsets = np.asarray(frame.offsets(), np.int64)
    offset = offsets[b if len(offsets) > 1 else np.zeros_like(b)]
    boxes = Boxes(frame, (height, width), b, lead % heads, i0, i1, i0 + offset, i1 + offset, j0, j1)
    result = mask.kinds(boxes)
    if level == 0 and mask.opaque and batch * heads * frame.Q * frame.K <= OPAQUE_ENTRIES:
        result = result.copy()
        unknown, some = np.flatnonzero(result == PARTIAL), max(1, CHUNK_ENTRIES // (height * width))
        for first in range(0, len(unknown), some):
            part = unknown[first : first + some]
            result[part] = _kinds_by_bits(mask, frame, size, *(x[part] for x in (b, lead % heads, i0, j0)))
    return result


def _kinds_by_bits(mask: Mask, frame: Frame, size: tuple[int, int], *corners: np.ndarray) -> Kinds:
    """Classify tiles with corners `b, h, i0, j0` by evaluating all of their entries at once."""
    b, h, i, j = (torch.from_numpy(x.astype(np.int64))[:, None, None] for x in corners)
    # Indices past the edge repeat the last entry inside, which changes neither "all" nor "any".
    i = (i + torch.arange(size[0])[:, None]).clamp(max=frame.Q - 1)
    j = (j + torch.arange(size[1])).clamp(max=frame.K - 1)
    bits = mask.allows(Indices(frame, b, h, i, j)).expand(len(b), *size)
    places = to_numpy(bits).reshape(len(b), -1)  # logical reductions stop early
    return kinds(full=np.logical_and.reduce(places, 1), empty=~np.logical_or.reduce(places, 1))


def _split_rows(
    lead: np.ndarray, r: np.ndarray, c: np.ndarray, full: np.ndarray, level: int, down: int, across: int
) -> np.ndarray:
    """Convert the boxes of a level to one run per tile row that they cover."""
    side = 1 << level
    rows = (r[:, None] * side + np.arange(side)).reshape(-1)
    lead, start, full = (np.repeat(x, side) for x in (lead, c * side, full))
    runs = np.stack([lead, rows, start, np.minimum(start + side, across), full], 1)
    return runs[rows < down]


def _merge_runs(frame: Frame, size: tuple[int, int], extent: tuple[int, int], runs: np.ndarray, down: int) -> Tiles:
    """Sort the runs and join adjacent ones of one kind."""

    runs = runs[np.lexsort((runs[:, 2], runs[:, 1], runs[:, 0]))]
    lead, row, start, stop, full = runs.T
    line = lead * down + row
    new = np.ones(len(runs), bool)
    new[1:] = (line[1:] != line[:-1]) | (start[1:] != stop[:-1]) | (full[1:] != full[:-1])
    first = np.flatnonzero(new)
    last = np.concatenate([first[1:], [len(runs)]])[: len(first)] - 1
    pointer = np.searchsorted(line[first], np.arange(extent[0] * extent[1] * down + 1))
    return Tiles(frame, size, extent, pointer, start[first], stop[last], full[first].astype(bool))
