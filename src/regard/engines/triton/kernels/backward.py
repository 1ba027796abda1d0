"""Backward, from the log-sum-exp: the weights of a block are computed again, never stored.

Every number is written by one program, which sums it in one order: same inputs, same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels.entries import (
    LOG2E,
    TILE,
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
    narrow,
    program_row,
    store_matrix,
    table_entries,
    tanh,
    visibility,
    walk_keys,
)


@triton.jit
def load_output_gradient(x, g, b, h, rows, BE: tl.constexpr):
    data = g.d_output + b * g.d_output_strides[0] + h * g.d_output_strides[1]
    return load_matrix(data, g.d_output_strides[2], g.d_output_strides[3], rows, x.queries, tl.arange(0, BE), x.e)


@triton.jit
def load_row_numbers(x, g, b, h, i):
    """The log-sum-exp in base two, 0 for rows that see nothing, and delta."""
    at = (b * x.heads + h) * x.queries + i
    lse = tl.load(g.lse + at, mask=i < x.queries, other=0.0) * LOG2E
    return tl.where(lse == float("-inf"), 0.0, lse), tl.load(g.delta + at, mask=i < x.queries, other=0.0)


@triton.jit
def weights_and_gradients(x, g, products, d_weights, b, h, i, j, rows, edges, bits):
    """Return weights after dropout (but not scaled), gradients of logits, and of products, for a block of entries.

    rows: log-sum-exp, delta and hash of the queries. d_weights: the products of output gradients and values.
    """
    lse, delta, hashes = rows
    logits, capped = as_logits(x, products, b, h, i, j)
    visible = visibility(x, i, j, edges, bits)
    below = logits - lse
    weights = tl.where(visible, tl.exp2(tl.where(below > 0, 0.0, below)), 0.0)
    if g.d_mass is not None:
        strides = (x.heads * x.queries * (2 * x.radius + 1), x.queries * (2 * x.radius + 1), 2 * x.radius + 1)
        d_weights += load_table(g.d_mass, strides, x, b, h, i, j)
    dropped = weights
    if x.seed is not None:
        kept = is_kept(x, hashes, j)
        dropped = tl.where(kept, weights, 0.0)
        d_weights = tl.where(kept, d_weights * x.kept_scale, 0.0)
    d_logits = tl.where(visible, weights * (d_weights - delta), 0.0)
    d_products = d_logits
    if x.cap is not None:
        d_products = d_logits * (1.0 - capped * capped)
    return dropped, d_logits, d_products


@triton.jit
def multiply_gradients(gradients, matrix, PRECISION: tl.constexpr):
    """gradients @ matrix. Gradients may leave the range of float16: each row is scaled by a power of two first."""
    if matrix.dtype == tl.float16:
        size = tl.max(tl.abs(gradients), 1)
        usual = (size > 1e-30) & (size < 1e30)
        exponent = tl.where(usual, 12.0 - tl.floor(tl.log2(tl.where(usual, size, 1.0))), 0.0)
        scaled = narrow(gradients * tl.exp2(exponent)[:, None], tl.float16, PRECISION)
        return multiply(scaled, matrix, PRECISION) * tl.exp2(-exponent)[:, None]
    return multiply(narrow(gradients, matrix.dtype, PRECISION), matrix, PRECISION)


@triton.jit
def query_step(x, state, rows, b, h, j0, bits, sizes):
    """Add the gradients of a block of queries by the keys from j0 on."""
    d_query, left, right, d_weight = state
    i, edges, query, numbers, d_output, g = rows
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    BD: tl.constexpr = sizes[2]
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    key = load_key(x, b, h, keys, BD)
    if x.weight is not None:
        products = additive_products(x, b, h, i, j, tl.zeros([BM, BN], tl.float32))
    else:
        products = multiply(query, tl.trans(key), sizes[4])
    d_weights = multiply(d_output, tl.trans(load_value(x, b, h, keys, sizes[3])), sizes[4])
    _, d_logits, d_products = weights_and_gradients(x, g, products, d_weights, b, h, i, j, numbers, edges, bits)
    if g.d_row_table is not None:
        entry = table_entries(x, b, i, j)
        last = 2 * x.radius
        left += tl.sum(tl.where(entry == 0, d_logits, 0.0), 1)
        right += tl.sum(tl.where((entry == last) & (entry > 0), d_logits, 0.0), 1)
        between = (entry > 0) & (entry < last) & (i < x.queries) & (j < x.keys)
        at = g.d_row_table + ((b * x.heads + h) * x.queries + i.to(tl.int64)) * (last + 1)
        tl.store(at + entry, d_logits * x.bias_gradient, mask=between)
    if x.weight is not None:
        columns = tl.arange(0, BD)
        for d in range(x.d):
            q = tl.sum(tl.where(columns[None, :] == d, query.to(tl.float32), 0.0), 1)
            k = tl.sum(tl.where(columns[None, :] == d, key.to(tl.float32), 0.0), 1)
            t = tanh(q[:, None] + k[None, :])
            t = tl.where(t != t, 0.0, t)  # of a masked key that is not finite
            weight = tl.load(x.weight + h * x.weight_stride + d)
            of_query = tl.sum(d_products * (1.0 - t * t), 1) * weight
            d_query += tl.where(columns[None, :] == d, of_query[:, None], 0.0)
            d_weight += tl.where(columns == d, tl.sum(tl.sum(d_products * t, 1), 0), 0.0)
    else:
        if sizes[5]:
            key = tl.where(is_finite(key), key, 0.0)
        d_query += multiply_gradients(d_products, key, sizes[4])
    return d_query, left, right, d_weight


@triton.jit
def query_gradient_kernel(x, g, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                          PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of queries, of a row table, and of an additive weight by block of queries."""
    row, h, b = program_row(x, BM)
    index = row + tl.arange(0, BM)
    i = index[:, None]
    edges = load_edges(x, b, h, i)
    lse, delta = load_row_numbers(x, g, b, h, i)
    query, d_output = load_query(x, b, h, index, BD), load_output_gradient(x, g, b, h, index, BE)
    rows = (i, edges, query, (lse, delta, dropout_rows(x, b, h, i)), d_output, g)
    zeros = tl.zeros([BM], tl.float32)
    state = (tl.zeros([BM, BD], tl.float32), zeros, zeros, tl.zeros([BD], tl.float32))
    state = walk_keys(x, query_step, state, rows, b, h, row, (BM, BN, BD, BE, PRECISION, False))
    if ((x.start is not None) or (x.pointer is not None)) and (x.weight is None):
        if tl.sum(tl.where(is_finite(state[0]), 0, 1)) > 0:  # as in the forward
            state = (tl.zeros([BM, BD], tl.float32), zeros, zeros, tl.zeros([BD], tl.float32))
            state = walk_keys(x, query_step, state, rows, b, h, row, (BM, BN, BD, BE, PRECISION, True))
    d_query, left, right, d_weight = state
    store_matrix(g.d_query + (b * x.heads + h) * x.queries * x.d, x.d, 1, index, x.queries, tl.arange(0, BD), x.d,
                 d_query * x.product_gradient, PRECISION)  # fmt: skip
    if g.d_row_table is not None:
        left = tl.where(x.radius > 0, left, left + right)
        at = g.d_row_table + ((b * x.heads + h) * x.queries + index.to(tl.int64)) * (2 * x.radius + 1)
        tl.store(at, left * x.bias_gradient, mask=index < x.queries)
        tl.store(at + 2 * x.radius, right * x.bias_gradient, mask=index < tl.where(x.radius > 0, x.queries, 0))
    if x.weight is not None:
        columns = tl.arange(0, BD)
        at = g.d_weight + tl.program_id(0).to(tl.int64) * x.d + columns
        tl.store(at, d_weight * x.product_gradient, mask=columns < x.d)


