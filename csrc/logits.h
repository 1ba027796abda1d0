// One query row: which keys it may see, and how its scores become logits.
#pragma once
#include "pack.h"

namespace regard::REGARD_ISA {

// The constants of a problem in base two: 2^x is cheaper than e^x, so that logits are kept multiplied by log2(e).
template <class T> struct Scales {
  T key;    // multiplied into the keys while they are packed: the product is then the logit, or the argument of tanh
  T cap;    // logit = cap * tanh(product); 0: no cap
  T bias;   // multiplied into every bias
  T query;  // what a gradient of the product is multiplied by to become that of q.k
  bool changes_logits;

  explicit Scales(const regard_dot& p) {
    const double base = log2_e / p.temperature;
    key = T(p.softcap > 0 ? p.scale / p.softcap : p.scale * base);
    cap = T(p.softcap > 0 ? p.softcap * base : 0);
    bias = T(base);
    query = T(p.scale / p.temperature);
    changes_logits = p.softcap > 0 || p.diagonal.data || p.row_table.data || p.bias.data;
  }
};

template <class T> struct Row {
  int64_t b, h, i;
  int64_t start, stop;  // keys outside are hidden; the bits of a tile may hide more
  const T* diagonal;    // diagonal[j] is the bias of key j
  const T* table;       // table[clip(j - first, 0, 2 * radius)] is another
  int64_t first;
  const void* bias;  // of key 0
  uint32_t dropout_key;
};

template <class T> const T* real_row(const regard_tensor& t, int64_t b, int64_t h, int64_t i) {
  return t.data ? (const T*)t.data + b * t.stride[0] + h * t.stride[1] + i * t.stride[2] : nullptr;
}

template <class T> REGARD_INLINE void set_row(Row<T>& row, const regard_dot& p, int64_t b, int64_t h, int64_t i) {
  row.b = b, row.h = h, row.i = i;
  row.start = 0, row.stop = p.K;
  row.diagonal = nullptr, row.bias = nullptr;
  row.first = 0, row.dropout_key = 0;
  if (p.intervals.start) {
    const int64_t at = b * p.intervals.stride[0] + h * p.intervals.stride[1] + i * p.intervals.stride[2];
    row.start = greatest<int64_t>(0, p.intervals.start[at]);
    row.stop = least<int64_t>(p.K, p.intervals.stop[at]);
  }
  if (p.diagonal.data) row.diagonal = real_row<T>(p.diagonal, b, h, 0) + (p.Q - 1 - i);
  row.table = real_row<T>(p.row_table, b, h, i);
  // Farther away than this all distances are clipped, and sums of positions stay far from overflow.
  constexpr int64_t far = int64_t(1) << 40;
  if (p.offset) row.first = least(far, greatest(-far, p.offset[b])) + i - p.radius;
  if (p.bias.data) {
    const int64_t at = b * p.bias.stride[0] + h * p.bias.stride[1] + i * p.bias.stride[2];
    row.bias = (const char*)p.bias.data + at * int64_t(storage_bytes(p.bias_dtype));
  }
  if (p.dropout_threshold) row.dropout_key = dropout_row_key(p.seed, uint64_t((b * p.H + h) * p.Q + i));
}

// In what follows s[c] belongs to key j0 + c, and columns [lo, hi) are worked on; both are multiples of the vector.

// Calls f(column, count) for the vectors of a source that ends at column `end`: whole ones first, then a part of one.
template <class T, class F> REGARD_INLINE void for_vectors(int64_t lo, int64_t hi, int64_t end, F&& f) {
  const int64_t whole = least(hi, end);
  int64_t c = lo;
  for (; c + lanes<T> <= whole; c += lanes<T>) f(c, lanes<T>);
  if (c < whole) f(c, int(whole - c));
}

template <class T>
REGARD_INLINE void add_bias(const regard_dot& p, const Row<T>& row, T factor, int64_t j0, T* s, int64_t lo,
                            int64_t hi) {
  const auto add = [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    const int64_t stride = p.bias.stride[3];
    const S* from = (const S*)row.bias + j0 * stride;
    for_vectors<T>(lo, hi, p.K - j0, [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec<T> x;
      if constexpr (sizeof(T) == 8 && sizeof(S) < 8) {
        x = Vec<T>{};
        for (int k = 0; k < n; ++k) x[k] = get(from + (c + k) * stride);
      } else {
        x = load_some(from + c * stride, stride, n);
      }
      store(s + c, load(s + c) + x * factor);
    });
  };
  if constexpr (sizeof(T) == 8) {
    if (p.bias_dtype == REGARD_FLOAT64) return add(Stored<double>{});
  }
  if (p.bias_dtype == REGARD_BFLOAT16) add(Stored<bfloat16>{});
  else if (p.bias_dtype == REGARD_FLOAT16) add(Stored<float16>{});
  else add(Stored<float>{});
}

// The three parts of a row of keys as a table of clipped distances sees them: columns [lo, a) read its first entry,
// [a, b) one entry each, [b, hi) its last.
struct Clipped {
  int64_t a, b;
  Clipped(int64_t first, int64_t radius, int64_t j0, int64_t lo, int64_t hi) {
    a = least(hi, greatest(lo, first + 1 - j0));
    b = greatest(a, least(hi, first + 2 * radius - j0));
  }
};

// s[c] += factor * table[clip(j - first, 0, 2 * radius)]
template <class T>
REGARD_INLINE void add_table(const T* table, int64_t first, int64_t radius, T factor, int64_t j0, T* s, int64_t lo,
                             int64_t hi) {
  const Clipped parts(first, radius, j0, lo, hi);
  const T left = factor * table[0], right = factor * table[2 * radius];
  int64_t c = lo;
  for (; c + lanes<T> <= parts.a; c += lanes<T>) store(s + c, load(s + c) + left);
  for (; c < parts.a; ++c) s[c] += left;
  const T* entry = table + (j0 - first);
  for (; c + lanes<T> <= parts.b; c += lanes<T>) store(s + c, load(s + c) + load(entry + c) * factor);
  for (; c < parts.b; ++c) s[c] += factor * entry[c];
  for (; c < hi && c % lanes<T>; ++c) s[c] += right;
  for (; c < hi; c += lanes<T>) store(s + c, load(s + c) + right);
}

// table[clip(j - first, 0, 2 * radius)] += s[c]: the transpose of add_table.
template <class T>
REGARD_INLINE void sum_by_distance(T* table, int64_t first, int64_t radius, int64_t j0, const T* s, int64_t lo,
                                   int64_t hi) {
  const Clipped parts(first, radius, j0, lo, hi);
  const auto total = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
    Vec<T> sum{};
    T rest = 0;
    int64_t c = from;
    for (; c + lanes<T> <= to; c += lanes<T>) sum += load(s + c);
    for (; c < to; ++c) rest += s[c];
    return reduce_add<T>(sum) + rest;
  };
  if (lo < parts.a) table[0] += total(lo, parts.a);
  T* entry = table + (j0 - first);
  int64_t c = parts.a;
  for (; c + lanes<T> <= parts.b; c += lanes<T>) store(entry + c, load(entry + c) + load(s + c));
  for (; c < parts.b; ++c) entry[c] += s[c];
  if (parts.b < hi) table[2 * radius] += total(parts.b, hi);
}

