"""What all kernels do with some queries and some keys: scores, biases, mask and dropout.

`i` are queries and `j` keys, as two indices that broadcast against each other, in either order: queries by keys, or
keys by queries. `x` are the `Arguments`. Logits are in base two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(64)  # rows and columns of a tile of a mask


@triton.jit
def load_matrix(data, row_stride, column_stride, rows, row_count, columns, column_count):
    """Load rows and columns, zeros outside."""
    rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    inside = (rows < row_count) & (columns < column_count)
    return tl.load(data + rows * row_stride + columns * column_stride, mask=inside, other=0.0)


@triton.jit
def store_matrix(
    data, row_stride, column_stride, rows, row_count, columns, column_count, matrix, PRECISION: tl.constexpr
):
    rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    inside = (rows < row_count) & (columns < column_count)
    matrix = narrow(matrix, data.dtype.element_ty, PRECISION)
    tl.store(data + rows * row_stride + columns * column_stride, matrix, mask=inside)


@triton.jit
def load_query(x, b, h, rows, BD: tl.constexpr):
    data = x.query + b * x.query_strides[0] + h * x.query_strides[1]
    return load_matrix(data, x.query_strides[2], x.query_strides[3], rows, x.queries, tl.arange(0, BD), x.d)


@triton.jit
def load_key(x, b, h, keys, BD: tl.constexpr):
    data = x.key + b * x.key_strides[0] + (h // x.group) * x.key_strides[1]
    return load_matrix(data, x.key_strides[2], x.key_strides[3], keys, x.keys, tl.arange(0, BD), x.d)


@triton.jit
def load_value(x, b, h, keys, BE: tl.constexpr):
    data = x.value + b * x.value_strides[0] + (h // x.group) * x.value_strides[1]
    return load_matrix(data, x.value_strides[2], x.value_strides[3], keys, x.keys, tl.arange(0, BE), x.e)


@triton.jit
def narrow(numbers, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Convert float32 numbers to the nearest of a dtype."""
    if PRECISION == "interpreter" and dtype == tl.bfloat16:  # which cuts off digits
        word = numbers.to(tl.uint32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
        numbers = tl.where(numbers != numbers, numbers, word.to(tl.float32, bitcast=True))
    return numbers.to(dtype)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """The product of two matrices of one dtype, summed in float32."""
    if PRECISION == "interpreter":  # which takes bfloat16 numbers for integers
        a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def is_finite(numbers):
    numbers = numbers.to(tl.float32)
    return (numbers - numbers) == 0


@triton.jit
def tanh(x):
    """To one or two roundings; the polynomial is that of Cephes (tanhf.c)."""
    size, z = tl.abs(x), x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = ((near * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z - 3.33332819422e-1
    near = near * z * x + x
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(size, 30.0) * (2.0 * LOG2E)) + 1.0)
    return tl.where(x != x, x, tl.where(size < 0.625, near, tl.where(x < 0, -far, far)))


@triton.jit
def additive_products(x, b, h, i, j, like):
    """weight . tanh(q + k), in the shape of `like`."""
    queries = x.query + b * x.query_strides[0] + h * x.query_strides[1] + i.to(tl.int64) * x.query_strides[2]
    keys = x.key + b * x.key_strides[0] + (h // x.group) * x.key_strides[1] + j.to(tl.int64) * x.key_strides[2]
    scores = like
    for d in range(x.d):
        q = tl.load(queries + d * x.query_strides[3], mask=i < x.queries, other=0.0).to(tl.float32)
        k = tl.load(keys + d * x.key_strides[3], mask=j < x.keys, other=0.0).to(tl.float32)
        scores += tl.load(x.weight + h * x.weight_stride + d) * tanh(q + k)
    return scores


@triton.jit
def table_entries(x, b, i, j):
    """Indices into a table of clipped distances."""
    first = tl.load(x.offset + b) + i - x.radius
    return tl.minimum(tl.maximum(j - first, 0), 2 * x.radius)


@triton.jit
def load_table(table, strides, x, b, h, i, j):
    """Load entries by clipped distance from a table with a row for each query."""
    at = table + b * strides[0] + h * strides[1] + i.to(tl.int64) * strides[2]
    return tl.load(at + table_entries(x, b, i, j), mask=(i < x.queries) & (j < x.keys), other=0.0)


@triton.jit
def as_logits(x, products, b, h, i, j):
    """Return logits, and the tanh of a cap (otherwise the products again)."""
    scores = products * x.scale
    capped = scores
    if x.cap is not None:
        capped = tanh(scores)
        scores = capped * x.cap
    inside = (i < x.queries) & (j < x.keys)
    if x.diagonal is not None:
        at = x.diagonal + b * x.diagonal_strides[0] + h * x.diagonal_strides[1] + (j - i + x.queries - 1)
        scores += tl.load(at, mask=inside, other=0.0) * x.bias_factor
    if x.row_table is not None:
        scores += load_table(x.row_table, x.row_table_strides, x, b, h, i, j) * x.bias_factor
    if x.bias is not None:
        at = x.bias + b * x.bias_strides[0] + h * x.bias_strides[1]
        at += i.to(tl.int64) * x.bias_strides[2] + j.to(tl.int64) * x.bias_strides[3]
        scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * x.bias_factor
    return scores, capped


@triton.jit
def load_edges(x, b, h, i):
    """Load the intervals of rows, where there are such."""
    start, stop = i * 0, i * 0 + x.keys
    if x.start is not None:
        at = b * x.edge_strides[0] + h * x.edge_strides[1] + i.to(tl.int64) * x.edge_strides[2]
        start = tl.load(x.start + at, mask=i < x.queries, other=x.keys)
        stop = tl.load(x.stop + at, mask=i < x.queries, other=0)
    return start, stop


@triton.jit
def find_bits(x, b, h, row, key):
    """Return the index of the bits of the tile with this row and this key: -1 if it is full, -2 if it is empty."""
    result = tl.full([], -1, tl.int64)
    if x.pointer is not None:
        result = tl.full([], -2, tl.int64)
        line = b * x.table_strides[0] + h * x.table_strides[1] + row // TILE
        for n in range(tl.load(x.pointer + line), tl.load(x.pointer + line + 1)):
            past, index = key // TILE - tl.load(x.first + n), tl.load(x.bits_index + n)
            if (past >= 0) and (key // TILE < tl.load(x.last + n)):
                result = tl.where(index < 0, -1, index + past)
    return result


@triton.jit
def visibility(x, i, j, edges, bits):
    """Which entries are visible. `bits` is the index of a tile's bits: -1 where it is full, -2 where it is empty."""
    visible = (i < x.queries) & (j < x.keys)
    if x.start is not None:
        visible = visible & (j >= edges[0]) & (j < edges[1])
    if x.pointer is not None:
        tile = i * 0 + bits  # the interpreter cannot combine masks of a block and of one number
        words = tl.load(x.bits + tl.maximum(tile, 0) * TILE + i % TILE, mask=(i < x.queries) & (tile >= 0), other=-1)
        visible = visible & (((words >> (j % TILE)) & 1) != 0) & (tile > -2)
    return visible


@triton.jit
def dropout_rows(x, b, h, i):
    """The hashes of rows, as in engines/dropout.py."""
    rows = i.to(tl.uint32)
    if x.seed is not None:
        number = (b * x.heads + h) * x.queries + i.to(tl.int64) + 1
        word = tl.load(x.seed).to(tl.uint64) + number.to(tl.uint64) * 0x9E3779B97F4A7C15
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB
        rows = (word ^ (word >> 31)).to(tl.uint32)
    return rows


@triton.jit
def is_kept(x, rows, j):
    """Whether dropout keeps a weight."""
    word = rows + j.to(tl.uint32) * 0x9E3779B9
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return (word ^ (word >> 15)) >= tl.cast(x.threshold, tl.uint32)


@triton.jit
def walk_keys(x, step: tl.constexpr, state, rows, b, h, row, sizes):
    """Call `step` for all blocks of keys that a block of queries, the first of which is `row`, may see."""
    return walk_part(x, step, state, rows, b, h, row, 0, x.keys, sizes)


@triton.jit
def walk_part(x, step: tl.constexpr, state, rows, b, h, row, least, most, sizes):
    """The same for the blocks of keys from `least` on, a multiple of TILE, and before `most`."""
    BN: tl.constexpr = sizes[1]
    if x.pointer is not None:
        line = b * x.table_strides[0] + h * x.table_strides[1] + row // TILE
        for n in range(tl.load(x.pointer + line), tl.load(x.pointer + line + 1)):
            first, index = tl.load(x.first + n), tl.load(x.bits_index + n)
            stop = tl.minimum(tl.load(x.last + n) * TILE, most)
            for j0 in range(tl.maximum(first * TILE, least), stop, BN):
                state = step(x, state, rows, b, h, j0, tl.where(index < 0, -1, index + j0 // TILE - first), sizes)
    else:
        lo, hi = least, most
        if x.start is not None:
            empty = rows[1][0] >= rows[1][1]
            lo = tl.maximum(tl.min(tl.where(empty, x.keys, rows[1][0])) // BN * BN, least)
            hi = tl.minimum(tl.max(tl.where(empty, 0, rows[1][1])), most)
        for j0 in range(lo, hi, BN):
            state = step(x, state, rows, b, h, j0, -1, sizes)
    return state


@triton.jit
def program_row(x, BM: tl.constexpr):
    """The block of rows, the head and the batch row of a program."""
    return split_row(x, tl.program_id(0), BM)


@triton.jit
def split_row(x, program, BM: tl.constexpr):
    """Split the number of a program into a block of rows, a head and a batch row."""
    blocks = tl.cdiv(x.queries, BM)
    head = program // blocks
    return (program % blocks) * BM, (head % x.heads).to(tl.int64), (head // x.heads).to(tl.int64)
