"""Mask layouts on the device of the kernels, by rows and by keys, cached by the mask's content."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.cache import CACHE
from regard.engines.mask_layout import TILE, mask_layout
from regard.engines.triton.arguments import Layout
from regard.fingerprint import without_transforms
from regard.masks import Mask


class DeviceLayout:
    """A layout with the strides of its tile table."""

    def __init__(self, layout: Layout, strides: tuple[int, int]) -> None:
        self.layout, self.strides = layout, strides


def device_layout(mask: Mask, key: tuple, device: torch.device) -> DeviceLayout:
    """Return the layout of a mask for the frame with this key; it is uploaded once for equal masks."""
    mask, (_, _, queries, count, _) = mask.snapshot(), key
    content = mask.content()
    known = None if content is None else ("layout on device", content, key, device)

    def build() -> DeviceLayout:
        host = mask_layout(mask, key)
        if len(host.tensors) == 2:
            keys, key_strides = _rows_of_keys(*host.tensors, count)
        else:
            keys, key_strides = _tiles_of_keys(host.tensors, host.strides, queries, count)
        rows, keys = (tuple(tensor.to(device) for tensor in tensors) for tensors in (host.tensors, keys))
        return DeviceLayout(Layout(rows, keys, key_strides), host.strides)

    with without_transforms():
        return CACHE.get_or_build(known, build, owner=mask)


def layout_parts(mask: Mask, key: tuple, device: torch.device) -> tuple:
    """Return the parts of `device_layout`: tensors by rows and by keys, and their strides."""
    result = device_layout(mask, key, device)
    return result.layout.rows, result.layout.keys, result.strides, result.layout.key_strides


layout_parts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # tracing does not look inside


def _rows_of_keys(start: Tensor, stop: Tensor, keys: int) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Return the first and one past the last row that sees one of 64 keys: (B or 1, H or 1, key tiles) each."""
    batch, heads, queries = start.shape
    first, last = (edge.numpy().reshape(batch * heads, queries) for edge in (start, stop))
    tiles, cuts = -(-keys // TILE), np.arange(0, queries, TILE)
    empty = first >= last
    low = np.minimum.reduceat(np.where(empty, keys, first), cuts, 1) // TILE
    high = -(-np.maximum.reduceat(np.where(empty, 0, last), cuts, 1) // TILE)
    row_first = np.full((batch * heads, tiles), queries, np.int32)
    row_last = np.zeros((batch * heads, tiles), np.int32)
    for lead in range(batch * heads):
        for row in range(len(cuts)):
            row_last[lead, low[lead, row] : high[lead, row]] = min(queries, (row + 1) * TILE)
        for row in reversed(range(len(cuts))):
            row_first[lead, low[lead, row] : high[lead, row]] = row * TILE
    strides = (heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0)
    return tuple(torch.from_numpy(edge.reshape(batch, heads, tiles)) for edge in (row_first, row_last)), strides


def _tiles_of_keys(
    table: tuple[Tensor, ...], strides: tuple[int, int], queries: int, keys: int
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Return the tiles of a table sorted by key tile: pointers, row tiles, and indices into the bits or -1."""
    pointer, start, stop, index, _ = (tensor.numpy() for tensor in table)
    row_tiles, key_tiles = -(-queries // TILE), -(-keys // TILE)
    leads = (len(pointer) - 1) // row_tiles
    length = (stop - start).astype(np.int64)
    line = np.repeat(np.repeat(np.arange(len(pointer) - 1), np.diff(pointer)), length)
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    key = np.repeat(start, length) + inside
    bits = np.where(np.repeat(index, length) < 0, -1, np.repeat(index, length) + inside)
    column = line // row_tiles * key_tiles + key
    order = np.argsort(column, kind="stable")
    ends = np.searchsorted(column[order], np.arange(leads * key_tiles + 1))
    arrays = ends, (line % row_tiles).astype(np.int32)[order], bits.astype(np.int64)[order]
    batch, heads = (stride // row_tiles * key_tiles for stride in strides)
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), (batch, heads)
