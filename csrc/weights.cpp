// Weights summed over ranges of keys while they are computed: selected columns, or a pooled map.
//
// One pass over the keys: the sums of a row are relative to its largest logit so far, and are divided by their total after
// the last key. Blocks and bands do not depend on the number of threads, so the bits of the result do not either.
#include "key_ranges.h"
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t wanted_blocks = 64;

template <class T, class Visitor, class Score> struct Gather : Strips<T, Visitor, Score> {
  using Base = Strips<T, Visitor, Score>;
  using Base::layout, Base::p, Base::strips;
  KeyRanges runs{};

  struct Places {
    size_t totals, peak, fresh;
  } at;

  explicit Gather(const regard_dot& p) : Base(p, wanted_blocks) {
    at.totals = layout.add(strips * MR, vector_bytes, 1);
    at.peak = layout.add(strips, strip_lanes<T>, sizeof(T));
    at.fresh = layout.add(strips, 1, 1);
  }

  struct Softmax {
    Vec<T>* totals;
    T* peak;
    uint8_t* fresh;  // whether a strip has no sums yet
  };
  Softmax softmax(char* memory) const {
    return {(Vec<T>*)(memory + at.totals), (T*)(memory + at.peak), (uint8_t*)(memory + at.fresh)};
  }

  void start_strip(Softmax& workspace, int64_t s) const {
    workspace.fresh[s] = 1;
    for (int r = 0; r < strip_lanes<T>; ++r) workspace.peak[s * strip_lanes<T> + r] = -infinity;
    for (int r = 0; r < MR; ++r) workspace.totals[s * MR + r] = Vec<T>{};
  }

  // The visitor defines where the sums of a row are, sums_of(workspace, state, row), and which of them the keys of a strip
  // contribute to, reach(state, strip).
  struct Reach {
    int64_t first, last;
  };

  template <class Workspace>
  bool consume(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m, int64_t j0, int64_t lo,
               int64_t hi) const {
    const auto& visitor = static_cast<const Visitor&>(*this);
    T alpha[strip_lanes<T>];
    if (!Base::softmax(w, s, m, lo, hi, workspace.peak + s * strip_lanes<T>, workspace.totals + s * MR, alpha))
      return false;
    const int64_t first = runs.ending_behind(j0 + lo), last = runs.beginning_from(j0 + hi);
    const Reach reach = visitor.reach(w, s);
    T* sums[MR];
    for (int r = 0; r < m; ++r) {
      sums[r] = visitor.sums_of(workspace, w, s * MR + r);
      if (workspace.fresh[s]) __builtin_memset(sums[r] + reach.first, 0, size_t(reach.last - reach.first) * sizeof(T));
      else if (alpha[r] != 1) scale(sums[r], reach.first, least(first + 1, reach.last), alpha[r]);
    }
    workspace.fresh[s] = 0;
    if (first == last) return true;
    if (runs.end(last - 1) - runs.start[first] == last - first) {
      for (int r = 0; r < m; ++r) copy(sums[r] + first, w.scores + r * chunk + (runs.start[first] - j0), last - first);
      return true;
    }
    for (int64_t n = first; n < last; ++n)
      add(sums, n, w.scores, m, greatest(runs.start[n], j0 + lo) - j0, least(runs.end(n), j0 + hi) - j0);
    return true;
  }

  static void scale(T* x, int64_t from, int64_t to, T factor) {
    int64_t n = from;
    for (; n + lanes<T> <= to; n += lanes<T>) store(x + n, load(x + n) * factor);
    for (; n < to; ++n) x[n] *= factor;
  }
  static void copy(T* to, const T* from, int64_t count) { __builtin_memcpy(to, from, size_t(count) * sizeof(T)); }

  // sums[r][n] += the weights of columns [from, to). All MR rows are summed, whether in use or not.
  static void add(T* const* sums, int64_t n, const T* weights, int m, int64_t from, int64_t to) {
    Vec<T> x[MR];
    REGARD_UNROLL
    for (int r = 0; r < MR; ++r) x[r] = Vec<T>{};
    int64_t c = from;
    for (; c + lanes<T> <= to; c += lanes<T>) {
      REGARD_UNROLL
      for (int r = 0; r < MR; ++r) x[r] += load(weights + r * chunk + c);
    }
    for (int r = 0; r < m; ++r) {
      T sum = to - from < lanes<T> ? T(0) : reduce_add<T>(x[r]);
      for (int64_t k = c; k < to; ++k) sum += weights[r * chunk + k];
      sums[r][n] += sum;
    }
  }

  // The factor that turns the sums of a row into weights; NaN if the row has a visible key that is not finite.
  T factor_of(const Softmax& workspace, const ThreadState<T>& w, int64_t r) const {
    double total = double(reduce_add<T>(workspace.totals[r])), shrink = 1;
    if (p.sink) {
      const double peak = double(greatest(workspace.peak[r / MR * strip_lanes<T> + r % MR], no_peak<T>));
      const double sink = double(((const T*)p.sink)[w.rows[r].h]) * log2_e, top = greatest(peak, sink);
      shrink = exp2(broadcast(peak - top))[0];
      total = total * shrink + exp2(broadcast(sink - top))[0];
    }
    if (w.poisoned[r] || total != total) return T(__builtin_nanf(""));
    return total > 0 ? T(shrink / total) : T(0);
  }
};

