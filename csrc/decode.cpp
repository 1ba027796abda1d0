// Few queries on many keys, as in generation: keys and values are read once, in place, at memory bandwidth.
//
// The keys are cut into pieces of a fixed size that does not depend on the number of threads. A piece gives every query row a peak, a
// sum and unnormalised values; the pieces of a row are then merged, always in the same order.
#include "dot.h"
#include "normalization.h"
#include "softmax.h"
#include "schedule.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t largest_piece = 512, longest_piece = 1024;
constexpr int64_t least_pieces = 32;  // so many threads have work

// Keys in a piece: for the second row on, they and their values come from the second-level cache. A single row reads them
// once; longer pieces alternate less often between keys and values.
template <class T> int64_t piece_of(const regard_dot& p) {
  if (p.H / p.G * p.Q == 1)
    return greatest<int64_t>(256, least(longest_piece, p.B * p.G * p.K / least_pieces / 64 * 64));
  const int64_t bytes = greatest<int64_t>(1, p.D + p.E) * int64_t(sizeof(T));
  return greatest<int64_t>(64, least(largest_piece, (int64_t(128) << 10) / bytes / 64 * 64));
}

// Prefetch a row some kilobytes ahead: rows of few bytes are consumed faster than the hardware prefetcher runs ahead.
template <class S> REGARD_INLINE void prefetch_ahead(const S* row, int64_t stride, int64_t columns) {
  constexpr int64_t bytes = 4096;
  const int64_t rows = greatest<int64_t>(1, bytes / greatest<int64_t>(1, columns * int64_t(sizeof(S))));
  const uintptr_t ahead = uintptr_t(row) + uintptr_t(rows * stride) * sizeof(S);
  for (int64_t at = 0; at < columns * int64_t(sizeof(S)); at += 64)
    __builtin_prefetch((const void*)(ahead + uintptr_t(at)), 0, 3);
}

// s[c] = q . key (first + c) for c < count, in whole vectors: entries past the end repeat the last key. One key after another:
// the hardware prefetches rows that are read in memory order, but not sixteen rows that are read alternately.
template <class T, class S>
void score_keys(const T* q, const Matrix& k, int64_t first, int64_t count, T* s) {
  constexpr int L = lanes<T>;
  const int64_t whole = k.columns / L * L;
  for (int64_t c = 0; c < count; c += L) {
    Vec<T> sums[L];
    REGARD_UNROLL
    for (int i = 0; i < L; ++i) {
      const S* row = at<S>(k, first + least<int64_t>(c + i, count - 1), 0);
      if constexpr (sizeof(S) < sizeof(T)) prefetch_ahead(row, k.row_stride, k.columns);
      sums[i] = Vec<T>{};
      for (int64_t d = 0; d < whole; d += L) sums[i] += load(q + d) * load_as(row + d);
      if (whole < k.columns) sums[i] += load(q + whole) * load_some(row + whole, 1, k.columns - whole);
    }
    store(s + c, sum_of_each<T>(sums));
  }
}

// out[0 .. N * lanes) = sum over c of weight[c] * value (first + c).
template <class T, class S, int N>
REGARD_INLINE void add_values(const T* weight, const S* v, int64_t stride, int64_t count, NonFiniteCheck<T>& watch,
                              bool checks, T* out) {
  Vec<T> sums[N];
  REGARD_UNROLL
  for (int n = 0; n < N; ++n) sums[n] = Vec<T>{};
  const auto add = [&](auto checked) __attribute__((always_inline)) {
    for (int64_t c = 0; c < count; ++c, v += stride) {
      if constexpr (sizeof(S) < sizeof(T)) prefetch_ahead(v, stride, N * lanes<T>);
      const Vec<T> w = broadcast(weight[c]);
      REGARD_UNROLL
      for (int n = 0; n < N; ++n) {
        const Vec<T> x = load_as(v + n * lanes<T>);
        sums[n] += w * (decltype(checked)::value ? watch(x, n) : x);
      }
    }
  };
  if (checks) add(Flag<true>{});
  else add(Flag<false>{});
  REGARD_UNROLL
  for (int n = 0; n < N; ++n) store(out + n * lanes<T>, sums[n]);
}

