"""Forward mode: the tangents of a call whose results are known, in one pass over blocks of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels.backward import multiply_gradients
from regard.engines.triton.kernels.entries import (
    LOG2E,
    additive_products,
    as_logits,
    dropout_rows,
    is_finite,
    is_kept,
    load_edges,
    load_key,
    load_matrix,
    load_query,
    load_table,
    load_value,
    multiply,
    program_row,
    store_matrix,
    table_entries,
    tanh,
    visibility,
    walk_keys,
)


@triton.jit
def load_rows(data, strides, b, h, rows, count, columns, width):
    """Load rows of the tangent of a query, a key or a value."""
    at = data + b * strides[0] + h * strides[1]
    return load_matrix(at, strides[2], strides[3], rows, count, columns, width)


@triton.jit
def additive_moves(x, t, b, h, i, j, like):
    """The tangents of weight . tanh(q + k), in the shape of `like`."""
    i64, j64, shared = i.to(tl.int64), j.to(tl.int64), h // x.group
    queries = x.query + b * x.query_strides[0] + h * x.query_strides[1] + i64 * x.query_strides[2]
    keys = x.key + b * x.key_strides[0] + shared * x.key_strides[1] + j64 * x.key_strides[2]
    moves = like
    for d in range(x.d):
        q = tl.load(queries + d * x.query_strides[3], mask=i < x.queries, other=0.0).to(tl.float32)
        k = tl.load(keys + d * x.key_strides[3], mask=j < x.keys, other=0.0).to(tl.float32)
        value = tanh(q + k)
        along = like * 0.0
        if t.query is not None:
            at = t.query + b * t.query_strides[0] + h * t.query_strides[1] + i64 * t.query_strides[2]
            along += tl.load(at + d * t.query_strides[3], mask=i < x.queries, other=0.0).to(tl.float32)
        if t.key is not None:
            at = t.key + b * t.key_strides[0] + shared * t.key_strides[1] + j64 * t.key_strides[2]
            along += tl.load(at + d * t.key_strides[3], mask=j < x.keys, other=0.0).to(tl.float32)
        moves += tl.load(x.weight + h * x.weight_stride + d) * (1.0 - value * value) * along
        if t.weight is not None:
            moves += tl.load(t.weight + h * x.weight_stride + d) * value
    return moves


@triton.jit
def bias_moves(x, t, b, h, i, j, like):
    """The tangents of the biases, in the shape of `like`."""
    inside = (i < x.queries) & (j < x.keys)
    moves = like
    if t.diagonal is not None:
        at = t.diagonal + b * x.diagonal_strides[0] + h * x.diagonal_strides[1] + (j - i + x.queries - 1)
        moves += tl.load(at, mask=inside, other=0.0)
    if t.row_table is not None:
        moves += load_table(t.row_table, x.row_table_strides, x, b, h, i, j)
    if t.bias is not None:
        at = t.bias + b * t.bias_strides[0] + h * t.bias_strides[1]
        at += i.to(tl.int64) * t.bias_strides[2] + j.to(tl.int64) * t.bias_strides[3]
        moves += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return moves * x.bias_gradient


@triton.jit
def tangent_step(x, state, rows, b, h, j0, bits, sizes):
    d_output, d_lse, left, right = state
    i, edges, query, d_query, lse, hashes, t = rows
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    zeros = tl.zeros([BM, BN], tl.float32)
    if x.weight is not None:
        products = additive_products(x, b, h, i, j, zeros)
        moves = additive_moves(x, t, b, h, i, j, zeros)
    else:
        key = load_key(x, b, h, keys, sizes[2])
        products, moves = multiply(query, tl.trans(key), sizes[4]), zeros
        if t.query is not None:
            moves += multiply(d_query, tl.trans(key), sizes[4])
        if t.key is not None:
            d_key = load_rows(t.key, t.key_strides, b, h // x.group, keys, x.keys, tl.arange(0, sizes[2]), x.d)
            moves += multiply(query, tl.trans(d_key), sizes[4])
    logits, capped = as_logits(x, products, b, h, i, j)
    visible = visibility(x, i, j, edges, bits)
    below = logits - lse
    weights = tl.where(visible, tl.exp2(tl.where(below > 0, 0.0, below)), 0.0)
    moves = moves * x.product_gradient
    if x.cap is not None:
        moves = moves * (1.0 - capped * capped)
    moves = tl.where(visible, bias_moves(x, t, b, h, i, j, zeros) + moves, 0.0)
    d_lse += tl.sum(weights * moves, 1)
    if x.seed is not None:
        weights = tl.where(is_kept(x, hashes, j), weights, 0.0)
    if t.d_mass is not None:
        entry, last = table_entries(x, b, i, j), 2 * x.radius
        left += tl.sum(tl.where(entry == 0, weights * moves, 0.0), 1)
        right += tl.sum(tl.where((entry == last) & (entry > 0), weights * moves, 0.0), 1)
        between = (entry > 0) & (entry < last) & (i < x.queries) & (j < x.keys)
        at = t.d_mass + ((b * x.heads + h) * x.queries + i.to(tl.int64)) * (last + 1)
        tl.store(at + entry, weights * moves * x.kept_scale, mask=between)
    value = load_value(x, b, h, keys, sizes[3])
    if sizes[5]:
        finite = is_finite(value)
        bad = tl.sum(tl.where(finite, 0, 1), 1) > 0
        value = tl.where(finite, value, 0.0)
        weights = tl.where(bad[None, :] & (weights > 0), float("nan"), weights)
    d_output += multiply_gradients(weights * moves, value, sizes[4])
    if t.value is not None:
        d_value = load_rows(t.value, t.value_strides, b, h // x.group, keys, x.keys, tl.arange(0, sizes[3]), x.e)
        if sizes[5]:
            finite = is_finite(d_value)
            bad = tl.sum(tl.where(finite, 0, 1), 1) > 0
            d_value = tl.where(finite, d_value, 0.0)
            weights = tl.where(bad[None, :] & (weights > 0), float("nan"), weights)
        d_output += multiply_gradients(weights, d_value, sizes[4])
    return d_output, d_lse, left, right


@triton.jit
def tangent_kernel(x, t, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Store the tangents of output and log-sum-exp; that of the mass lacks the share of the log-sum-exp's."""
    row, h, b = program_row(x, BM)
    index = row + tl.arange(0, BM)
    i, inside = index[:, None], index < x.queries
    line = (b * x.heads + h) * x.queries + index
    known = tl.load(t.lse + line, mask=inside, other=float("-inf")) * LOG2E
    lse = tl.where(known == float("-inf"), 0.0, known)
    query = load_query(x, b, h, index, BD)
    d_query = query
    if t.query is not None:
        d_query = load_rows(t.query, t.query_strides, b, h, index, x.queries, tl.arange(0, BD), x.d)
    rows = (i, load_edges(x, b, h, i), query, d_query, lse[:, None], dropout_rows(x, b, h, i), t)
    zeros = tl.zeros([BM], tl.float32)
    state = (tl.zeros([BM, BE], tl.float32), zeros, zeros, zeros)
    state = walk_keys(x, tangent_step, state, rows, b, h, row, (BM, BN, BD, BE, PRECISION, False))
    if (x.start is not None) or (x.pointer is not None):
        if tl.sum(tl.where(is_finite(state[0]), 0, 1)) > 0:  # as in the forward
            state = (tl.zeros([BM, BE], tl.float32), zeros, zeros, zeros)
            state = walk_keys(x, tangent_step, state, rows, b, h, row, (BM, BN, BD, BE, PRECISION, True))
    d_output, d_lse, left, right = state
    if t.sink is not None:
        below = tl.load(x.sink + h) * LOG2E - lse
        share = tl.where(known == float("-inf"), 0.0, tl.exp2(tl.where(below > 0, 0.0, below)))
        d_lse += tl.where(share == 0, 0.0, share * tl.load(t.sink + h))
    output = load_rows(t.output, t.output_strides, b, h, index, x.queries, tl.arange(0, BE), x.e)
    at = t.d_output + b * t.d_output_strides[0] + h * t.d_output_strides[1]
    store_matrix(at, t.d_output_strides[2], t.d_output_strides[3], index, x.queries, tl.arange(0, BE), x.e,
                 d_output * x.kept_scale - d_lse[:, None] * output, PRECISION)  # fmt: skip
    tl.store(t.d_lse + line, d_lse, mask=inside)
    if t.d_mass is not None:
        at = t.d_mass + line.to(tl.int64) * (2 * x.radius + 1)
        tl.store(at, tl.where(x.radius > 0, left, left + right) * x.kept_scale, mask=inside)
        tl.store(at + 2 * x.radius, right * x.kept_scale, mask=index < tl.where(x.radius > 0, x.queries, 0))
