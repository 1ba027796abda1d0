"""Forward: the online softmax over blocks of keys."""

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
    load_query,
    load_value,
    multiply,
    narrow,
    program_row,
    store_matrix,
    table_entries,
    visibility,
    walk_keys,
    walk_part,
)


@triton.jit
def row_logits(x, query, i, edges, b, h, j0, bits, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """The logits of a block of rows for the keys from j0 on, -inf where the mask hides them."""
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    if x.weight is not None:
        products = additive_products(x, b, h, i, j, tl.zeros([BM, BN], tl.float32))
    else:
        key = load_key(x, b, h, keys, query.shape[1])
        products = multiply(query, tl.trans(key), PRECISION)
    logits, _ = as_logits(x, products, b, h, i, j)
    return tl.where(visibility(x, i, j, edges, bits), logits, float("-inf"))


@triton.jit
def forward_step(x, state, rows, b, h, j0, bits, sizes):
    output, total, peak = state
    i, edges, query, hashes = rows
    BM: tl.constexpr = sizes[0]
    BN: tl.constexpr = sizes[1]
    BE: tl.constexpr = sizes[2]
    SHIFT: tl.constexpr = 15.0 if x.value.dtype.element_ty == tl.float16 else 0.0
    keys = j0 + tl.arange(0, BN)
    logits = row_logits(x, query, i, edges, b, h, j0, bits, BM, BN, sizes[3])
    value = load_value(x, b, h, keys, BE)
    if sizes[4]:
        finite = is_finite(value)
        bad = tl.sum(tl.where(finite, 0, 1), 1) > 0
        value = tl.where(finite, value, 0.0)
        logits = tl.where(bad[None, :] & (logits > float("-inf")), float("nan"), logits)
    highest = tl.maximum(peak, tl.max(logits, 1))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - anchor[:, None] + SHIFT)
    shrink = tl.exp2(peak - anchor)
    total = total * shrink + tl.sum(weights, 1)
    if x.seed is not None:
        weights = tl.where(is_kept(x, hashes, keys[None, :]), weights, 0.0)
    output = output * shrink[:, None] + multiply(narrow(weights, value.dtype, sizes[3]), value, sizes[3])
    return output, total, highest


@triton.jit
def mass_step(x, state, rows, b, h, j0, bits, sizes):
    """Sum the weights of the nearest and the farthest distances, and store those of all others."""
    left, right = state
    i, edges, query, hashes, peak, factor, mass = rows
    BN: tl.constexpr = sizes[1]
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    logits = row_logits(x, query, i, edges, b, h, j0, bits, sizes[0], BN, sizes[3])
    weights = tl.exp2(logits - peak[:, None]) * factor[:, None]
    if x.seed is not None:
        weights = tl.where(is_kept(x, hashes, j), weights, 0.0)
    entry = table_entries(x, b, i, j)
    last = 2 * x.radius
    left += tl.sum(tl.where(entry == 0, weights, 0.0), 1)
    right += tl.sum(tl.where((entry == last) & (entry > 0), weights, 0.0), 1)
    between = (entry > 0) & (entry < last) & (i < x.queries) & (j < x.keys)
    tl.store(mass + i.to(tl.int64) * (last + 1) + entry, weights, mask=between)
    return left, right


