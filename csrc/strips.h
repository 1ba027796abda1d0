// The loop that forward and inspection share: blocks of query rows over steps of keys, strip by strip.
//
// A strip is MR rows. Its scores for a step are computed, biased and masked, then passed to a visitor:
//   workspace(memory)                                      what it keeps for a block
//   start_strip(workspace, strip)                          before the first step
//   consume(workspace, state, strip, rows, j0, lo, hi)     the logits of columns [lo, hi) of a step that begins at key j0;
//                                                          false if they are to be computed once more
//   finish(workspace, state, strip, rows)                  after the last step
// and optionally
//   plan(total)                                            before the first block; `total` are the summed costs of the units
#pragma once
#include "dot.h"
#include "keys.h"
#include "score.h"
#include "softmax.h"

namespace regard::REGARD_ISA {

// Keys in one step: their panels stay in the second-level cache for a block, and the scores of a strip in the first.
constexpr int64_t chunk = has_amx ? 256 : 384;
constexpr int64_t largest_block = has_amx ? 128 : 96;  // query rows that share them
constexpr double few_keys = 1100;  // keys per strip: with fewer, queries are read in place and not packed
constexpr double few_rows = 600;   // queries per key: with fewer, values are read in place
constexpr int64_t one_set = 4096;  // bytes: rows a multiple of it apart evict one another from the first-level cache
#ifdef REGARD_SANITIZE
constexpr double many_keys = 0;  // so that small random calls take the paths of large ones
#else
constexpr double many_keys = 400;  // keys per strip: with more, measuring queries and keys pays off
#endif

// The working memory of one thread. Rows are numbered within the block: strip * MR + r.
template <class T, class A = T> struct ThreadState {
  PackedKeys<T, A> keys;
  Matrix k, v;
  A* queries;
  T* scores;
  Row<T>* rows;
  Span* spans;
  uint8_t* poisoned;  // rows that have seen a key that is not finite
  T* longest;         // of each strip: at least the sum of squares of any query; infinity if it is not known
  Prefetcher prefetcher;
  bool hidden;            // some of the current logits are masked
  const uint64_t* words;  // the bits of a tile for the rows of the current strip, or null

  const uint64_t* word(int r) const { return words ? words + r : nullptr; }
};

template <class T, class Visitor, class Score = DotScore<T>> struct Strips {
  using Operand = typename Score::Operand;
  using State = ThreadState<T, Operand>;
  using Keys = PackedKeys<T, Operand>;
  const regard_dot& p;
  const Scales<T> scales;
  Score score;
  const Blocks blocks;
  const int64_t strips;  // in a block
  bool direct;           // queries are read in place
  bool direct_values;    // values are read in place
  bool measures;         // queries and keys are measured: their lengths bound the logits
  Layout layout;         // the visitor adds what it needs
  int64_t bands = 0;     // threads take whole bands, pieces of equal cost; 0: one for each thread

  struct Places {
    typename Keys::Places keys;
    size_t queries, scores, rows, spans, poisoned, longest;
  } at;

  explicit Strips(const regard_dot& p) : Strips(p, 8 * p.threads) {}
  Strips(const regard_dot& p, int64_t wanted_blocks)
      : p(p), scales(p), score(p), blocks(p, largest_block, wanted_blocks),
        strips((blocks.rows_per_block + MR - 1) / MR),
        direct(Score::is_product && p.H == p.G && Score::reads_in_place(p) && p.q.stride[3] == 1 &&
               p.q.stride[2] % (one_set / int64_t(storage_bytes(p.dtype))) != 0),
        direct_values(Keys::values_fit(p)), measures(Score::is_product && !scales.changes_logits) {
    at.keys = Keys::place(p, layout);
    at.queries = layout.add(strips, strip_size<Operand>(row_operands<Operand>(p.D)), sizeof(Operand));
    at.scores = layout.add(MR, chunk, sizeof(T));
    at.rows = layout.add(strips * MR, 1, sizeof(Row<T>));
    at.spans = layout.add(strips, 1, sizeof(Span));
    at.poisoned = layout.add(strips * MR, 1, 1);
    at.longest = layout.add(strips, 1, sizeof(T));
  }

  int64_t units() const { return p.B * p.G * blocks.per_group; }
  int plan(const double*) { return REGARD_OK; }

  int run() {
    if (const int status = score.prepare(p)) return status;
    const int64_t units = this->units();
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
    direct &= total[units] <= few_keys * double(p.B * p.H * p.Q) / MR;
    measures &= total[units] >= many_keys * double(p.B * p.H * p.Q) / MR;
    direct_values &= total[units] * MR <= few_rows * double(p.B * p.G * p.K);
    const int status = static_cast<Visitor&>(*this).plan(total);
    if (status != REGARD_OK) return status;
    auto body = [&](int thread, int threads) {
      const int64_t pieces = bands ? bands : threads;
      const int64_t first = share(total, units, pieces * thread / threads, pieces);
      const int64_t last = share(total, units, pieces * (thread + 1) / threads, pieces);
      return first < last ? run_units(first, last) : REGARD_OK;
    };
    return parallel(int(least<int64_t>(p.threads, units)), body);
  }

  int run_units(int64_t first, int64_t last) const {
    char* memory = (char*)thread_scratch(layout.bytes);
    if (!memory) return REGARD_NO_MEMORY;
    const TileRegisters registers;
    State w{Keys(p, memory, at.keys, measures, direct_values),
            {},
            {},
            (Operand*)(memory + at.queries),
            (T*)(memory + at.scores),
            (Row<T>*)(memory + at.rows),
            (Span*)(memory + at.spans),
            (uint8_t*)(memory + at.poisoned),
            (T*)(memory + at.longest),
            {},
            false,
            nullptr};
    const auto& visitor = static_cast<const Visitor&>(*this);
    auto workspace = visitor.workspace(memory);
    int64_t head = -1;
    for (int64_t unit = first; unit < last; ++unit) {
      if (unit / blocks.per_group != head) {
        head = unit / blocks.per_group;
        w.k = keys_of(p, head / p.G, head % p.G);
        w.v = values_of(p, head / p.G, head % p.G);
        w.keys.forget();
        w.prefetcher.reset((head + 1) * blocks.per_group < last ? 2 * blocks.per_group * strips : 0);
        w.prefetcher.add(keys_of(p, (head + 1) / p.G, (head + 1) % p.G));
        w.prefetcher.add(values_of(p, (head + 1) / p.G, (head + 1) % p.G));
      }
      run_block(w, visitor, workspace, head / p.G, head % p.G, unit % blocks.per_group);
    }
    trim_thread_scratch();
    return REGARD_OK;
  }

  template <class Workspace>
  void run_block(State& w, const Visitor& visitor, Workspace& workspace, int64_t b, int64_t g, int64_t block) const {
    const int64_t first = blocks.first_row(block), count = blocks.row_count(block);
    int64_t lo = p.K, hi = 0;
    for (int64_t r = 0, h = g * blocks.group + first / p.Q, i = first % p.Q; r < count; ++r) {
      set_row(w.rows[r], p, b, h, i);
      w.poisoned[r] = 0;
      if (++i == p.Q) i = 0, ++h;
    }
    const auto in_strip = [&](int64_t s) { return int(least<int64_t>(MR, count - s * MR)); };
    for (int64_t s = 0; s * MR < count; ++s) {
      w.spans[s] = span_of(w.rows + s * MR, in_strip(s), p.K);
      lo = least(lo, w.spans[s].lo);
      hi = greatest(hi, w.spans[s].hi);
      read_queries(w, s, in_strip(s));
      visitor.start_strip(workspace, s);
    }
    const auto visit = [&](const Step& step) {
      for (int64_t s = 0; s * MR < count; ++s) run_strip(w, visitor, workspace, s, in_strip(s), step);
    };
    if (blocks.tiled) for_each_tile_step(p, b, w.rows[0].h, w.rows[0].i / REGARD_TILE, 0, p.K, chunk, visit);
    else for_each_interval_step<T>(lo, hi, chunk, visit);
    for (int64_t s = 0; s * MR < count; ++s) visitor.finish(workspace, w, s, in_strip(s));
  }

  const void* query_of(const Row<T>& row) const {
    const int64_t at = row.b * p.q.stride[0] + row.h * p.q.stride[1] + row.i * p.q.stride[2];
    return (const char*)p.q.data + at * int64_t(storage_bytes(p.dtype));
  }

  void read_queries(State& w, int64_t s, int m) const {
    w.longest[s] = infinity;
    if (direct && !measures) return;
    RowPointers rows{{}, p.D, p.q.stride[3], p.dtype};
    for (int r = 0; r < m; ++r) rows.row[r] = query_of(w.rows[s * MR + r]);
    if (measures) w.longest[s] = squares_bound<T>(rows, m);
    if (direct) return;
    Operand* const strip = strip_of(w, s);
    pack_strip(rows, strip);
    score.ready_queries(w.rows[s * MR].h, strip);
  }

  Operand* strip_of(const State& w, int64_t s) const {
    return w.queries + s * strip_size<Operand>(row_operands<Operand>(p.D));
  }

  void fill_direct(const Row<T>& row, int m, Panels panels, const Operand* keys, T* scores) const {
    const Operand* queries = (const Operand*)query_of(row);
    const int64_t apart = p.q.stride[2] / terms<Operand>;
    fetch_rows(queries + m * apart, apart * int64_t(sizeof(Operand)), MR, p.D * int64_t(storage_bytes(p.dtype)));
    if constexpr (Score::is_product) score.fill_direct(m, panels, queries, apart, keys, scores, chunk);
  }

  template <class Workspace>
  void run_strip(State& w, const Visitor& visitor, Workspace& workspace, int64_t s, int m, const Step& step) const {
    const Row<T>* rows = w.rows + s * MR;
    const uint64_t* words = step.bits ? step.bits + rows[0].i % REGARD_TILE : nullptr;
    const Columns columns = columns_of<T>(w.spans[s], step, words, m);
    const int64_t lo = columns.lo, hi = columns.hi, j0 = step.j0;
    if (lo >= hi) return;
    w.keys.need(score, w.k, w.v, score.key_factor(scales.key), j0 + lo, j0 + hi);

    w.prefetcher.prefetch_next();
    const Panels panels = panels_of<T>(visible_columns(w.spans[s], j0, lo, hi), lo, hi);
    const Operand* const keys = w.keys.transposed_at(j0 + lo);
    if (w.keys.any_bad)
      for (int r = 0; r < m; ++r)
        w.poisoned[s * MR + r] |= attends_bad_key(w.keys, rows[r], words ? words + r : nullptr, j0, lo, hi);
    do {
      if (direct) fill_direct(rows[0], m, panels, keys, w.scores + lo);
      else score.fill(rows[0].h, m, panels, strip_of(w, s), keys, w.scores + lo, chunk);
      if (scales.changes_logits)
        for (int r = 0; r < m; ++r) scores_to_logits(p, scales, rows[r], j0, w.scores + r * chunk, lo, hi);
      if (columns.hidden)
        for (int r = 0; r < m; ++r)
          mask_scores(rows[r], words ? words + r : nullptr, j0, w.scores + r * chunk, lo, hi, T(-infinity));
      w.hidden = columns.hidden;
      w.words = words;
      w.prefetcher.prefetch_next();
    } while (!visitor.consume(workspace, w, s, m, j0, lo, hi));
  }

  // Logits become weights, for visitors that need them. False if the logits have to be computed once more.
  template <class Scores = InPlace<T>>
  bool softmax(const State& w, int64_t s, int m, int64_t lo, int64_t hi, T* peak, Vec<T>* sums, T* alpha,
               const Scores& scores = {}) const {
    const T square = w.longest[s] * w.keys.longest;
    if (!(square <= max_safe_logit<T> * max_safe_logit<T>)) {
      softmax_strip<T, chunk>(scores, w.scores, lo, hi, m, peak, sums, alpha);
      return true;
    }
    const T bound = T(int(__builtin_sqrt(square))) + 1;
    if (softmax_below<T, chunk>(scores, bound, w.scores, lo, hi, m, w.hidden, peak, sums, alpha)) return true;
    w.longest[s] = infinity;  // not to be tried again
    return false;
  }
};

}  // namespace regard::REGARD_ISA
