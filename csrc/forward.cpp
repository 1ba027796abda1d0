// Dot-product attention, forward: strips of MR query rows, each scores -> softmax -> times values while it is hot.
#include "dot.h"

#include "keys.h"
#include "softmax.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t chunk = 192;       // keys in one step: their panels stay in the second-level cache for a block
constexpr int64_t largest_block = 96;  // query rows that share them

template <class T> struct Forward {
  const regard_dot& p;
  const regard_dot_result& result;
  const Scales<T> scales;
  const Blocks blocks;
  const int64_t Ep;        // E in whole panels
  const int64_t table;     // entries of a row of out_table, 0 if it is not wanted
  const int64_t strips;    // in a block

  struct Places {
    typename PackedKeys<T>::Places keys;
    size_t queries, sums, out, table, scores, peak, rows, spans, flags;
  } at;
  Layout layout;

  Forward(const regard_dot& p, const regard_dot_result& result)
      : p(p), result(result), scales(p), blocks(p, largest_block, 8 * p.threads), Ep(round_up(p.E, NR<T>)),
        table(result.out_table.data ? 2 * p.radius + 1 : 0), strips((blocks.rows_per_block + MR - 1) / MR) {
    const int64_t rows = strips * MR;
    at.keys = PackedKeys<T>::place(p, layout);
    at.queries = layout.add(strips, strip_size<T>(p.D), sizeof(T));
    at.sums = layout.add(rows, vector_bytes, 1);
    at.out = layout.add(rows, Ep, sizeof(T));
    at.table = layout.add(rows, table, sizeof(T));
    at.scores = layout.add(MR, chunk, sizeof(T));
    at.peak = layout.add(strips, strip_lanes<T>, sizeof(T));
    at.rows = layout.add(rows, 1, sizeof(Row<T>));
    at.spans = layout.add(strips, 1, sizeof(Span));
    at.flags = layout.add(rows, 2, 1);
  }

  // What one thread has in hand while it works on a block.
  struct Work {
    PackedKeys<T> keys;
    Matrix k, v;
    T *queries, *out, *table, *scores, *peak;
    Vec<T>* sums;
    Row<T>* rows;
    Span* spans;
    uint8_t *fresh, *poisoned;  // a strip that has no output yet; a row that has seen a bad key
  };

  int run() {
    const int64_t units = p.B * p.G * blocks.per_group;
    Layout costs;
    costs.add(units + 1, 1, sizeof(double));
    if (!layout.ok || !costs.ok) return REGARD_TOO_LARGE;
    Buffer memory;
    if (!memory.reserve(costs.bytes)) return REGARD_NO_MEMORY;
    double* total = (double*)memory.data;
    total[0] = 0;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t head = u / blocks.per_group;
      total[u + 1] = total[u] + block_cost<T>(p, blocks, head / p.G, head % p.G, u % blocks.per_group);
    }
    auto body = [&](int thread, int threads) {
      const int64_t first = share(total, units, thread, threads), last = share(total, units, thread + 1, threads);
      return first < last ? run_units(first, last) : REGARD_OK;
    };
    return parallel(int(least<int64_t>(p.threads, units)), body);
  }

  int run_units(int64_t first, int64_t last) const {
    char* memory = (char*)thread_scratch(layout.bytes);
    if (!memory) return REGARD_NO_MEMORY;
    const int64_t rows = strips * MR;
    Work w{PackedKeys<T>(p, memory, at.keys), {}, {}, (T*)(memory + at.queries), (T*)(memory + at.out),
           (T*)(memory + at.table), (T*)(memory + at.scores), (T*)(memory + at.peak), (Vec<T>*)(memory + at.sums),
           (Row<T>*)(memory + at.rows), (Span*)(memory + at.spans), (uint8_t*)(memory + at.flags),
           (uint8_t*)(memory + at.flags) + rows};
    int64_t head = -1;
    for (int64_t unit = first; unit < last; ++unit) {
      if (unit / blocks.per_group != head) {
        head = unit / blocks.per_group;
        w.k = matrix_of(p.k, p.dtype, head / p.G, head % p.G, p.K, p.D);
        w.v = matrix_of(p.v, p.dtype, head / p.G, head % p.G, p.K, p.E);
        w.keys.forget();
      }
      run_block(w, head / p.G, head % p.G, unit % blocks.per_group);
    }
    trim_thread_scratch();
    return REGARD_OK;
  }

  void run_block(Work& w, int64_t b, int64_t g, int64_t block) const {
    const int64_t first = blocks.first_row(block), count = blocks.row_count(block);
    const int64_t h0 = g * blocks.group;
    int64_t lo = p.K, hi = 0;
    for (int64_t r = 0, h = h0 + first / p.Q, i = first % p.Q; r < count; ++r) {
      set_row(w.rows[r], p, b, h, i);
      if (++i == p.Q) i = 0, ++h;
    }
    for (int64_t s = 0; s * MR < count; ++s) {
      const int m = int(least<int64_t>(MR, count - s * MR));
      w.spans[s] = span_of(w.rows + s * MR, m, p.K);
      lo = least(lo, w.spans[s].lo);
      hi = greatest(hi, w.spans[s].hi);
      pack_queries(w, s, m);
      w.fresh[s] = 1;
      for (int r = 0; r < strip_lanes<T>; ++r) w.peak[s * strip_lanes<T> + r] = -infinity;
      for (int r = 0; r < MR; ++r) w.sums[s * MR + r] = Vec<T>{};
      for (int r = 0; r < MR; ++r) w.poisoned[s * MR + r] = 0;
    }
    if (table) __builtin_memset(w.table, 0, size_t(count * table) * sizeof(T));

    const auto visit = [&](const Step& step) {
      for (int64_t s = 0; s * MR < count; ++s) run_strip(w, s, int(least<int64_t>(MR, count - s * MR)), step);
    };
    if (blocks.tiled) walk_tiles(p, b, w.rows[0].h, w.rows[0].i / REGARD_TILE, 0, p.K, chunk, visit);
    else walk_interval<T>(lo, hi, chunk, visit);

    for (int64_t s = 0; s * MR < count; ++s) finish(w, s, int(least<int64_t>(MR, count - s * MR)));
  }

  void pack_queries(Work& w, int64_t s, int m) const {
    RowPointers rows{{}, p.D, p.q.stride[3], p.dtype};
    for (int r = 0; r < m; ++r) {
      const Row<T>& row = w.rows[s * MR + r];
      const int64_t at = row.b * p.q.stride[0] + row.h * p.q.stride[1] + row.i * p.q.stride[2];
      rows.row[r] = (const char*)p.q.data + at * int64_t(storage_bytes(p.dtype));
    }
    pack_strip<T>(rows, w.queries + s * strip_size<T>(p.D));
  }

  void run_strip(Work& w, int64_t s, int m, const Step& step) const {
    const Row<T>* rows = w.rows + s * MR;
    const uint64_t* words = step.bits ? step.bits + rows[0].i % REGARD_TILE : nullptr;
    const Columns columns = columns_of<T>(w.spans[s], step, words, m);
    const int64_t lo = columns.lo, hi = columns.hi, j0 = step.j0;
    if (lo >= hi) return;
    w.keys.need(w.k, w.v, scales.key, j0 + lo, j0 + hi);

    multiply<T, 1, MR, Into::overwrite>(m, (hi - lo) / NR<T>, p.D, w.queries + s * strip_size<T>(p.D),
                                        w.keys.turned_at(j0 + lo), NR<T> * p.D, w.scores + lo, chunk);
    if (scales.changes_scores)
      for (int r = 0; r < m; ++r) change_scores(p, scales, rows[r], j0, w.scores + r * chunk, lo, hi);
    if (columns.hidden)
      for (int r = 0; r < m; ++r) hide(rows[r], words ? words + r : nullptr, j0, w.scores + r * chunk, lo, hi, T(-infinity));
    if (w.keys.any_bad)
      for (int r = 0; r < m; ++r)
        w.poisoned[s * MR + r] |= sees_bad_key(w.keys, rows[r], words ? words + r : nullptr, j0, lo, hi);

    T alpha[strip_lanes<T>];
    softmax_strip<T, chunk>(w.scores, lo, hi, w.peak + s * strip_lanes<T>, w.sums + s * MR, alpha);
    if (p.dropout_threshold)
      for (int r = 0; r < m; ++r) drop_row(rows[r].dropout_key, p.dropout_threshold, j0, w.scores + r * chunk, lo, hi);
    if (table) gather_table(w, s, m, alpha, j0, lo, hi);

    T* out = w.out + s * MR * Ep;
    const int64_t keys = least(hi, p.K - j0) - lo;  // the panel may reach past the last key
    const auto* values = w.keys.values_at(j0 + lo);
    if (w.fresh[s])
      multiply<T, chunk, 1, Into::overwrite>(m, Ep / NR<T>, keys, w.scores + lo, values, w.keys.pitch * NR<T>, out, Ep);
    else
      multiply<T, chunk, 1, Into::rescale>(m, Ep / NR<T>, keys, w.scores + lo, values, w.keys.pitch * NR<T>, out, Ep, alpha);
    w.fresh[s] = 0;
  }

  void gather_table(Work& w, int64_t s, int m, const T* alpha, int64_t j0, int64_t lo, int64_t hi) const {
    for (int r = 0; r < m; ++r) {
      T* sums = w.table + (s * MR + r) * table;
      for (int64_t t = 0; t < table; ++t) sums[t] *= alpha[r];
      sum_by_distance<T>(sums, w.rows[s * MR + r].first, p.radius, j0, w.scores + r * chunk, lo, hi);
    }
  }

  void finish(Work& w, int64_t s, int m) const {
    T factor[strip_lanes<T>] = {}, lse[strip_lanes<T>] = {}, sum[strip_lanes<T>] = {}, sink[strip_lanes<T>] = {};
    for (int r = 0; r < m; ++r) {
      sum[r] = reduce_add<T>(w.sums[s * MR + r]);
      if (p.sink) sink[r] = ((const T*)p.sink)[w.rows[s * MR + r].h];
    }
    for (int r = 0; r < m; r += lanes<T>) {
      Vec<T> peak = load(w.peak + s * strip_lanes<T> + r), total = load(sum + r), shrink = broadcast(T(1));
      if (p.sink) {
        const Vec<T> extra = load(sink + r) * T(log2_e), top = max(max(peak, extra), broadcast(no_peak<T>));
        shrink = exp2(peak - top);
        total = total * shrink + exp2(extra - top);
        peak = top;
      }
      const auto nothing = total == 0;
      alignas(vector_bytes) double logs[lanes<T>];
      log2_exactly(total, logs);
      for (int i = 0; i < lanes<T>; ++i) lse[r + i] = total[i] == 0 ? T(-infinity) : T((double(peak[i]) + logs[i]) * ln_2);
      store(factor + r, select(nothing, Vec<T>{}, shrink / total * (p.dropout_threshold ? T(p.dropout_scale) : T(1))));
      store(sum + r, total);
    }
    for (int r = 0; r < m; ++r) {
      if (w.poisoned[s * MR + r] || sum[r] != sum[r]) factor[r] = lse[r] = T(__builtin_nanf(""));
      finish_row(w, s * MR + r, factor[r], lse[r]);
    }
  }

  void finish_row(Work& w, int64_t r, T factor, T lse) const {
    const Row<T>& row = w.rows[r];
    T* out = w.out + r * Ep;
    if (w.fresh[r / MR] || factor == 0) __builtin_memset(out, 0, size_t(Ep) * sizeof(T));
    const Matrix to_out = matrix_of(result.out, p.dtype, row.b, row.h, p.Q, p.E);
    unpack_row<T>(row_of(to_out, row.i), p.E, to_out.column_stride, p.dtype, out, factor);
    if (result.lse.data) *const_cast<T*>(real_row<T>(result.lse, row.b, row.h, row.i)) = lse;
    if (table) {
      T* to = const_cast<T*>(real_row<T>(result.out_table, row.b, row.h, row.i));
      for (int64_t t = 0; t < table; ++t) to[t] = w.table[r * table + t] * factor;
    }
  }
};

}  // namespace

int dot_forward(const regard_dot& p, const regard_dot_result& result) {
  if (decode_is_better(p, result)) return dot_decode(p, result);
  if (p.dtype == REGARD_FLOAT64) return Forward<double>(p, result).run();
  return Forward<float>(p, result).run();
}

}  // namespace regard::REGARD_ISA