template <class T, class Score> struct SelectedColumns : Gather<T, SelectedColumns<T, Score>, Score> {
  using Base = Gather<T, SelectedColumns<T, Score>, Score>;
  using Base::runs;
  const regard_dot_columns& result;

  SelectedColumns(const regard_dot& p, const regard_dot_columns& result) : Base(p), result(result) {
    runs = {result.columns, nullptr, result.count};
  }

  using Workspace = typename Base::Softmax;
  Workspace workspace(char* memory) const { return this->softmax(memory); }
  typename Base::Reach reach(const ThreadState<T>&, int64_t) const { return {0, runs.count}; }
  T* sums_of(const Workspace&, const ThreadState<T>& w, int64_t r) const {
    return const_cast<T*>(real_row<T>(result.out, w.rows[r].b, w.rows[r].h, w.rows[r].i));
  }

  void finish(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m) const {
    for (int64_t r = s * MR; r < s * MR + m; ++r) {
      T* row = sums_of(workspace, w, r);
      const T factor = this->factor_of(workspace, w, r);
      if (factor != factor)
        for (int64_t n = 0; n < runs.count; ++n) row[n] = factor;
      else if (workspace.fresh[s] || factor == 0) __builtin_memset(row, 0, size_t(runs.count) * sizeof(T));
      else Base::scale(row, 0, runs.count, factor);
    }
  }
};

// Pieces of an axis, all of about the same length. Neighbours overlap in at most one index.
struct Bins {
  int64_t length, count;
  int64_t start(int64_t n) const { return n * length / count; }
  int64_t stop(int64_t n) const { return ((n + 1) * length + count - 1) / count; }
  int64_t size(int64_t n) const { return stop(n) - start(n); }
  int64_t first_with(int64_t place) const { return place * count / length; }
};

