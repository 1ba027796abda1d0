"""The recurrence of linear attention, chunk by chunk, with the names of csrc/recurrence.h.

Of a chunk with a state S before it, and G_ij the decay of what token j wrote until token i reads it:

    P = tril(Q Kᵀ * G)    B = tril(K Kᵀ * G, -1)    T = (1 + beta B)⁻¹
    R = V - (before K) S    U = T (beta R), or V without beta    W = R - B U, so that U = beta W
    out = (before Q) S + P U    S = total S + (after K)ᵀ U

`before` is the decay from the start of the chunk to a token, `after` from a token to the end and `total` that of the
whole chunk. Each is the exponential of a sum of decays, never a quotient, so that decays may be -inf. P, B and T of all
chunks are computed in parallel; states are computed one after another, in parallel for blocks of their columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.engines.triton.kernels.entries import load_matrix, multiply, store_matrix


@triton.jit
def program_head(x, blocks):
    """The block, the head and the batch row of a program."""
    program = tl.program_id(0)
    head = program // blocks
    return program % blocks, (head % x.heads).to(tl.int64), (head // x.heads).to(tl.int64)


@triton.jit
def load_query(x, b, h, rows, columns):
    data = x.query + b * x.query_strides[0] + (h // x.query_group) * x.query_strides[1]
    return load_matrix(data, x.query_strides[2], x.query_strides[3], rows, x.tokens, columns, x.d)


@triton.jit
def load_key(x, b, h, rows, columns):
    data = x.key + b * x.key_strides[0] + (h // x.key_group) * x.key_strides[1]
    return load_matrix(data, x.key_strides[2], x.key_strides[3], rows, x.tokens, columns, x.d)


@triton.jit
def load_value(x, b, h, rows, columns):
    data = x.value + b * x.value_strides[0] + (h // x.value_group) * x.value_strides[1]
    return load_matrix(data, x.value_strides[2], x.value_strides[3], rows, x.tokens, columns, x.e).to(tl.float32)


@triton.jit
def load_beta(x, b, h, rows):
    """Load betas (rows, 1), zeros outside."""
    at = x.beta + b * x.beta_strides[0] + h * x.beta_strides[1] + rows.to(tl.int64) * x.beta_strides[2]
    return tl.load(at, mask=rows < x.tokens, other=0.0)[:, None]


@triton.jit
def load_head_decay(x, b, h, rows, end):
    """Load log-decays (rows,) of a head, zeros from row `end` on."""
    at = x.decay + b * x.decay_strides[0] + h * x.decay_strides[1] + rows.to(tl.int64) * x.decay_strides[2]
    return tl.load(at, mask=rows < end, other=0.0)


@triton.jit
def load_channel_decay(x, b, h, rows, end, columns):
    """Load log-decays (rows, columns) of channels, zeros from row `end` on."""
    data = x.decay + b * x.decay_strides[0] + h * x.decay_strides[1]
    return load_matrix(data, x.decay_strides[2], x.decay_strides[3], rows, end, columns, x.d)


@triton.jit
def load_decays(x, b, h, first, columns, C: tl.constexpr):
    """Return `before` and `after` (rows, 1 or columns) and `total` (1 or columns, 1) of a chunk."""
    rows, end = first + tl.arange(0, C), tl.minimum(first + C, x.tokens)
    if x.decay is None:
        before = tl.full([C, 1], 1.0, tl.float32)
        after, total = before, tl.full([1, 1], 1.0, tl.float32)
    elif len(x.decay_strides) == 4:
        here = load_channel_decay(x, b, h, rows, end, columns)
        later = load_channel_decay(x, b, h, rows + 1, end, columns)
        before, after = tl.exp(tl.cumsum(here, 0)), tl.exp(tl.cumsum(later, 0, reverse=True))
        total = tl.exp(tl.sum(here, 0))[:, None]
    else:
        here, later = load_head_decay(x, b, h, rows, end), load_head_decay(x, b, h, rows + 1, end)
        before, after = tl.exp(tl.cumsum(here, 0))[:, None], tl.exp(tl.cumsum(later, 0, reverse=True))[:, None]
        total = tl.exp(tl.full([1, 1], 0.0, tl.float32) + tl.sum(here, 0))
    return before, after, total


@triton.jit
def pair_decays(x, b, h, first, C: tl.constexpr):
    """G of a decay per head: the exponential of the sum of the decays after token j up to token i."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    decay = load_head_decay(x, b, h, first + tl.arange(0, C), tl.minimum(first + C, x.tokens))
    return tl.exp(tl.cumsum(tl.where(i > j, decay[:, None], 0.0), 0))


