"""Inspection: statistics of rows, their largest weights, the weights of some keys, and pooled maps."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels.entries import (
    LOG2E,
    TILE,
    find_bits,
    load_edges,
    load_query,
    narrow,
    program_row,
    split_row,
    walk_keys,
    walk_part,
)
from regard.engines.triton.kernels.forward import row_logits

LOWEST = tl.constexpr(-2000.0)  # logits this far below the largest have a weight of 0 in float32, and 0 * -inf is NaN


@triton.jit
def statistics_step(x, state, rows, b, h, j0, bits, sizes):
    peak, total, logit_sum, distance, mass = state
    i, edges, query, position, s = rows
    BN: tl.constexpr = sizes[1]
    keys = j0 + tl.arange(0, BN)
    logits = row_logits(x, query, i, edges, b, h, j0, bits, sizes[0], BN, sizes[2])
    highest = tl.maximum(peak, tl.max(logits, 1))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    below = logits - anchor[:, None]
    weights = tl.exp2(below)
    shrink = tl.exp2(peak - anchor)
    if s.entropy is not None:
        logit_sum = (logit_sum + total * tl.maximum(peak - anchor, LOWEST)) * shrink
        logit_sum += tl.sum(weights * tl.maximum(below, LOWEST), 1)
        away = tl.abs(position - keys.to(tl.int64)[None, :]).to(tl.float32)
        distance = distance * shrink + tl.sum(weights * away, 1)
    if s.mass is not None:
        chosen = tl.load(s.chosen + keys, mask=keys < x.keys, other=0) != 0
        mass = mass * shrink + tl.sum(tl.where(chosen[None, :], weights, 0.0), 1)
    return highest, total * shrink + tl.sum(weights, 1), logit_sum, distance, mass


@triton.jit
def statistics_kernel(x, s, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Store log-sum-exp and, where requested, entropy, largest logit, mean distance and mass of chosen keys."""
    row, h, b = program_row(x, BM)
    index = row + tl.arange(0, BM)
    i = index[:, None]
    position = i.to(tl.int64)
    if s.entropy is not None:
        position += tl.load(x.offset + b)
    rows = (i, load_edges(x, b, h, i), load_query(x, b, h, index, BD), position, s)
    zeros = tl.zeros([BM], tl.float32)
    state = (tl.full([BM], float("-inf"), tl.float32), zeros, zeros, zeros, zeros)
    peak, total, logit_sum, distance, mass = walk_keys(
        x, statistics_step, state, rows, b, h, row, (BM, BN, PRECISION)
    )  # fmt: skip
    largest = peak
    distance = tl.where(total == 0, 0.0, distance / tl.where(total == 0, 1.0, total))
    if x.sink is not None:
        sink = tl.load(x.sink + h) * LOG2E
        highest = tl.maximum(peak, sink)
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, own = tl.exp2(peak - anchor), tl.exp2(sink - anchor)
        logit_sum = (logit_sum + total * tl.maximum(peak - anchor, LOWEST)) * shrink
        logit_sum += own * tl.maximum(sink - anchor, LOWEST)
        total = total * shrink + own
        mass = mass * shrink
        peak = highest
    empty, undefined, inside = total == 0, total != total, index < x.queries
    total = tl.where(empty, 1.0, total)
    logsum = tl.log2(total)
    at = (b * x.heads + h) * x.queries + index
    tl.store(s.lse + at, tl.where(empty, float("-inf"), (peak + logsum) / LOG2E), mask=inside)
    if s.entropy is not None:
        entropy = tl.where(empty, 0.0, tl.maximum((logsum - logit_sum / total) / LOG2E, 0.0))
        tl.store(s.entropy + at, tl.where(undefined, float("nan"), entropy), mask=inside)
        tl.store(s.max_logit + at, tl.where(undefined, float("nan"), largest / LOG2E), mask=inside)
        tl.store(s.distance + at, tl.where(undefined, float("nan"), distance), mask=inside)
    if s.mass is not None:
        tl.store(s.mass + at, tl.where(undefined, float("nan"), mass / total), mask=inside)


@triton.jit
def top_step(x, state, rows, b, h, j0, bits, sizes):
    """Insert the logits of a block into lists in descending order, of equal ones the first key first."""
    best, best_keys = state
    i, edges, query, after, after_key = rows
    BN: tl.constexpr = sizes[1]
    keys = (j0 + tl.arange(0, BN))[None, :]
    logits = row_logits(x, query, i, edges, b, h, j0, bits, sizes[0], BN, sizes[3])
    remaining = (logits < after) | ((logits == after) & (keys > after_key))  # false for NaN
    logits = tl.where(remaining, logits, float("-inf"))
    slot = tl.arange(0, sizes[2])[None, :]
    before = tl.maximum(slot - 1, 0) + tl.zeros(best.shape, tl.int32)
    most = tl.max(logits, 1)
    while tl.max(tl.where(most > tl.min(best, 1), 1, 0)) > 0:
        key = tl.min(tl.where(logits == most[:, None], keys, x.keys), 1)[:, None]
        place = tl.sum(tl.where(best >= most[:, None], 1, 0), 1)[:, None]
        best = tl.where(slot < place, best, tl.where(slot == place, most[:, None], tl.gather(best, before, 1)))
        best_keys = tl.where(slot < place, best_keys, tl.where(slot == place, key, tl.gather(best_keys, before, 1)))
        logits = tl.where(keys == key, float("-inf"), logits)
        most = tl.max(logits, 1)
    return best, best_keys