template <class T>
void add_biases(const regard_dot& p, const Scales<T>& scales, const Row<T>& row, int64_t j0, T* s, int64_t lo,
                int64_t hi) {
  if (row.diagonal)
    for_vectors<T>(lo, hi, p.K - j0, [&](int64_t c, int n) __attribute__((always_inline)) {
      store(s + c, load(s + c) + load_some(row.diagonal + j0 + c, 1, n) * scales.bias);
    });
  if (row.table) add_table(row.table, row.first, p.radius, scales.bias, j0, s, lo, hi);
  if (row.bias) add_bias(p, row, scales.bias, j0, s, lo, hi);
}

// Products become logits in base two.
template <class T>
void scores_to_logits(const regard_dot& p, const Scales<T>& scales, const Row<T>& row, int64_t j0, T* s, int64_t lo,
                      int64_t hi) {
  if (scales.cap != 0)
    for (int64_t c = lo; c < hi; c += lanes<T>) store(s + c, tanh(load(s + c)) * scales.cap);
  add_biases(p, scales, row, j0, s, lo, hi);
}

// Columns that the row may not see become `value`. `word` holds the bits of columns 0..63 where there is a tile of bits.
template <class T>
void mask_scores(const Row<T>& row, const uint64_t* word, int64_t j0, T* s, int64_t lo, int64_t hi, T value) {
  for (int64_t c = lo; c < least(hi, row.start - j0); ++c) s[c] = value;
  for (int64_t c = greatest(lo, row.stop - j0); c < hi; ++c) s[c] = value;
  if (!word) return;
  using I = IntVec<T>;
  using Bit = decltype(I{}[0] + 0);
  I bit{};
  REGARD_UNROLL
  for (int k = 0; k < lanes<T>; ++k) bit[k] = Bit(1) << k;
  for (int64_t c = lo; c < hi; c += lanes<T>) {
    const I seen = (bit & Bit((*word >> c) & ((uint64_t(1) << lanes<T>)-1))) != 0;
    store(s + c, select(seen, load(s + c), broadcast(value)));
  }
}

template <class T> bool may_attend(const Row<T>& row, const uint64_t* word, int64_t j0, int64_t c) {
  return j0 + c >= row.start && j0 + c < row.stop && (!word || (*word >> c & 1));
}

}  // namespace regard::REGARD_ISA