@triton.jit
def channel_decays(x, b, h, first, j, sums, columns, C: tl.constexpr):
    """G of a decay per channel for what token j of a chunk wrote (rows, columns), from the sums of token j + 1."""
    i = tl.arange(0, C)[:, None]
    next_row = first + j + 1 + tl.arange(0, 1)
    decay = load_channel_decay(x, b, h, next_row, tl.minimum(first + C, x.tokens), columns)
    sums = tl.where(i > j, sums + decay, 0.0)
    return sums, tl.where(i >= j, tl.exp(sums), 0.0)


@triton.jit
def invert(lower, C: tl.constexpr):
    """The inverse of 1 + lower, which is zero on the diagonal and above."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for r in range(1, C):
        row = tl.sum(tl.where(i == r, lower, 0.0), 0)
        inverse = tl.where(i == r, inverse - tl.sum(row[:, None] * inverse, 0)[None, :], inverse)
    return inverse


@triton.jit
def pairs_kernel(x, products, overlaps, inverses, C: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Store P, and with beta T and, where requested, B: (B, H, chunks, C, C)."""
    chunks = tl.cdiv(x.tokens, C)
    n, h, b = program_head(x, chunks)
    first, index = n * C, tl.arange(0, C)
    rows, i, j = first + index, index[:, None], index[None, :]
    product, overlap = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for d0 in range(0, x.d, BD):
        columns = d0 + tl.arange(0, BD)
        query, key = load_query(x, b, h, rows, columns), load_key(x, b, h, rows, columns)
        if len(x.decay_strides) == 4:
            query, key, sums = query.to(tl.float32), key.to(tl.float32), tl.zeros([C, BD], tl.float32)
            for step in range(C):
                token = C - 1 - step
                sums, decays = channel_decays(x, b, h, first, token, sums, columns, C)
                written = decays * load_key(x, b, h, first + token + tl.arange(0, 1), columns).to(tl.float32)
                product += tl.where(j == token, tl.sum(query * written, 1)[:, None], 0.0)
                if x.beta is not None:
                    overlap += tl.where(j == token, tl.sum(key * written, 1)[:, None], 0.0)
        else:
            product += multiply(query, tl.trans(key), PRECISION)
            if x.beta is not None:
                overlap += multiply(key, tl.trans(key), PRECISION)
    if (x.decay is not None) and (len(x.decay_strides) == 3):
        decays = pair_decays(x, b, h, first, C)
        product, overlap = product * decays, overlap * decays
    at = ((b * x.heads + h) * chunks + n) * C * C + i * C + j
    tl.store(products + at, tl.where(i >= j, product, 0.0))
    if x.beta is not None:
        overlap = tl.where(i > j, overlap, 0.0)
        tl.store(inverses + at, invert(load_beta(x, b, h, rows) * overlap, C))
        if overlaps is not None:
            tl.store(overlaps + at, overlap)