@triton.jit
def key_step(x, state, fixed, b, h, i0, bits, sizes):
    """Add the gradients of a block of keys by the queries from i0 on; blocks are keys by queries."""
    d_key, d_value = state
    j, key, value, g = fixed
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    BD: tl.constexpr = sizes[2]
    index = i0 + tl.arange(0, BM)
    i = index[None, :]
    query, d_output = load_query(x, b, h, index, BD), load_output_gradient(x, g, b, h, index, sizes[3])
    lse, delta = load_row_numbers(x, g, b, h, i)
    if x.weight is not None:
        products = additive_products(x, b, h, i, j, tl.zeros([BN, BM], tl.float32))
    else:
        products = multiply(key, tl.trans(query), sizes[4])
    d_weights = multiply(value, tl.trans(d_output), sizes[4])
    weights, _, d_products = weights_and_gradients(
        x, g, products, d_weights, b, h, i, j, (lse, delta, dropout_rows(x, b, h, i)), load_edges(x, b, h, i), bits
    )
    if sizes[5]:
        # The weights of a row whose query is not finite are NaN already, by its log-sum-exp.
        finite = is_finite(d_output)
        bad = tl.sum(tl.where(finite, 0, 1), 1) > 0
        weights = tl.where(bad[None, :] & (weights > 0), float("nan"), weights)
        query, d_output = tl.where(is_finite(query), query, 0.0), tl.where(finite, d_output, 0.0)
    if d_output.dtype == tl.float16:
        weights = weights * 32768.0  # the small ones keep their digits
    d_value += multiply(narrow(weights, d_output.dtype, sizes[4]), d_output, sizes[4])
    if x.weight is not None:
        columns = tl.arange(0, BD)
        for d in range(x.d):
            q = tl.sum(tl.where(columns[None, :] == d, query.to(tl.float32), 0.0), 1)
            k = tl.sum(tl.where(columns[None, :] == d, key.to(tl.float32), 0.0), 1)
            t = tanh(k[:, None] + q[None, :])
            t = tl.where(t != t, 0.0, t)
            of_key = tl.sum(d_products * (1.0 - t * t), 1) * tl.load(x.weight + h * x.weight_stride + d)
            d_key += tl.where(columns[None, :] == d, of_key[:, None], 0.0)
    else:
        d_key += multiply_gradients(d_products, query, sizes[4])
    return d_key, d_value


