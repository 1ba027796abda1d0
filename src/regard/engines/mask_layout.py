"""Mask layouts: the visible keys of each row in the form that the kernels read, as intervals or as tiles with bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.cache import CACHE
from regard.fingerprint import without_transforms
from regard.geometry import Frame, Indices
from regard.masks import Mask, tiles

TILE = 64
CHUNK_ENTRIES = 1 << 20  # entries of a mask evaluated per chunk

LayoutTensors = tuple[tuple[Tensor, ...], tuple[int, int]]


def layout_tensors(mask: Mask, key: tuple) -> LayoutTensors:
    """The visible keys of each row for the kernels, and the strides of a tile table."""
    layout = mask_layout(mask, key)
    return layout.tensors, layout.strides


@dataclass(frozen=True, eq=False)
class MaskLayout:
    """A mask layout with the addresses of its tensors, valid while it lives."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, int]


def mask_layout(mask: Mask, key: tuple) -> MaskLayout:
    """Return the layout of a mask for the frame with this key, cached by the mask's content."""
    mask = mask.snapshot()

    def build() -> MaskLayout:
        mask.check_unchanged()  # its content may be that of a forward pass, long before this backward
        return MaskLayout(*_build_layout(mask, key))

    with without_transforms():
        return CACHE.get_or_build(_cache_key(mask, key), build, owner=mask)


def find_mask_layout(mask: Mask, key: tuple) -> MaskLayout | None:
    """Return the cached layout of a mask, or None if there is none."""
    known = _cache_key(mask.snapshot(), key)
    return None if known is None else CACHE.find(known)


def _cache_key(mask: Mask, key: tuple) -> tuple | None:
    content = mask.content()
    return None if content is None else ("layout", content, key)


def _build_layout(mask: Mask, key: tuple) -> LayoutTensors:
    B, H, Q, K, offsets = key
    frame = Frame(B, H, Q, K, offsets[0] if len(offsets) == 1 else torch.tensor(offsets))
    if (intervals := mask.intervals(frame)) is not None:
        edges = np.broadcast_arrays(*(np.clip(edge, 0, frame.K).astype(np.int32) for edge in intervals))
        mask.drop_cached()
        return tuple(torch.from_numpy(np.ascontiguousarray(edge)) for edge in edges), (0, 0)
    table = tiles(mask, frame, (TILE, TILE))
    counts = np.where(table.full, 0, table.stop - table.start)
    index = np.where(table.full, -1, np.cumsum(counts) - counts)
    arrays = table.pointer, table.start.astype(np.int32), table.stop.astype(np.int32), index, _bits(mask, frame)
    rows = table.grid[0]
    strides = (table.extent[1] * rows if table.extent[0] > 1 else 0, rows if table.extent[1] > 1 else 0)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), strides


def layout_for_rows(mask: Mask, frame: Frame, rows: Tensor) -> LayoutTensors:
    """Build the layout of some rows, renumbered; only these rows are evaluated."""
    with without_transforms():
        return _build_for_rows(mask, frame, rows)


def _build_for_rows(mask: Mask, frame: Frame, rows: Tensor) -> LayoutTensors:
    if (intervals := mask.intervals(frame)) is not None:
        edges = (np.clip(edge, 0, frame.K).astype(np.int32) for edge in np.broadcast_arrays(*intervals))
        return tuple(torch.from_numpy(np.ascontiguousarray(edge[:, :, rows.numpy()])) for edge in edges), (0, 0)
    batch, heads = mask.extent(frame)
    batch, tall, wide = max(batch, len(frame.offsets())), -(-len(rows) // TILE), -(-frame.K // TILE)
    words = np.zeros((batch, heads, tall * TILE, wide), np.int64)
    some, keys = max(1, CHUNK_ENTRIES // frame.K), torch.arange(frame.K)
    for b, h, first in itertools.product(range(batch), range(heads), range(0, len(rows), some)):
        part = rows[first : first + some, None]
        bits = mask.allows(Indices(frame, torch.tensor([[b]]), torch.tensor([[h]]), part, keys))
        allowed = np.zeros((len(part), wide * TILE), bool)
        allowed[:, : frame.K] = bits.expand(len(part), frame.K).numpy()
        words[b, h, first : first + len(part)] = np.packbits(allowed, -1, bitorder="little").view(np.int64)
    words = words.reshape(batch, heads, tall, TILE, wide).swapaxes(3, 4)  # one word per row of a tile
    lines = np.arange(batch * heads * tall + 1)  # one run each, of partial tiles with bits
    start = np.zeros(len(lines) - 1, np.int32)
    arrays = lines, start, start + np.int32(wide), lines[:-1] * wide, words
    strides = (heads * tall if batch > 1 else 0, tall if heads > 1 else 0)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), strides


def _bits(mask: Mask, frame: Frame) -> np.ndarray:
    """Return one int64 per row of each partial tile, with bit `c` for column `c`; (tiles, 64)."""
    table = tiles(mask, frame, (TILE, TILE))
    line = np.repeat(np.arange(len(table.pointer) - 1), np.diff(table.pointer))
    count = np.where(table.full, 0, table.stop - table.start)
    line, column = (
        np.repeat(line, count),
        np.repeat(table.start - (np.cumsum(count) - count), count) + np.arange(count.sum()),
    )
    lead, row = line // table.grid[0], line % table.grid[0]
    place = (lead // table.extent[1], lead % table.extent[1], row * TILE, column * TILE)
    words, inside = np.zeros((len(line), TILE), np.int64), torch.arange(TILE)
    for first in range(0, len(line), 512):
        b, h, i, j = (torch.from_numpy(x[first : first + 512].astype(np.int64))[:, None, None] for x in place)
        i, j = i + inside[:, None], j + inside
        at = Indices(frame, b, h, i.clamp(max=frame.Q - 1), j.clamp(max=frame.K - 1))
        allowed = (mask.allows(at) & (i < frame.Q) & (j < frame.K)).expand(len(b), TILE, TILE)
        words[first : first + 512] = np.packbits(allowed.numpy(), -1, bitorder="little").view(np.int64)[..., 0]
    return words