template <class T, class S>
void add_weighted_values(const T* weight, const Matrix& v, int64_t first, int64_t count, NonFiniteCheck<T>& watch,
                         bool checks, T* out) {
  constexpr int L = lanes<T>;
  const S* from = at<S>(v, first, 0);
  int64_t e = 0;
  for (; e + 8 * L <= v.columns; e += 8 * L)
    add_values<T, S, 8>(weight, from + e, v.row_stride, count, watch, checks, out + e);
  for (; e + 4 * L <= v.columns; e += 4 * L)
    add_values<T, S, 4>(weight, from + e, v.row_stride, count, watch, checks, out + e);
  for (; e + L <= v.columns; e += L) add_values<T, S, 1>(weight, from + e, v.row_stride, count, watch, checks, out + e);
  if (e == v.columns) return;
  Vec<T> sum{};
  for (int64_t c = 0; c < count; ++c)
    sum += watch(load_some(from + c * v.row_stride + e, 1, v.columns - e)) * weight[c];
  store(out + e, sum);
}

// s[c] *= the scale of row j0 + c, for c in [from, to).
template <class T> void multiply_by_scales(const Matrix& x, int64_t j0, int64_t from, int64_t to, T* s) {
  for (int64_t c = from; c < to; c += lanes<T>) {
    const int64_t n = to - c;
    store_some(s + c, 1, n, load_some(s + c, 1, n) * load_some(x.scale + (j0 + c) * x.scale_stride, x.scale_stride, n));
  }
}