@triton.jit
def top_kernel(x, lse, after, after_key, top_keys, top_weights, first, top, BM: tl.constexpr, BN: tl.constexpr,
               BD: tl.constexpr, TOP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Store the keys and weights with the ranks from `first` on, at most TOP, in tensors (B, H, Q, top).

    after, after_key: logit and key of the last rank before these (B, H, Q), which the kernel replaces by its own last.
    """
    row, h, b = program_row(x, BM)
    index = row + tl.arange(0, BM)
    i, inside = index[:, None], index[:, None] < x.queries
    at = (b * x.heads + h) * x.queries + i
    limit = tl.load(after + at, mask=inside, other=float("-inf"))
    limit_key = tl.load(after_key + at, mask=inside, other=0)
    rows = (i, load_edges(x, b, h, i), load_query(x, b, h, index, BD), limit, limit_key)
    state = (tl.full([BM, TOP], float("-inf"), tl.float32), tl.full([BM, TOP], -1, tl.int32))
    best, best_keys = walk_keys(x, top_step, state, rows, b, h, row, (BM, BN, TOP, PRECISION))
    logsum = tl.load(lse + at, mask=inside, other=0.0)
    some = (best > float("-inf")) & (logsum == logsum)
    weights = tl.where(some, tl.exp2(best - tl.where(some, logsum, 0.0) * LOG2E), 0.0)
    rank = first + tl.arange(0, TOP)[None, :]
    tl.store(top_keys + at * top + rank, best_keys.to(tl.int64), mask=inside & (rank < top))
    tl.store(top_weights + at * top + rank, weights, mask=inside & (rank < top))
    last = tl.arange(0, TOP)[None, :] == TOP - 1
    key = tl.sum(tl.where(last, best_keys, 0), 1)[:, None]
    tl.store(after + at, tl.min(best, 1)[:, None], mask=inside)
    tl.store(after_key + at, key, mask=inside)


@triton.jit
def load_logsum(x, lse, b, h, i):
    """Load the log-sum-exp in base two, 0 for rows that see nothing."""
    logsum = tl.load(lse + (b * x.heads + h) * x.queries + i, mask=i < x.queries, other=0.0)
    return tl.where(logsum == float("-inf"), 0.0, logsum * LOG2E)


@triton.jit
def weights_kernel(x, lse, blocks, block_count, columns, output, output_strides, BM: tl.constexpr, BN: tl.constexpr,
                   BD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Store the weights of some keys: blocks are those with a key, columns (K,) its column of the output or -1."""
    program = tl.program_id(0)
    row, h, b = split_row(x, program // block_count, BM)
    j0 = tl.load(blocks + program % block_count) * BN
    index, keys = row + tl.arange(0, BM), j0 + tl.arange(0, BN)
    i = index[:, None]
    query, edges = load_query(x, b, h, index, BD), load_edges(x, b, h, i)
    logits = row_logits(x, query, i, edges, b, h, j0, find_bits(x, b, h, row, j0), BM, BN, PRECISION)
    weights = narrow(tl.exp2(logits - load_logsum(x, lse, b, h, i)), output.dtype.element_ty, PRECISION)
    column = tl.load(columns + keys, mask=keys < x.keys, other=-1)[None, :]
    at = output + b * output_strides[0] + h * output_strides[1] + i.to(tl.int64) * output_strides[2]
    tl.store(at + column.to(tl.int64) * output_strides[3], weights, mask=(i < x.queries) & (column >= 0))


@triton.jit
def pool_step(x, state, rows, b, h, j0, bits, sizes):
    i, edges, query, logsum, inside, first, stop = rows
    BN: tl.constexpr = sizes[1]
    j = (j0 + tl.arange(0, BN))[None, :]
    logits = row_logits(x, query, i, edges, b, h, j0, bits, sizes[0], BN, sizes[2])
    weights = tl.where(inside & (j >= first) & (j < stop), tl.exp2(logits - logsum), 0.0)
    return (state[0] + tl.sum(weights, 1),)


@triton.jit
def pool_kernel(x, lse, output, height, width, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Store the means of the weights of bins, (B, H, height, width), as adaptive_avg_pool2d does."""
    program = tl.program_id(0)
    c, r, head = (program % width).to(tl.int64), (program // width % height).to(tl.int64), program // width // height
    h, b = (head % x.heads).to(tl.int64), (head // x.heads).to(tl.int64)
    start, end = (r * x.queries // height).to(tl.int32), tl.cdiv((r + 1) * x.queries, height).to(tl.int32)
    first, stop = (c * x.keys // width).to(tl.int32), tl.cdiv((c + 1) * x.keys, width).to(tl.int32)
    total = tl.zeros([BM], tl.float32)
    for row in range(start // BM * BM, end, BM):
        index = row + tl.arange(0, BM)
        i = index[:, None]
        edges, query = load_edges(x, b, h, i), load_query(x, b, h, index, BD)
        rows = (i, edges, query, load_logsum(x, lse, b, h, i), (i >= start) & (i < end), first, stop)
        (total,) = walk_part(
            x, pool_step, (total,), rows, b, h, row, first // TILE * TILE, stop, (BM, BN, PRECISION)
        )  # fmt: skip
    mean = tl.sum(total, 0) / ((end - start).to(tl.float32) * (stop - first).to(tl.float32))
    at = (head.to(tl.int64) * height + r) * width + c
    tl.store(output + at, narrow(mean, output.dtype.element_ty, PRECISION))