@triton.jit
def walk_kernel(x, products, overlaps, inverses, initial, initial_strides, output, output_strides, final, states,
                errors, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Walk along the tokens with a block of the columns of the state.

    Stores output and final state (B, H, D, E), or for the gradients the states between chunks (B, H, chunks + 1, D, E)
    and with beta W (B, H, N, E).
    """
    block, h, b = program_head(x, tl.cdiv(x.e, BE))
    head, chunks = b * x.heads + h, tl.cdiv(x.tokens, C)
    channels, columns, index = tl.arange(0, BD), block * BE + tl.arange(0, BE), tl.arange(0, C)
    state = tl.zeros([BD, BE], tl.float32)
    if initial is not None:
        data = initial + b * initial_strides[0] + h * initial_strides[1]
        state = load_matrix(data, initial_strides[2], initial_strides[3], channels, x.d, columns, x.e)
    for n in range(chunks):
        if states is not None:
            data = states + (head * (chunks + 1) + n) * x.d * x.e
            store_matrix(data, x.e, 1, channels, x.d, columns, x.e, state, PRECISION)
        rows, at = n * C + index, (head * chunks + n) * C * C + index[:, None] * C + index[None, :]
        before, after, total = load_decays(x, b, h, n * C, channels, C)
        key = load_key(x, b, h, rows, channels).to(tl.float32)
        written = load_value(x, b, h, rows, columns)
        if x.beta is not None:
            wanted = written - multiply(key * before, state, PRECISION)
            written = multiply(tl.load(inverses + at), load_beta(x, b, h, rows) * wanted, PRECISION)
            if errors is not None:
                error = wanted - multiply(tl.load(overlaps + at), written, PRECISION)
                store_matrix(errors + head * x.tokens * x.e, x.e, 1, rows, x.tokens, columns, x.e, error, PRECISION)
        if output is not None:
            query = load_query(x, b, h, rows, channels).to(tl.float32)
            read = multiply(query * before, state, PRECISION) + multiply(tl.load(products + at), written, PRECISION)
            to = output + b * output_strides[0] + h * output_strides[1]
            store_matrix(to, output_strides[2], output_strides[3], rows, x.tokens, columns, x.e, read, PRECISION)
        state = state * total + multiply(tl.trans(key * after), written, PRECISION)
    if states is not None:
        data = states + (head * (chunks + 1) + chunks) * x.d * x.e
        store_matrix(data, x.e, 1, channels, x.d, columns, x.e, state, PRECISION)
    if final is not None:
        store_matrix(final + head * x.d * x.e, x.e, 1, channels, x.d, columns, x.e, state, PRECISION)


@triton.jit
def load_output_gradient(x, g, b, h, rows, columns):
    data = g.d_output + b * g.d_output_strides[0] + h * g.d_output_strides[1]
    matrix = load_matrix(data, g.d_output_strides[2], g.d_output_strides[3], rows, x.tokens, columns, x.e)
    return matrix.to(tl.float32)


@triton.jit
def walk_back_kernel(x, g, products, inverses, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Walk back with a block of the columns of D, the gradient of the state.

    d_U = Pᵀ d_out + (after K) D;  of what a token writes, with its effect on later tokens: d_written = Tᵀ d_U;
    d_V = beta d_written, or d_U without beta;  D = total D + (before Q)ᵀ d_out - (before K)ᵀ d_V
    """
    block, h, b = program_head(x, tl.cdiv(x.e, BE))
    head, chunks = b * x.heads + h, tl.cdiv(x.tokens, C)
    channels, columns, index = tl.arange(0, BD), block * BE + tl.arange(0, BE), tl.arange(0, C)
    d_state = tl.zeros([BD, BE], tl.float32)
    if g.d_final is not None:
        data = g.d_final + b * g.d_final_strides[0] + h * g.d_final_strides[1]
        d_state = load_matrix(data, g.d_final_strides[2], g.d_final_strides[3], channels, x.d, columns, x.e)
    for step in range(chunks):
        n = chunks - 1 - step
        data = g.d_states + (head * chunks + n) * x.d * x.e
        store_matrix(data, x.e, 1, channels, x.d, columns, x.e, d_state, PRECISION)
        rows, at = n * C + index, (head * chunks + n) * C * C + index[:, None] * C + index[None, :]
        before, after, total = load_decays(x, b, h, n * C, channels, C)
        key = load_key(x, b, h, rows, channels).to(tl.float32)
        query = load_query(x, b, h, rows, channels).to(tl.float32)
        d_output = load_output_gradient(x, g, b, h, rows, columns)
        d_value = multiply(tl.trans(tl.load(products + at)), d_output, PRECISION)
        d_value += multiply(key * after, d_state, PRECISION)
        d_state = d_state * total + multiply(tl.trans(query * before), d_output, PRECISION)
        if x.beta is not None:
            d_written = multiply(tl.trans(tl.load(inverses + at)), d_value, PRECISION)
            data = g.d_written + head * x.tokens * x.e
            store_matrix(data, x.e, 1, rows, x.tokens, columns, x.e, d_written, PRECISION)
            d_value = load_beta(x, b, h, rows) * d_written
            d_state -= multiply(tl.trans(key * before), d_value, PRECISION)
        store_matrix(g.d_value + head * x.tokens * x.e, x.e, 1, rows, x.tokens, columns, x.e, d_value, PRECISION)
    if g.d_initial is not None:
        store_matrix(g.d_initial + head * x.d * x.e, x.e, 1, channels, x.d, columns, x.e, d_state, PRECISION)


@triton.jit
def channel_gradients(x, b, h, first, query, key, d_product, d_overlap, columns, C: tl.constexpr, BD: tl.constexpr):
    """What d_P and d_B add to the gradients of queries, of keys as readers and of keys as writers."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    d_query, d_reader = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    d_writer, sums = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    for step in range(C):
        token = C - 1 - step
        sums, decays = channel_decays(x, b, h, first, token, sums, columns, C)
        written = decays * load_key(x, b, h, first + token + tl.arange(0, 1), columns).to(tl.float32)
        of_query = tl.sum(tl.where(j == token, d_product, 0.0), 1)[:, None]
        d_query += of_query * written
        d_read = of_query * query
        if x.beta is not None:
            of_key = tl.sum(tl.where(j == token, d_overlap, 0.0), 1)[:, None]
            d_reader += of_key * written
            d_read += of_key * key
        d_writer += tl.where(i == token, tl.sum(decays * d_read, 0)[None, :], 0.0)
    return d_query, d_reader, d_writer


@triton.jit
def linear_gradient_kernel(x, g, states, errors, C: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
                           PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of queries, keys, decays and betas of a chunk, for a block of the channels.

        d_P = tril(d_out Uᵀ) * G        d_B = -tril(d_V Uᵀ, -1) * G        d_beta = sum over E of d_written * W
        d_Q = d_P K + before (d_out Sᵀ)
        d_K = d_B K - before (d_V Sᵀ), as a reader,  + d_Pᵀ Q + d_Bᵀ K + after (U Dᵀ), as a writer

    A decay scales what is read at or after its token, but was written before: its gradient is the sum over later tokens
    of the chunk of what they read times its gradient, less what they write, and of D * S after the chunk.
    """
    width_blocks, chunks = tl.cdiv(x.d, BD), tl.cdiv(x.tokens, C)
    program, h, b = program_head(x, chunks * width_blocks)
    n, block, head = program // width_blocks, program % width_blocks, b * x.heads + h
    first, index, channels = n * C, tl.arange(0, C), block * BD + tl.arange(0, BD)
    rows, i, j = first + index, index[:, None], index[None, :]
    d_product, d_overlap = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    d_query, d_reader = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    d_writer, at_end = tl.zeros([C, BD], tl.float32), tl.zeros([BD], tl.float32)
    d_beta = tl.zeros([C], tl.float32)
    tokens = head * x.tokens * x.e
    for e0 in range(0, x.e, BE):
        columns = e0 + tl.arange(0, BE)
        data = states + (head * (chunks + 1) + n) * x.d * x.e
        state = load_matrix(data, x.e, 1, channels, x.d, columns, x.e)
        after = g.d_states + (head * chunks + n) * x.d * x.e
        d_state = load_matrix(after, x.e, 1, channels, x.d, columns, x.e)
        d_output = load_output_gradient(x, g, b, h, rows, columns)
        if x.beta is not None:
            beta = load_beta(x, b, h, rows)
            error = load_matrix(errors + tokens, x.e, 1, rows, x.tokens, columns, x.e)
            d_written = load_matrix(g.d_written + tokens, x.e, 1, rows, x.tokens, columns, x.e)
            d_beta += tl.sum(error * d_written, 1)
            written, d_value = beta * error, beta * d_written
            d_overlap -= multiply(d_value, tl.trans(written), PRECISION)
            d_reader -= multiply(d_value, tl.trans(state), PRECISION)
        else:
            written = load_value(x, b, h, rows, columns)
        d_product += multiply(d_output, tl.trans(written), PRECISION)
        d_query += multiply(d_output, tl.trans(state), PRECISION)
        d_writer += multiply(written, tl.trans(d_state), PRECISION)
        if x.decay is not None:
            data += x.d * x.e
            at_end += tl.sum(d_state * load_matrix(data, x.e, 1, channels, x.d, columns, x.e), 1)
    before, after, _ = load_decays(x, b, h, first, channels, C)
    d_query, d_reader, d_writer = d_query * before, d_reader * before, d_writer * after
    d_product, d_overlap = tl.where(i >= j, d_product, 0.0), tl.where(i > j, d_overlap, 0.0)
    query, key = load_query(x, b, h, rows, channels), load_key(x, b, h, rows, channels)
    query, key = query.to(tl.float32), key.to(tl.float32)
    if len(x.decay_strides) == 4:
        of_query, of_reader, of_writer = channel_gradients(
            x, b, h, first, query, key, d_product, d_overlap, channels, C, BD
        )
        d_query, d_reader, d_writer = d_query + of_query, d_reader + of_reader, d_writer + of_writer
    else:
        if x.decay is not None:
            decays = pair_decays(x, b, h, first, C)
            d_product, d_overlap = d_product * decays, d_overlap * decays
        d_query += multiply(d_product, key, PRECISION)
        d_writer += multiply(tl.trans(d_product), query, PRECISION)
        if x.beta is not None:
            d_reader += multiply(d_overlap, key, PRECISION)
            d_writer += multiply(tl.trans(d_overlap), key, PRECISION)
    tokens = head * x.tokens * x.d
    store_matrix(g.d_query + tokens, x.d, 1, rows, x.tokens, channels, x.d, d_query, PRECISION)
    store_matrix(g.d_key + tokens, x.d, 1, rows, x.tokens, channels, x.d, d_reader + d_writer, PRECISION)
    if x.beta is not None:
        count = tl.where(block == 0, x.tokens, 0)  # every block of channels has the same
        tl.store(g.d_beta + head * x.tokens + rows, d_beta, mask=rows < count)
    if x.decay is not None:
        # What a decay of -inf hides has no gradient; the sums that cancel may leave a rounding error.
        changes = tl.cumsum(query * d_query + key * (d_reader - d_writer), 0, reverse=True) + at_end[None, :]
        end = tl.minimum(first + C, x.tokens)
        if len(x.decay_strides) == 4:
            decay = load_channel_decay(x, b, h, rows, end, channels)
            changes = tl.where(tl.exp(decay) == 0, 0.0, changes)
            store_matrix(g.d_decay + tokens, x.d, 1, rows, x.tokens, channels, x.d, changes, PRECISION)
        else:  # the sum over all channels consists of those of the blocks
            decay = load_head_decay(x, b, h, rows, end)
            change = tl.where(tl.exp(decay) == 0, 0.0, tl.sum(changes, 1))
            at = g.d_decay + (block * (tl.num_programs(0) // (chunks * width_blocks)) + head) * x.tokens + rows
            tl.store(at, change, mask=rows < x.tokens)