template <class T> struct Decode {
  const regard_dot& p;
  const regard_dot_result& result;
  const Scales<T> scales;
  const int64_t rows, piece, pieces, Dp, Ep;
  const int64_t part;  // numbers of a row in a piece: its values, peak, sum and largest logit
  const ElementwiseWeights<T> elementwise;
  const bool checks;
  Buffer parts;

  Decode(const regard_dot& p, const regard_dot_result& result)
      : p(p), result(result), scales(p), rows(p.H / p.G * p.Q), piece(piece_of<T>(p)),
        pieces((p.K + piece - 1) / piece), Dp(round_up(p.D, lanes<T>)), Ep(round_up(p.E, lanes<T>)),
        part(Ep + round_up(3, lanes<T>)), elementwise(p), checks(p.intervals.start) {}

  int run() {
    const int64_t units = p.B * p.G * pieces;
    Layout layout, scratch;
    layout.add(units * rows, part, sizeof(T));
    scratch.add(1, Dp + piece + NR<T>, sizeof(T));
    if (!layout.ok || !scratch.ok) return REGARD_TOO_LARGE;
    if (!parts.reserve(layout.bytes)) return REGARD_NO_MEMORY;
    auto body = [&](int thread, int threads) {
      char* memory = (char*)thread_scratch(scratch.bytes);
      if (!memory) return REGARD_NO_MEMORY;
      for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; ++unit)
        run_piece(unit, (T*)memory);
      return REGARD_OK;
    };
    const int status = parallel(int(least<int64_t>(p.threads, units)), body);
    if (status != REGARD_OK) return status;
    for (int64_t n = 0; n < p.B * p.G * rows; ++n) merge_pieces(n / rows, n % rows);
    return REGARD_OK;
  }

  T* part_of(int64_t head, int64_t n, int64_t row) const {
    return (T*)parts.data + ((head * pieces + n) * rows + row) * part;
  }

  void run_piece(int64_t unit, T* scratch) const {
    const int64_t head = unit / pieces, b = head / p.G, g = head % p.G, j0 = unit % pieces * piece;
    const Matrix k = keys_of(p, b, g), v = values_of(p, b, g);
    T *query = scratch, *s = scratch + Dp;
    for (int64_t r = 0; r < rows; ++r) {
      T* out = part_of(head, unit % pieces, r);
      Row<T> row;
      set_row(row, p, b, g * (rows / p.Q) + r / p.Q, r % p.Q);
      const int64_t first = greatest(j0, row.start), last = least(least(p.K, j0 + piece), row.stop);
      if (first >= last) {
        __builtin_memset(out, 0, size_t(part) * sizeof(T));
        out[Ep] = out[Ep + 2] = -infinity;
        continue;
      }
      read_query(row, query);
      with_key_storage<T>(p.kv_dtype, [&](auto stored) {
        row_of_piece<typename decltype(stored)::type>(row, k, v, j0, first, last, query, s, out);
      });
    }
  }

  void read_query(const Row<T>& row, T* query) const {
    const Matrix q = matrix_of(p.q, p.dtype, row.b, row.h, p.Q, p.D);
    with_storage<T>(p.dtype, [&](auto stored) {
      using S = typename decltype(stored)::type;
      for (int64_t d = 0; d < p.D; d += lanes<T>)
        store(query + d, load_some(at<S>(q, row.i, d), q.column_stride, p.D - d) * scales.key);
    });
  }

  template <class S>
  void row_of_piece(const Row<T>& row, const Matrix& k, const Matrix& v, int64_t j0, int64_t first, int64_t last,
                    const T* query, T* s, T* out) const {
    constexpr int L = lanes<T>;

    // Whole vectors from that of the first visible key on; other keys are masked before use.
    NonFiniteCheck<T> watch;
    const int64_t lo = (first - j0) / L * L, hi = round_up(last - j0, L);
    score_keys<T, S>(query, k, j0 + lo, least(hi, p.K - j0) - lo, s + lo);
    if constexpr (sizeof(S) == 1) multiply_by_scales(k, j0, first - j0, last - j0, s);
    // A product with a key that is not finite is not finite.
    for (int64_t c = first - j0; checks && c < last - j0; ++c) watch(broadcast(s[c]));
    if (scales.changes_logits) scores_to_logits(p, scales, row, j0, s, lo, hi);
    for (int64_t c = lo; c < first - j0; ++c) s[c] = -infinity;
    for (int64_t c = last - j0; c < hi; ++c) s[c] = -infinity;

    Vec<T> peaks = load(s + lo), sums{};
    for (int64_t c = lo + L; c < hi; c += L) peaks = max(peaks, load(s + c));
    const T largest = reduce_max<T>(peaks), peak = p.normalization == REGARD_SOFTMAX ? largest : T(0);
    if (p.normalization == REGARD_SOFTMAX) {
      const Vec<T> top = broadcast(greatest(peak, no_peak<T>));
      for (int64_t c = lo; c < hi; c += L) {
        const Vec<T> weight = exp2(load(s + c) - top);
        store(s + c, weight);
        sums += weight;
      }
    } else {
      elementwise.weigh(s, lo, hi);
    }
    if (p.dropout_threshold) apply_dropout(row.dropout_key, p.dropout_threshold, j0, s, lo, hi);
    if constexpr (sizeof(S) == 1) {
      multiply_by_scales(v, j0, first - j0, last - j0, s);
      for (int64_t c = first - j0; checks && c < last - j0; ++c) watch(broadcast(s[c]));
    }
    add_weighted_values<T, S>(s + (first - j0), v, first, last - first, watch, checks, out);
    out[Ep] = peak;
    out[Ep + 2] = largest;
    out[Ep + 1] = checks && watch.bad() ? T(__builtin_nanf("")) : reduce_add<T>(sums);
  }

  void merge_pieces(int64_t head, int64_t r) const {
    const int64_t b = head / p.G, h = head % p.G * (rows / p.Q) + r / p.Q, i = r % p.Q;
    T sink = p.sink ? ((const T*)p.sink)[h] * T(log2_e) : T(-infinity), peak = greatest(sink, no_peak<T>);
    T largest = -infinity;
    for (int64_t n = 0; n < pieces; ++n) {
      peak = greatest(peak, part_of(head, n, r)[Ep]);
      largest = greatest(largest, part_of(head, n, r)[Ep + 2]);
    }
    T* total = part_of(head, 0, r);
    T sum = exp2(broadcast(sink - peak))[0];
    for (int64_t n = 0; n < pieces; ++n) {
      const T* one = part_of(head, n, r);
      const T shrink = exp2(broadcast(one[Ep] - peak))[0];
      sum += one[Ep + 1] * shrink;
      for (int64_t e = 0; e < Ep; e += lanes<T>)
        store(total + e, n ? load(total + e) + load(one + e) * shrink : load(one + e) * shrink);
    }
    if (p.normalization != REGARD_SOFTMAX && sum == sum) peak = 0, sum = 1;
    T factor = sum == 0 ? T(0) : (p.dropout_threshold ? T(p.dropout_scale) : T(1)) / sum;
    alignas(vector_bytes) double logs[lanes<T>];
    log2_exactly(broadcast(sum), logs);
    T lse = sum == 0 ? T(-infinity) : T((double(peak) + logs[0]) * ln_2);
    if (sum != sum) factor = lse = T(__builtin_nanf(""));
    const Matrix out = matrix_of(result.out, p.dtype, b, h, p.Q, p.E);
    unpack_row(out, i, total, factor);
    if (result.lse.data) *const_cast<T*>(real_row<T>(result.lse, b, h, i)) = lse;
    if (result.max_logit.data)
      *const_cast<T*>(real_row<T>(result.max_logit, b, h, i)) = lse != lse ? lse : largest * T(ln_2);
  }
};

}  // namespace

int dot_decode(const regard_dot& p, const regard_dot_result& result) {
  if (p.dtype == REGARD_FLOAT64) return Decode<double>(p, result).run();
  return Decode<float>(p, result).run();
}

}  // namespace regard::REGARD_ISA