// The edges of all bins of keys split the keys into ranges, whose weights are summed row by row. Finished rows are added
// to their bin of rows, and a finished bin becomes a row of the map. Only one bin is open at any time. If a band ends
// inside a bin, its part of the bin is stored; these parts are added at the end, in order.
template <class T, class Score> struct Pool : Gather<T, Pool<T, Score>, Score> {
  using Base = Gather<T, Pool<T, Score>, Score>;
  using Base::bands, Base::blocks, Base::layout, Base::p, Base::runs, Base::strips;
  using typename Base::Reach;
  const regard_dot_pool& result;
  const Bins rows, columns;
  int64_t pitch = 0;                // length of a row of sums
  int64_t *edges, *first, *behind;  // of the ranges; column c has the ranges first[c] .. behind[c]
  int64_t *ranks, *cut;             // the first row of each band; the bins of the parts, or -1
  double* part_of_column;           // 1 / the number of its keys
  T* parts;                         // two per band: of a bin that starts before it, and of one that ends after it
  Buffer table, band_table;

  struct {
    size_t sums, open;
  } at;

  Pool(const regard_dot& p, const regard_dot_pool& result)
      : Base(p), result(result), rows{p.Q, result.rows}, columns{p.K, result.columns} {}

  int prepare() {
    const int64_t most = least(p.K, 2 * columns.count) + 1;
    Layout sizes;
    const size_t at_edges = sizes.add(most, 1, 8), at_first = sizes.add(columns.count, 1, 8);
    const size_t at_behind = sizes.add(columns.count, 1, 8), at_part = sizes.add(columns.count, 1, 8);
    if (!sizes.ok) return REGARD_TOO_LARGE;
    if (!table.reserve(sizes.bytes)) return REGARD_NO_MEMORY;
    edges = (int64_t*)((char*)table.data + at_edges);
    first = (int64_t*)((char*)table.data + at_first);
    behind = (int64_t*)((char*)table.data + at_behind);
    part_of_column = (double*)((char*)table.data + at_part);
    for (int64_t c = 0; c < columns.count; ++c) part_of_column[c] = 1 / double(columns.size(c));
    int64_t n = 0;
    edges[0] = 0;
    for (int64_t begun = 0, ended = 0; edges[n] < p.K; ++n) {
      while (begun < columns.count && columns.start(begun) <= edges[n]) first[begun++] = n;
      while (columns.stop(ended) <= edges[n]) behind[ended++] = n;
      edges[n + 1] = columns.stop(ended);
      if (begun < columns.count) edges[n + 1] = least(edges[n + 1], columns.start(begun));
    }
    for (int64_t c = columns.count; c-- > 0 && columns.stop(c) == p.K;) behind[c] = n;
    runs = {edges, edges + 1, n};
    pitch = round_up(n, 64 / int64_t(sizeof(T)));
    at.sums = layout.add(strips * MR, pitch, sizeof(T));
    at.open = layout.add(pitch, 1, sizeof(T));
    return REGARD_OK;
  }

  int plan(const double* total) {
    // Enough bands for many threads, unless their parts would need more memory than the map.
    const int64_t units = this->units(), wanted = least<int64_t>(256, (int64_t(1) << 22) / columns.count);
    bands = least(units, greatest<int64_t>(16, wanted));
    Layout sizes;
    const size_t at_ranks = sizes.add(bands + 1, 1, 8), at_cut = sizes.add(2 * bands, 1, 8);
    const size_t at_parts = sizes.add(2 * bands, columns.count, sizeof(T));
    if (!sizes.ok) return REGARD_TOO_LARGE;
    if (!band_table.reserve(sizes.bytes)) return REGARD_NO_MEMORY;
    ranks = (int64_t*)((char*)band_table.data + at_ranks);
    cut = (int64_t*)((char*)band_table.data + at_cut);
    parts = (T*)((char*)band_table.data + at_parts);
    for (int64_t band = 0; band <= bands; ++band) {
      const int64_t unit = share(total, units, band, bands), head = unit / blocks.per_group;
      ranks[band] = head * blocks.group * p.Q + (unit < units ? blocks.first_row(unit % blocks.per_group) : 0);
    }
    for (int64_t part = 0; part < 2 * bands; ++part) cut[part] = -1;
    return REGARD_OK;
  }

  struct Workspace : Base::Softmax {
    T *sums, *open;
    int64_t band, first, last;  // the band, and its rows, numbered across all heads
  };
  Workspace workspace(char* memory) const {
    return {this->softmax(memory), (T*)(memory + at.sums), (T*)(memory + at.open), 0, 0, 0};
  }

  Reach reach(const ThreadState<T>& w, int64_t s) const {
    return {runs.ending_behind(w.spans[s].lo), runs.beginning_from(w.spans[s].hi)};
  }
  T* sums_of(const Workspace& workspace, const ThreadState<T>&, int64_t r) const { return workspace.sums + r * pitch; }

  void finish(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m) const {
    const Reach reach = workspace.fresh[s] ? Reach{0, 0} : this->reach(w, s);
    for (int64_t r = s * MR; r < s * MR + m; ++r)
      add_row(workspace, w.rows[r], sums_of(workspace, w, r), reach, this->factor_of(workspace, w, r));
  }

  void add_row(Workspace& workspace, const Row<T>& row, const T* sums, const Reach& reach, T factor) const {
    const int64_t rank = (row.b * p.H + row.h) * p.Q + row.i;
    if (rank >= workspace.last) {
      while (ranks[workspace.band + 1] <= rank) ++workspace.band;
      workspace.first = ranks[workspace.band];
      workspace.last = ranks[workspace.band + 1];
    }
    for (int64_t n = rows.first_with(row.i); n < rows.count && rows.start(n) <= row.i; ++n) {
      if (rows.start(n) == row.i || rank == workspace.first)
        __builtin_memset(workspace.open, 0, size_t(pitch) * sizeof(T));
      if (factor != factor)
        for (int64_t k = 0; k < runs.count; ++k) workspace.open[k] = factor;
      else if (factor != 0)
        for (int64_t k = reach.first; k < reach.last; ++k) workspace.open[k] += sums[k] * factor;
      if (rows.stop(n) == row.i + 1 || rank + 1 == workspace.last) close(workspace, row, n, rank - row.i);
    }
  }

  void close(const Workspace& workspace, const Row<T>& row, int64_t n, int64_t head) const {
    T* to = const_cast<T*>(real_row<T>(result.out, row.b, row.h, n));
    const bool begun = head + rows.start(n)<workspace.first, goes_on = head + rows.stop(n)> workspace.last;
    if (begun || goes_on) {
      const int64_t part = 2 * workspace.band + (begun ? 0 : 1);
      cut[part] = (row.b * p.H + row.h) * rows.count + n;
      to = parts + part * columns.count;
    }
    const double part = 1 / double(rows.size(n));
    for (int64_t c = 0; c < columns.count; ++c) {
      T sum = workspace.open[first[c]];
      for (int64_t k = first[c] + 1; k < behind[c]; ++k) sum += workspace.open[k];
      to[c] = sum * T(part * part_of_column[c]);
    }
  }

  void join() const {
    for (int64_t part = 0; part < 2 * bands; ++part) {
      if (cut[part] < 0) continue;
      const int64_t head = cut[part] / rows.count;
      T* to = const_cast<T*>(real_row<T>(result.out, head / p.H, head % p.H, cut[part] % rows.count));
      const T* from = parts + part * columns.count;
      if (part % 2) Base::copy(to, from, columns.count);
      else
        for (int64_t c = 0; c < columns.count; ++c) to[c] += from[c];
    }
  }

  int pool() {
    int status = prepare();
    if (status == REGARD_OK) status = this->run();
    if (status == REGARD_OK) join();
    return status;
  }
};

}  // namespace

int dot_weights(const regard_dot& p, const regard_dot_columns& result) {
  return with_score(p, [&](auto kind) {
    using Kind = decltype(kind);
    return SelectedColumns<typename Kind::Real, typename Kind::Score>(p, result).run();
  });
}

int dot_map(const regard_dot& p, const regard_dot_pool& result) {
  return with_score(p, [&](auto kind) {
    using Kind = decltype(kind);
    return Pool<typename Kind::Real, typename Kind::Score>(p, result).pool();
  });
}

}  // namespace regard::REGARD_ISA
