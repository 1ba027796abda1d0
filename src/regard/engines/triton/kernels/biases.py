"""Gradients of dense biases and of biases by distance, summed over all that share a number."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels.backward import load_output_gradient, load_row_numbers, weights_and_gradients
from regard.engines.triton.kernels.entries import (
    additive_products,
    dropout_rows,
    find_bits,
    load_edges,
    load_key,
    load_query,
    load_value,
    multiply,
)


@triton.jit
def block_gradients(x, g, b, h, i0, j0, sizes):
    """The gradients of the logits of queries from i0 on and keys from j0 on."""
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    rows, keys = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    i, j = rows[:, None], keys[None, :]
    if x.weight is not None:
        products = additive_products(x, b, h, i, j, tl.zeros([BM, BN], tl.float32))
    else:
        query, key = load_query(x, b, h, rows, sizes[2]), load_key(x, b, h, keys, sizes[2])
        products = multiply(query, tl.trans(key), sizes[4])
    d_output, value = load_output_gradient(x, g, b, h, rows, sizes[3]), load_value(x, b, h, keys, sizes[3])
    d_weights = multiply(d_output, tl.trans(value), sizes[4])
    lse, delta = load_row_numbers(x, g, b, h, i)
    numbers, edges = (lse, delta, dropout_rows(x, b, h, i)), load_edges(x, b, h, i)
    _, d_logits, _ = weights_and_gradients(
        x, g, products, d_weights, b, h, i, j, numbers, edges, find_bits(x, b, h, i0, j0)
    )
    return d_logits


@triton.jit
def bias_gradient_kernel(x, g, d_bias, batch, own_batch, own_heads, own_rows, BM: tl.constexpr, BN: tl.constexpr,
                         BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of a dense bias (own_batch, own_heads, own_rows, K): each 1, or the whole axis."""
    blocks, key_blocks = tl.cdiv(own_rows, BM), tl.cdiv(x.keys, BN)
    program = tl.program_id(0)
    j0, block = (program % key_blocks) * BN, program // key_blocks
    row, lead = (block % blocks) * BM, block // blocks
    h, b = (lead % own_heads).to(tl.int64), (lead // own_heads).to(tl.int64)
    # Casts, since a comparison of two sizes of 1 is known when compiling.
    some = tl.cast(own_rows == x.queries, tl.int32)
    of_head, of_batch = tl.cast(own_heads == x.heads, tl.int64), tl.cast(own_batch == batch, tl.int64)
    total = tl.zeros([BM, BN], tl.float32)
    for b_n in range(b * of_batch, tl.where(of_batch > 0, b + 1, batch)):
        for h_n in range(h * of_head, tl.where(of_head > 0, h + 1, x.heads)):
            for i0 in range(row * some, tl.where(some > 0, tl.minimum(row + BM, x.queries), x.queries), BM):
                total += block_gradients(x, g, b_n, h_n, i0, j0, (BM, BN, BD, BE, PRECISION))
    total = total * x.bias_gradient
    rows, keys = row + tl.arange(0, BM), j0 + tl.arange(0, BN)
    at = d_bias + ((b * own_heads + h) * own_rows + rows.to(tl.int64)[:, None]) * x.keys + keys[None, :]
    if own_rows == 1:
        total = tl.sum(total, 0)[None, :] + tl.zeros([BM, BN], tl.float32)
    tl.store(at, total, mask=(rows < own_rows)[:, None] & (keys < x.keys)[None, :])


@triton.jit
def diagonal_gradient_kernel(x, g, d_diagonal, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                             BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients (B, H, Q + K - 1) of a bias by distance: a program sums some diagonals over all queries."""
    distances = x.queries + x.keys - 1
    blocks = tl.cdiv(distances, BN)
    program = tl.program_id(0)
    c0, head = (program % blocks) * BN, program // blocks
    h, b = (head % x.heads).to(tl.int64), (head // x.heads).to(tl.int64)
    shift = x.queries - 1 - c0  # key j is on diagonal c0 + (j - i + shift)
    total = tl.zeros([BN], tl.float32)
    lowest, highest = tl.maximum(shift - BN + 1, 0), tl.minimum(x.queries, x.keys + shift)
    for i0 in range(lowest // BM * BM, highest, BM):
        least, most = tl.maximum(i0 - shift, 0), tl.minimum(i0 + BM + BN - 1 - shift, x.keys)
        for j0 in range(least // BN * BN, most, BN):
            gradients = block_gradients(x, g, b, h, i0, j0, (BM, BN, BD, BE, PRECISION))
            column = tl.arange(0, BN)[None, :] + (i0 + tl.arange(0, BM))[:, None] - shift - j0
            inside = (column >= 0) & (column < BN)
            total += tl.sum(tl.where(inside, tl.gather(gradients, tl.where(inside, column, 0), 1), 0.0), 0)
    distance = c0 + tl.arange(0, BN)
    at = d_diagonal + head.to(tl.int64) * distances + distance
    tl.store(at, total * x.bias_gradient, mask=distance < distances)
