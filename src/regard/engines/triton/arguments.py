"""The arguments of the kernels: pointers, strides and numbers in one tuple. What is None is not compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engines.dropout import threshold_and_scale
from regard.engines.lowering import LoweredConstants, LoweredTensors

Strides = tuple[int, ...]


class Arguments(NamedTuple):
    """One call. Logits are in base two: `scale`, `cap` and `bias_factor` contain log2(e) / temperature."""

    query: Tensor
    query_strides: Strides
    key: Tensor
    key_strides: Strides
    value: Tensor
    value_strides: Strides
    start: Tensor | None  # (B or 1, H or 1, Q) int32: row i sees keys start <= j < stop
    stop: Tensor | None
    edge_strides: Strides  # of (batch, head, query)
    row_first: Tensor | None  # (B or 1, H or 1, tiles of 64 keys) int32: the rows that see one of these keys
    row_last: Tensor | None
    row_strides: Strides  # of (batch, head)
    pointer: Tensor | None  # a tile table: the runs of a row tile, as in csrc/regard.h
    first: Tensor | None
    last: Tensor | None
    bits_index: Tensor | None
    bits: Tensor | None
    table_strides: Strides  # of (batch, head), in row tiles
    column_pointer: Tensor | None  # the same table by key tiles: row tiles and their index into the bits, or -1
    column_rows: Tensor | None
    column_index: Tensor | None
    column_strides: Strides  # of (batch, head), in key tiles
    diagonal: Tensor | None
    diagonal_strides: Strides  # of (batch, head)
    row_table: Tensor | None
    row_table_strides: Strides  # of (batch, head, query)
    offset: Tensor | None  # (B,) int64
    radius: int
    bias: Tensor | None
    bias_strides: Strides
    sink: Tensor | None  # (H,)
    weight: Tensor | None  # of the additive score, (1, H or 1, 1, D)
    weight_stride: int  # of (head)
    seed: Tensor | None  # () int64
    threshold: int
    kept_scale: float  # of weights that dropout keeps
    heads: int
    group: int  # query heads that share a key/value head
    queries: int
    keys: int
    d: int
    e: int
    scale: float  # of a product; it is then the logit, or the argument of tanh where there is a cap
    cap: float | None
    bias_factor: float
    product_gradient: float  # from the gradient of a logit to that of a product
    bias_gradient: float  # and to that of a bias


class Layout(NamedTuple):
    """A mask layout on the device of the kernels, by rows and by keys."""

    rows: tuple[Tensor, ...]  # as in `LoweredConstants.mask_layout`
    keys: tuple[Tensor, ...]  # (row_first, row_last), or (column_pointer, column_rows, column_index)
    key_strides: tuple[int, int]  # of (batch, head) in `keys`


NO_LAYOUT = Layout((), (), (0, 0))


def pack(x: LoweredTensors, fixed: LoweredConstants, layout: Layout) -> Arguments:
    """Pack a lowered call."""
    (_, H, Q, D), (_, G, K, E) = x.query.shape, x.value.shape
    scale, softcap, temperature, dropout, *_ = fixed.numbers
    base = math.log2(math.e) / temperature
    threshold, kept_scale = threshold_and_scale(dropout)
    radius, _, *table_strides = fixed.sizes
    intervals: Sequence[Tensor | None] = layout.rows if len(layout.rows) == 2 else (None, None)
    tiles: Sequence[Tensor | None] = layout.rows if len(layout.rows) == 5 else (None,) * 5
    extents: Sequence[Tensor | None] = layout.keys if len(layout.keys) == 2 else (None, None)
    columns: Sequence[Tensor | None] = layout.keys if len(layout.keys) == 3 else (None,) * 3
    return Arguments(
        x.query, x.query.stride(), x.key, x.key.stride(), x.value, x.value.stride(),
        intervals[0], intervals[1], broadcast_strides(intervals[0], 3), extents[0], extents[1], layout.key_strides,
        tiles[0], tiles[1], tiles[2], tiles[3], tiles[4], tuple(table_strides),
        columns[0], columns[1], columns[2], layout.key_strides,
        x.diagonal, broadcast_strides(x.diagonal, 2), x.row_table, broadcast_strides(x.row_table, 3),
        fixed.offset, radius, x.bias, broadcast_strides(x.bias, 4), x.sink,
        x.weight, broadcast_strides(x.weight, 2)[1], fixed.seed, threshold, kept_scale if dropout else 1.0,
        H, H // G, Q, K, D, E,
        scale / softcap if softcap else scale * base, softcap * base if softcap else None, base,
        scale / temperature, 1 / temperature,
    )  # fmt: skip


def broadcast_strides(tensor: Tensor | None, count: int) -> Strides:
    """Return the first strides of a tensor, 0 along axes of size 1."""
    if tensor is None:
        return (0,) * count
    return tuple(0 if n == 1 else stride for n, stride in zip(tensor.shape[:count], tensor.stride(), strict=False))


def empty_output(query: Tensor, d_value: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate the output with the memory order of the query's axes."""
    like = query if d_value == query.shape[3] else query[..., :1].expand(*query.shape[:3], d_value)
    return torch.empty_like(like, dtype=dtype)