@triton.jit
def forward_kernel(x, output, output_strides, lse, mass, parts, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                   BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Store output, log-sum-exp (B, H, Q) and, where requested, mass by distance (B, H, Q, 2 radius + 1).

    With parts of the keys, there is one block of queries, and output and log-sum-exp start with an axis of parts.
    """
    SHIFT: tl.constexpr = 15.0 if x.value.dtype.element_ty == tl.float16 else 0.0
    row, h, b = program_row(x, BM)
    least, most = 0, x.keys
    if len(output_strides) == 5:
        batch = tl.num_programs(0) // (parts * x.heads)
        part = b // batch
        b = b % batch
        step = tl.cdiv(tl.cdiv(x.keys, parts), TILE) * TILE
        least = part.to(tl.int32) * step
        most = tl.minimum(least + step, x.keys)
        lse += part * batch * x.heads * x.queries
    index = row + tl.arange(0, BM)
    i = index[:, None]
    edges = load_edges(x, b, h, i)
    query = load_query(x, b, h, index, BD)
    rows = (i, edges, query, dropout_rows(x, b, h, i))
    zeros = tl.zeros([BM], tl.float32)
    lowest = tl.full([BM], float("-inf"), tl.float32)
    state = (tl.zeros([BM, BE], tl.float32), zeros, lowest)
    sums, total, peak = walk_part(x, forward_step, state, rows, b, h, row, least, most, (BM, BN, BE, PRECISION, False))
    if (x.start is not None) or (x.pointer is not None):
        # A masked value that is not finite makes 0 * inf: compute again, without such values.
        if tl.sum(tl.where(is_finite(sums), 0, 1)) > 0:
            state = (tl.zeros([BM, BE], tl.float32), zeros, lowest)
            sums, total, peak = walk_part(
                x, forward_step, state, rows, b, h, row, least, most, (BM, BN, BE, PRECISION, True)
            )
    if x.sink is not None:
        sink = tl.load(x.sink + h) * LOG2E
        highest = tl.maximum(peak, sink)
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(peak - anchor)
        total = total * shrink + tl.exp2(sink - anchor + SHIFT)
        sums = sums * shrink[:, None]
        peak = highest
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    factor = x.kept_scale / total
    if len(output_strides) == 5:
        at = output + part * output_strides[0] + b * output_strides[1] + h * output_strides[2]
        store_matrix(at, output_strides[3], output_strides[4], index, x.queries, tl.arange(0, BE), x.e,
                     sums * factor[:, None], PRECISION)  # fmt: skip
    else:
        at = output + b * output_strides[0] + h * output_strides[1]
        store_matrix(at, output_strides[2], output_strides[3], index, x.queries, tl.arange(0, BE), x.e,
                     sums * factor[:, None], PRECISION)  # fmt: skip
    logsum = tl.where(empty, float("-inf"), ((peak - SHIFT) + tl.log2(total)) / LOG2E)
    tl.store(lse + (b * x.heads + h) * x.queries + index, logsum, mask=index < x.queries)
    if mass is not None:
        anchor = tl.where(peak == float("-inf"), 0.0, peak) - SHIFT
        table = mass + (b * x.heads + h) * x.queries * (2 * x.radius + 1)
        left, right = walk_keys(
            x, mass_step, (zeros, zeros), (i, edges, query, rows[3], anchor, factor, table), b, h, row,
            (BM, BN, BE, PRECISION, False),
        )  # fmt: skip
        at = table + index.to(tl.int64) * (2 * x.radius + 1)
        tl.store(at, left, mask=index < x.queries)
        tl.store(at + 2 * x.radius, right, mask=index < tl.where(x.radius > 0, x.queries, 0))


@triton.jit
def combine_kernel(sums, logsums, sink, output, output_strides, lse, heads, queries, e, parts, rows,
                   PARTS: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Combine the outputs (parts, B, H, Q, E) and log-sum-exps (parts, B, H, Q) of parts of the keys, and the sink."""
    row = tl.program_id(0).to(tl.int64)
    i, h, b = row % queries, row // queries % heads, row // queries // heads
    part, columns = tl.arange(0, PARTS).to(tl.int64), tl.arange(0, BE)
    each = tl.load(logsums + part * rows + row, mask=part < parts, other=float("-inf"))
    highest = tl.max(each, 0)
    if sink is not None:
        highest = tl.maximum(highest, tl.load(sink + h))
    bad = tl.sum(tl.where(each != each, 1, 0), 0) > 0
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2((each - anchor) * LOG2E)
    total = tl.sum(shares, 0)
    if sink is not None:
        total += tl.exp2((tl.load(sink + h) - anchor) * LOG2E)
    logsum = tl.where(total == 0, float("-inf"), anchor + tl.log2(total) / LOG2E)
    tl.store(lse + row, tl.where(bad, float("nan"), logsum))
    inside = (part < parts)[:, None] & (columns < e)[None, :]
    values = tl.load(sums + (part * rows + row)[:, None] * e + columns[None, :], mask=inside, other=0.0)
    # A part that sees nothing has a share of 0 and an output of 0.
    mean = tl.sum(values * (shares / tl.where(total == 0, 1.0, total))[:, None], 0)
    at = output + b * output_strides[0] + h * output_strides[1] + i * output_strides[2]
    tl.store(at + columns * output_strides[3], narrow(mean, output.dtype.element_ty, PRECISION), mask=columns < e)