@triton.jit
def walk_rows(x, step: tl.constexpr, state, fixed, b, h, j0, sizes):
    """Call `step` for all blocks of queries that may see one of the keys from j0 on."""
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    line = b * x.column_strides[0] + h * x.column_strides[1] + j0 // TILE
    if x.pointer is not None:
        for n in range(tl.load(x.column_pointer + line), tl.load(x.column_pointer + line + 1)):
            first, bits = tl.load(x.column_rows + n) * TILE, tl.load(x.column_index + n)
            for i0 in range(first, tl.minimum(first + TILE, x.queries), BM):
                state = step(x, state, fixed, b, h, i0, bits, sizes)
    else:
        lo, hi = 0, x.queries
        if x.start is not None:
            tiles = tl.arange(0, (BN + TILE - 1) // TILE)
            line = b * x.row_strides[0] + h * x.row_strides[1] + j0 // TILE + tiles
            inside = (j0 // TILE + tiles) * TILE < x.keys
            lo = tl.min(tl.load(x.row_first + line, mask=inside, other=x.queries)) // BM * BM
            hi = tl.max(tl.load(x.row_last + line, mask=inside, other=0))
        for i0 in range(lo, hi, BM):
            state = step(x, state, fixed, b, h, i0, -1, sizes)
    return state


@triton.jit
def walk_group(x, fixed, b, shared, j0, sizes):
    """Sum the gradients of keys and values over the query heads that share them."""
    state = (tl.zeros([sizes[1], sizes[2]], tl.float32), tl.zeros([sizes[1], sizes[3]], tl.float32))
    for n in range(x.group):
        state = walk_rows(x, key_step, state, fixed, b, shared * x.group + n, j0, sizes)
    return state


@triton.jit
def key_gradient_kernel(x, g, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of keys and values."""
    blocks, kv_heads = tl.cdiv(x.keys, BN), x.heads // x.group
    program = tl.program_id(0)
    j0, head = (program % blocks) * BN, program // blocks
    shared, b = (head % kv_heads).to(tl.int64), (head // kv_heads).to(tl.int64)
    index = j0 + tl.arange(0, BN)
    key, value = load_key(x, b, shared * x.group, index, BD), load_value(x, b, shared * x.group, index, BE)
    fixed = (index[:, None], key, value, g)
    d_key, d_value = walk_group(x, fixed, b, shared, j0, (BM, BN, BD, BE, PRECISION, False))
    if (x.start is not None) or (x.pointer is not None):
        bad = tl.sum(tl.where(is_finite(d_key), 0, 1)) + tl.sum(tl.where(is_finite(d_value), 0, 1))
        if bad > 0:  # a query, or a gradient, that does not see these keys is not finite
            d_key, d_value = walk_group(x, fixed, b, shared, j0, (BM, BN, BD, BE, PRECISION, True))
    scale = x.kept_scale
    if g.d_output.dtype.element_ty == tl.float16:
        scale = scale / 32768.0
    line = (b * kv_heads + shared) * x.keys
    store_matrix(g.d_key + line * x.d, x.d, 1, index, x.keys, tl.arange(0, BD), x.d, d_key * x.product_gradient,
                 PRECISION)  # fmt: skip
    store_matrix(g.d_value + line * x.e, x.e, 1, index, x.keys, tl.arange(0, BE), x.e, d_value * scale, PRECISION)
