// Attention, forward: for each strip of MR query rows, scores -> softmax -> times values, while it is in the cache.
#include "normalization.h"
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

template <class T, class Score> struct Forward : Strips<T, Forward<T, Score>, Score> {
  using Base = Strips<T, Forward<T, Score>, Score>;
  using Base::layout, Base::p, Base::strips;
  using typename Base::State, typename Base::Operand;
  const regard_dot_result& result;
  const int64_t Ep;     // E in whole panels
  const int64_t table;  // entries of a row of out_table, 0 if it is not wanted
  const ElementwiseWeights<T> elementwise;

  struct Places {
    size_t sums, out, table, peak, largest, fresh;
  } at;

  Forward(const regard_dot& p, const regard_dot_result& result)
      : Base(p), result(result), Ep(round_up(p.E, NR<T>)), table(result.out_table.data ? 2 * p.radius + 1 : 0),
        elementwise(p) {
    this->measures &= p.normalization == REGARD_SOFTMAX;
    leave_scale();
    at.sums = layout.add(strips * MR, vector_bytes, 1);
    at.out = layout.add(strips * MR, Ep, sizeof(T));
    at.table = layout.add(strips * MR, table, sizeof(T));
    at.peak = layout.add(strips, strip_lanes<T>, sizeof(T));
    at.largest = layout.add(result.max_logit.data ? strips * MR : 0, 1, sizeof(T));
    at.fresh = layout.add(strips, 1, 1);
  }

  struct Workspace {
    Vec<T>* sums;
    T *out, *table, *peak, *largest;
    uint8_t* fresh;  // a strip that has no output yet
  };
  Workspace workspace(char* memory) const {
    return {(Vec<T>*)(memory + at.sums), (T*)(memory + at.out),     (T*)(memory + at.table),
            (T*)(memory + at.peak),      (T*)(memory + at.largest), (uint8_t*)(memory + at.fresh)};
  }

  void start_strip(Workspace& workspace, int64_t s) const {
    workspace.fresh[s] = 1;
    for (int r = 0; r < strip_lanes<T>; ++r) workspace.peak[s * strip_lanes<T> + r] = -infinity;
    for (int r = 0; r < MR; ++r) workspace.sums[s * MR + r] = Vec<T>{};
    for (int r = 0; result.max_logit.data && r < MR; ++r) workspace.largest[s * MR + r] = -infinity;
    if (table) __builtin_memset(workspace.table + s * MR * table, 0, size_t(MR * table) * sizeof(T));
  }

  bool consume(Workspace& workspace, const State& w, int64_t s, int m, int64_t j0, int64_t lo, int64_t hi) const {
    const Row<T>* rows = w.rows + s * MR;
    if (workspace.fresh[s]) fetch_rows(matrix_of(result.out, p.dtype, rows[0].b, rows[0].h, p.Q, p.E), rows[0].i, m);
    T alpha[strip_lanes<T>];
    if (p.normalization != REGARD_SOFTMAX) {
      for (int r = 0; r < strip_lanes<T>; ++r) alpha[r] = 1;
      for (int r = 0; r < m; ++r) elementwise.weigh(w.scores + r * chunk, lo, hi);
    } else {
      if (result.max_logit.data)
        for (int r = 0; r < m; ++r) include_largest(workspace.largest[s * MR + r], w.scores + r * chunk, lo, hi);
      if (!weigh(workspace, w, s, m, lo, hi, alpha)) return false;
    }
    if (p.dropout_threshold)
      for (int r = 0; r < m; ++r)
        apply_dropout(rows[r].dropout_key, p.dropout_threshold, j0, w.scores + r * chunk, lo, hi);
    if (table) gather_table(workspace, w, s, m, alpha, j0, lo, hi);
    add_values(workspace, w, s, m, alpha, j0, lo, hi);
    workspace.fresh[s] = 0;
    return true;
  }

  static void include_largest(T& largest, const T* logits, int64_t lo, int64_t hi) {
    Vec<T> x = broadcast(largest);
    for (int64_t c = lo; c < hi; c += lanes<T>) x = max(x, load(logits + c));
    largest = reduce_max<T>(x);
  }

#if defined(__AMX_BF16__)
  // A scale that keeps the order of scores is left to the softmax.
  void leave_scale() { this->score.scales = this->scales.changes_logits || !(this->score.scale > 0); }

  bool weigh(Workspace& workspace, const State& w, int64_t s, int m, int64_t lo, int64_t hi, T* alpha) const {
    const float scale = this->score.scales ? 1 : this->score.scale;
    T* const peak = workspace.peak + s * strip_lanes<T>;
    Vec<T>* const sums = workspace.sums + s * MR;
    if (keeps_weights()) return this->softmax(w, s, m, lo, hi, peak, sums, alpha, Scaled(scale));
    return this->softmax(w, s, m, lo, hi, peak, sums, alpha, ToPairs(scale));
  }

  // In whole panels: the weight of a key that is not seen is 0.
  void add_values(Workspace& workspace, const State& w, int64_t s, int m, const T* alpha, int64_t j0, int64_t lo,
                  int64_t hi) const {
    T* const out = workspace.out + s * MR * Ep;
    for (int r = 0; keeps_weights() && r < m; ++r) round_to_pairs(w.scores + r * chunk, lo, hi);
    const auto v = w.keys.values_at(j0 + lo, w.v);
    const TileSide weights{(const Pair*)w.scores + lo / 2, chunk}, values{v.first, v.row, v.panel};
    const int64_t panels = Ep / NR<T>, steps = (hi - lo) / NR<T>;
    if (workspace.fresh[s]) return multiply_tiles<false>(m, panels, steps, weights, values, out, Ep);
    for (int r = 0; r < m; ++r)
      for (int64_t e = 0; alpha[r] != 1 && e < Ep; e += lanes<T>)
        store(out + r * Ep + e, load(out + r * Ep + e) * alpha[r]);
    multiply_tiles<true>(m, panels, steps, weights, values, out, Ep);
  }
#else
  void leave_scale() {}

  bool weigh(Workspace& workspace, const State& w, int64_t s, int m, int64_t lo, int64_t hi, T* alpha) const {
    return this->softmax(w, s, m, lo, hi, workspace.peak + s * strip_lanes<T>, workspace.sums + s * MR, alpha);
  }

  void add_values(Workspace& workspace, const State& w, int64_t s, int m, const T* alpha, int64_t j0, int64_t lo,
                  int64_t hi) const {
    T* out = workspace.out + s * MR * Ep;
    const VisibleColumns seen = visible_columns(w.spans[s], j0, lo, hi);
    // Whole operands: the weight of a masked key is 0.
    const int64_t first = seen.lo / terms<Operand>, count = operands<Operand>(seen.hi) - first;
    if constexpr (terms<Operand> > 1)
      for (int r = 0; r < m; ++r) round_to_pairs(w.scores + r * chunk, lo, hi);
    const auto v = w.keys.values_at(j0 + first * terms<Operand>, w.v);
    const Operand* weights = (const Operand*)w.scores + first;
    const Panels panels = panels_of_columns<T>(p.E);
    const auto multiply = [&](auto into) __attribute__((always_inline)) {
      multiply_wanted<T, chunk, 1, decltype(into)::value>(m, panels, count, weights, v.first, v.panel, out, Ep, 0,
                                                          alpha, v.row);
    };
    if (workspace.fresh[s]) multiply(Use<Into::overwrite>{});
    else multiply(Use<Into::rescale>{});
  }
#endif

  // Whether weights are needed as numbers before they are rounded to pairs.
  bool keeps_weights() const { return table || p.dropout_threshold; }

  void gather_table(Workspace& workspace, const State& w, int64_t s, int m, const T* alpha, int64_t j0, int64_t lo,
                    int64_t hi) const {
    for (int r = 0; r < m; ++r) {
      T* sums = workspace.table + (s * MR + r) * table;
      for (int64_t t = 0; t < table; ++t) sums[t] *= alpha[r];
      sum_by_distance<T>(sums, w.rows[s * MR + r].first, p.radius, j0, w.scores + r * chunk, lo, hi);
    }
  }

  void finish(Workspace& workspace, const State& w, int64_t s, int m) const {
    T factor[strip_lanes<T>], lse[strip_lanes<T>], sink[strip_lanes<T>] = {};
    if (p.sink)
      for (int r = 0; r < m; ++r) sink[r] = ((const T*)p.sink)[w.rows[s * MR + r].h];
    for (int r = 0; r < m; r += lanes<T>) {
      Vec<T> rows[lanes<T>];
      REGARD_UNROLL
      for (int i = 0; i < lanes<T>; ++i) rows[i] = r + i < MR ? workspace.sums[s * MR + r + i] : Vec<T>{};
      Vec<T> peak = load(workspace.peak + s * strip_lanes<T> + r), total = sum_of_each<T>(rows),
             shrink = broadcast(T(1));
      if (p.sink) {
        const Vec<T> extra = load(sink + r) * T(log2_e), top = max(max(peak, extra), broadcast(no_peak<T>));
        shrink = exp2(peak - top);
        total = total * shrink + exp2(extra - top);
        peak = top;
      }
      store(factor + r,
            select(total == 0, Vec<T>{}, shrink / total * (p.dropout_threshold ? T(p.dropout_scale) : T(1))));
      if (result.lse.data || result.max_logit.data) store_lse<T>(total, peak, lse + r);
    }
    if (p.normalization != REGARD_SOFTMAX)
      for (int r = 0; r < m; ++r) lse[r] = 0, factor[r] = p.dropout_threshold ? T(p.dropout_scale) : T(1);
    for (int r = 0; r < m; ++r)
      if (w.poisoned[s * MR + r]) factor[r] = lse[r] = T(__builtin_nanf(""));
    for (int r = 0; r < m;) {
      const int count = int(least<int64_t>(m - r, p.Q - w.rows[s * MR + r].i));
      finish_rows(workspace, w, s * MR + r, count, factor + r, lse + r);
      r += count;
    }
  }

  // Rows of one head.
  void finish_rows(Workspace& workspace, const State& w, int64_t first, int count, const T* factor,
                   const T* lse) const {
    const Row<T>& row = w.rows[first];
    T* out = workspace.out + first * Ep;
    for (int r = 0; r < count; ++r)
      if (workspace.fresh[first / MR] || factor[r] == 0) __builtin_memset(out + r * Ep, 0, size_t(Ep) * sizeof(T));
    unpack_rows<T>(matrix_of(result.out, p.dtype, row.b, row.h, p.Q, p.E), row.i, count, out, Ep, factor, 1);
    if (result.lse.data)
      for (int r = 0; r < count; ++r) *const_cast<T*>(real_row<T>(result.lse, row.b, row.h, row.i + r)) = lse[r];
    for (int r = 0; result.max_logit.data && r < count; ++r)
      *const_cast<T*>(real_row<T>(result.max_logit, row.b, row.h, row.i + r)) =
          lse[r] != lse[r] ? lse[r] : workspace.largest[first + r] * T(ln_2);
    for (int r = 0; table && r < count; ++r) {
      T* to = const_cast<T*>(real_row<T>(result.out_table, row.b, row.h, row.i + r));
      for (int64_t t = 0; t < table; ++t) to[t] = workspace.table[(first + r) * table + t] * factor[r];
    }
  }
};

}  // namespace

int dot_forward(const regard_dot& p, const regard_dot_result& result) {
#ifdef REGARD_EXTENDS
  // Tiles of AMX leave scales to the softmax.
  const bool rare = has_amx && (p.normalization != REGARD_SOFTMAX || result.max_logit.data);
  if (rare || !takes_pairs(p) || decode_is_better(p, result)) return REGARD_EXTENDS::dot_forward(p, result);
#else
  if (!p.weight.data && decode_is_better(p, result)) return dot_decode(p, result);
#endif
  return with_score(p, [&](auto kind) {
    using Kind = decltype(kind);
    return Forward<typename Kind::Real, typename Kind::Score>(p, result).run();
  });
}

}  // namespace regard::REGARD_ISA
