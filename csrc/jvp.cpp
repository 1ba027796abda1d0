// Attention in forward mode: results and their tangents in one pass, from the tangents of the inputs.
//
// With logits L, weights P (not yet divided by their sum) and a dot for a tangent, a strip of rows does for every step
//   dL = dq k' + q dk' (+ biases),  U = P dL;   O += P v,  dO += U v + P dv,  u += sum of U
// and at the end  out = O / sum,  d_lse = u / sum,  d_out = dO / sum - d_lse out.  Products of absent tangents are left out.
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

// The problem with tangents in place of the tensors; a width of 0 where there are none.
inline regard_dot tangent_problem(regard_dot p, const regard_dot_tangent& t) {
  p.q = t.d_q, p.k = t.d_k, p.v = t.d_v;
  p.diagonal = t.d_diagonal, p.row_table = t.d_row_table, p.bias = t.d_bias;
  if (!t.d_k.data) p.D = 0;
  if (!t.d_v.data) p.E = 0;
  return p;
}

template <class T> struct Jvp : Strips<T, Jvp<T>> {
  using Base = Strips<T, Jvp<T>>;
  using Base::layout, Base::p, Base::strips, Base::scales, Base::score;
  const regard_dot_tangent& tangent;
  const regard_dot_result& result;
  const regard_dot d;  // the tangents
  const bool of_biases, of_logits, of_values;
  const int64_t Ep;     // E in whole panels
  const int64_t table;  // entries of a row of out_table, 0 if it is not wanted

  struct Places {
    typename PackedKeys<T>::Places keys;
    size_t queries, scores, slopes, rows, sums, d_sums, out, d_out, table, d_table, peak, fresh, poisoned;
  } at;

  Jvp(const regard_dot& p, const regard_dot_tangent& tangent, const regard_dot_result& result)
      : Base(p), tangent(tangent), result(result), d(tangent_problem(p, tangent)),
        of_biases(d.diagonal.data || d.row_table.data || d.bias.data), of_logits(of_biases || d.q.data || d.k.data),
        of_values(d.v.data), Ep(round_up(p.E, NR<T>)), table(result.out_table.data ? 2 * p.radius + 1 : 0) {
    this->direct = false;  // packed queries are multiplied by two sets of keys
    at.keys = PackedKeys<T>::place(d, layout);
    at.queries = layout.add(strips, d.q.data ? strip_size<T>(p.D) : 0, sizeof(T));
    at.scores = layout.add(MR, of_logits ? chunk : 0, sizeof(T));
    at.slopes = layout.add(MR, of_logits && scales.cap != 0 ? chunk : 0, sizeof(T));
    at.rows = layout.add(of_biases ? strips * MR : 0, 1, sizeof(Row<T>));
    at.sums = layout.add(strips * MR, vector_bytes, 1);
    at.d_sums = layout.add(strips * MR, vector_bytes, 1);
    at.out = layout.add(strips * MR, Ep, sizeof(T));
    at.d_out = layout.add(strips * MR, Ep, sizeof(T));
    at.table = layout.add(strips * MR, table, sizeof(T));
    at.d_table = layout.add(strips * MR, table, sizeof(T));
    at.peak = layout.add(strips, strip_lanes<T>, sizeof(T));
    at.fresh = layout.add(strips, 1, 1);
    at.poisoned = layout.add(strips * MR, 1, 1);
  }

  struct Workspace {
    PackedKeys<T> keys;  // the tangents of keys and values
    Matrix k, v;
    int64_t head;  // of the keys that are packed
    T *queries, *scores, *slopes;
    Row<T>* rows;  // where the tangents of the biases are
    Vec<T>*sums, *d_sums;
    T *out, *d_out, *table, *d_table, *peak;
    uint8_t *fresh, *poisoned;  // a strip that has no output yet; a row that has seen a bad tangent of a key
  };
  Workspace workspace(char* memory) const {
    const bool direct = this->direct_values && of_values && PackedKeys<T>::values_fit(d);
    return {PackedKeys<T>(d, memory, at.keys, false, direct),
            {},
            {},
            -1,
            (T*)(memory + at.queries),
            (T*)(memory + at.scores),
            (T*)(memory + at.slopes),
            (Row<T>*)(memory + at.rows),
            (Vec<T>*)(memory + at.sums),
            (Vec<T>*)(memory + at.d_sums),
            (T*)(memory + at.out),
            (T*)(memory + at.d_out),
            (T*)(memory + at.table),
            (T*)(memory + at.d_table),
            (T*)(memory + at.peak),
            (uint8_t*)(memory + at.fresh),
            (uint8_t*)(memory + at.poisoned)};
  }

  void start_strip(Workspace& workspace, int64_t s) const {
    workspace.fresh[s] = 1;
    for (int r = 0; r < strip_lanes<T>; ++r) workspace.peak[s * strip_lanes<T> + r] = -infinity;
    for (int r = 0; r < MR; ++r) {
      workspace.sums[s * MR + r] = workspace.d_sums[s * MR + r] = Vec<T>{};
      workspace.poisoned[s * MR + r] = 0;
    }
    __builtin_memset(workspace.table + s * MR * table, 0, size_t(MR * table) * sizeof(T));
    __builtin_memset(workspace.d_table + s * MR * table, 0, size_t(MR * table) * sizeof(T));
  }

  // Prepare a strip once one of its rows is known to see a key.
  void prepare(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m) const {
    const Row<T>* rows = w.rows + s * MR;
    const int64_t head = rows[0].b * p.G + rows[0].h / (p.H / p.G);
    if (head != workspace.head) {
      workspace.head = head;
      workspace.k = matrix_of(d.k, p.dtype, head / p.G, head % p.G, p.K, d.D);
      workspace.v = matrix_of(d.v, p.dtype, head / p.G, head % p.G, p.K, d.E);
      workspace.keys.forget();
    }
    for (int r = 0; of_biases && r < m; ++r) set_row(workspace.rows[s * MR + r], d, rows[r].b, rows[r].h, rows[r].i);
    if (!d.q.data) return;
    RowPointers queries{{}, p.D, d.q.stride[3], p.dtype};
    for (int r = 0; r < m; ++r)
      queries.row[r] = row_of(matrix_of(d.q, p.dtype, rows[r].b, rows[r].h, p.Q, p.D), rows[r].i);
    pack_strip<T>(queries, workspace.queries + s * strip_size<T>(p.D));
  }

  bool consume(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m, int64_t j0, int64_t lo,
               int64_t hi) const {
    const Row<T>* rows = w.rows + s * MR;
    T alpha[strip_lanes<T>];
    if (!this->softmax(w, s, m, lo, hi, workspace.peak + s * strip_lanes<T>, workspace.sums + s * MR, alpha))
      return false;
    if (workspace.fresh[s]) prepare(workspace, w, s, m);
    workspace.keys.need(score, workspace.k, workspace.v, scales.key, j0 + lo, j0 + hi);
    if (workspace.keys.any_bad)
      for (int r = 0; r < m; ++r)
        workspace.poisoned[s * MR + r] |= attends_bad_key(workspace.keys, rows[r], w.word(r), j0, lo, hi);
    if (of_logits) {
      move_logits(workspace, w, s, m, j0, lo, hi);
      for (int r = 0; r < m; ++r) {
        Vec<T>& sum = workspace.d_sums[s * MR + r];
        sum = sum * alpha[r] + move_weights(w.scores + r * chunk, workspace.scores + r * chunk, lo, hi);
      }
    }
    for (int r = 0; p.dropout_threshold && r < m; ++r) {
      apply_dropout(rows[r].dropout_key, p.dropout_threshold, j0, w.scores + r * chunk, lo, hi);
      if (of_logits) apply_dropout(rows[r].dropout_key, p.dropout_threshold, j0, workspace.scores + r * chunk, lo, hi);
    }
    for (int r = 0; table && r < m; ++r) {
      gather(workspace.table + (s * MR + r) * table, alpha[r], rows[r], j0, w.scores + r * chunk, lo, hi);
      if (of_logits)
        gather(workspace.d_table + (s * MR + r) * table, alpha[r], rows[r], j0, workspace.scores + r * chunk, lo, hi);
    }

    const VisibleColumns seen = visible_columns(w.spans[s], j0, lo, hi);
    const auto v = w.keys.values_at(j0 + seen.lo, w.v);
    const auto add = [&](const T* weights, const auto& values, T* out, bool fresh,
                         bool more) __attribute__((always_inline)) {
      const auto into = [&](auto kind) __attribute__((always_inline)) {
        multiply<T, chunk, 1, decltype(kind)::value>(m, Ep / NR<T>, seen.count(), weights + seen.lo, values.first,
                                                     values.panel, out, Ep, alpha, values.row);
      };
      if (more) into(Kept<Into::add>{});
      else if (fresh) into(Kept<Into::overwrite>{});
      else into(Kept<Into::rescale>{});
    };
    T *out = workspace.out + s * MR * Ep, *d_out = workspace.d_out + s * MR * Ep;
    add(w.scores, v, out, workspace.fresh[s], false);
    if (of_logits) add(workspace.scores, v, d_out, workspace.fresh[s], false);
    if (of_values)
      add(w.scores, workspace.keys.values_at(j0 + seen.lo, workspace.v), d_out, workspace.fresh[s], of_logits);
    workspace.fresh[s] = 0;
    return true;
  }
  template <Into into> struct Kept {
    static constexpr Into value = into;
  };

  // workspace.scores = the tangents of the logits, in base two.
  void move_logits(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m, int64_t j0, int64_t lo,
                   int64_t hi) const {
    const Panels panels = panels_of<T>(visible_columns(w.spans[s], j0, lo, hi), lo, hi);
    const T *queries = w.queries + s * strip_size<T>(p.D), *keys = w.keys.transposed_at(j0 + lo);
    T* to = workspace.scores + lo;
    if (d.q.data) score.fill(0, m, panels, workspace.queries + s * strip_size<T>(p.D), keys, to, chunk);
    if (d.k.data && !d.q.data) score.fill(0, m, panels, queries, workspace.keys.transposed_at(j0 + lo), to, chunk);
    if (d.k.data && d.q.data) score.add(m, panels, queries, workspace.keys.transposed_at(j0 + lo), to, chunk);
    if (!d.q.data && !d.k.data)
      for (int r = 0; r < m; ++r) __builtin_memset(to + r * chunk, 0, size_t(hi - lo) * sizeof(T));
    else if (scales.cap != 0) {
      score.fill(0, m, panels, queries, keys, workspace.slopes + lo, chunk);
      for (int r = 0; r < m; ++r)
        for (int64_t c = lo; c < hi; c += lanes<T>) {
          const Vec<T> y = tanh(load(workspace.slopes + r * chunk + c));
          T* x = workspace.scores + r * chunk + c;
          store(x, load(x) * ((1 - y * y) * scales.cap));
        }
    }
    for (int r = 0; of_biases && r < m; ++r)
      add_biases(d, scales, workspace.rows[s * MR + r], j0, workspace.scores + r * chunk, lo, hi);
    for (int r = 0; w.hidden && r < m; ++r)
      mask_scores(w.rows[s * MR + r], w.word(r), j0, workspace.scores + r * chunk, lo, hi, T(0));
  }

  // Tangents of logits become those of weights, but for the change of the sum of all; returns their sums lane by lane.
  static Vec<T> move_weights(const T* weights, T* x, int64_t lo, int64_t hi) {
    Vec<T> left{}, right{};
    for (int64_t c = lo; c < hi; c += 2 * lanes<T>) {
      const Vec<T> a = load(x + c) * T(ln_2) * load(weights + c);
      const Vec<T> b = load(x + c + lanes<T>) * T(ln_2) * load(weights + c + lanes<T>);
      store(x + c, a);
      store(x + c + lanes<T>, b);
      left += a;
      right += b;
    }
    return left + right;
  }

  void gather(T* sums, T alpha, const Row<T>& row, int64_t j0, const T* weights, int64_t lo, int64_t hi) const {
    for (int64_t t = 0; t < table; ++t) sums[t] *= alpha;
    sum_by_distance<T>(sums, row.first, p.radius, j0, weights, lo, hi);
  }

  // Numbers of the rows of a strip.
  struct Numbers {
    T factor[strip_lanes<T>], d_factor[strip_lanes<T>], lse[strip_lanes<T>], d_lse[strip_lanes<T>];
  };

  void finish(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m) const {
    Numbers n;
    T sink[strip_lanes<T>] = {}, d_sink[strip_lanes<T>] = {};
    for (int r = 0; p.sink && r < m; ++r) {
      sink[r] = ((const T*)p.sink)[w.rows[s * MR + r].h];
      if (tangent.d_sink) d_sink[r] = ((const T*)tangent.d_sink)[w.rows[s * MR + r].h];
    }
    for (int r = 0; r < m; r += lanes<T>) {
      Vec<T> rows[lanes<T>], d_rows[lanes<T>];
      REGARD_UNROLL
      for (int i = 0; i < lanes<T>; ++i) {
        rows[i] = r + i < MR ? workspace.sums[s * MR + r + i] : Vec<T>{};
        d_rows[i] = r + i < MR ? workspace.d_sums[s * MR + r + i] : Vec<T>{};
      }
      Vec<T> peak = load(workspace.peak + s * strip_lanes<T> + r), shrink = broadcast(T(1));
      Vec<T> total = sum_of_each<T>(rows), d_total = sum_of_each<T>(d_rows);
      if (p.sink) {
        const Vec<T> extra = load(sink + r) * T(log2_e), top = max(max(peak, extra), broadcast(no_peak<T>));
        const Vec<T> share = exp2(extra - top);
        shrink = exp2(peak - top);
        total = total * shrink + share;
        d_total = d_total * shrink + share * load(d_sink + r);
        peak = top;
      }
      const auto none = total == 0;
      store(n.factor + r, select(none, Vec<T>{}, shrink / total * (p.dropout_threshold ? T(p.dropout_scale) : T(1))));
      store(n.d_lse + r, select(none, Vec<T>{}, d_total / total));
      store_lse<T>(total, peak, n.lse + r);
    }
    for (int r = 0; r < m; ++r) {
      if (w.poisoned[s * MR + r]) n.factor[r] = n.lse[r] = n.d_lse[r] = T(__builtin_nanf(""));
      if (workspace.poisoned[s * MR + r]) n.d_lse[r] = T(__builtin_nanf(""));
      n.d_factor[r] = workspace.poisoned[s * MR + r] ? T(__builtin_nanf("")) : n.factor[r];
    }
    for (int r = 0; r < m;) {
      const int count = int(least<int64_t>(m - r, p.Q - w.rows[s * MR + r].i));
      finish_rows(workspace, w, s * MR + r, count, n, r);
      r += count;
    }
  }

  static void move_row(T* d_row, const T* row, T d_lse, int64_t count) {
    for (int64_t c = 0; c < count; ++c) d_row[c] -= d_lse * row[c];
  }

  // Rows of one head, the first of which is number r of its strip.
  void finish_rows(Workspace& workspace, const ThreadState<T>& w, int64_t first, int count, const Numbers& n,
                   int r) const {
    const Row<T>& row = w.rows[first];
    T *out = workspace.out + first * Ep, *d_out = workspace.d_out + first * Ep;
    for (int i = 0; i < count; ++i) {
      const bool nothing = workspace.fresh[first / MR] || n.factor[r + i] == 0;
      if (nothing) __builtin_memset(out + i * Ep, 0, size_t(Ep) * sizeof(T));
      if (nothing || !(of_logits || of_values)) __builtin_memset(d_out + i * Ep, 0, size_t(Ep) * sizeof(T));
      move_row(d_out + i * Ep, out + i * Ep, n.d_lse[r + i], p.E);
    }
    unpack_rows<T>(matrix_of(result.out, p.dtype, row.b, row.h, p.Q, p.E), row.i, count, out, Ep, n.factor + r, 1);
    unpack_rows<T>(matrix_of(tangent.d_out, p.dtype, row.b, row.h, p.Q, p.E), row.i, count, d_out, Ep, n.d_factor + r,
                   1);
    for (int i = 0; i < count; ++i) {
      *const_cast<T*>(real_row<T>(result.lse, row.b, row.h, row.i + i)) = n.lse[r + i];
      *const_cast<T*>(real_row<T>(tangent.d_lse, row.b, row.h, row.i + i)) = n.d_lse[r + i];
    }
    for (int i = 0; table && i < count; ++i) {
      T *sums = workspace.table + (first + i) * table, *d_sums = workspace.d_table + (first + i) * table;
      T* to = const_cast<T*>(real_row<T>(result.out_table, row.b, row.h, row.i + i));
      T* d_to = const_cast<T*>(real_row<T>(tangent.d_out_table, row.b, row.h, row.i + i));
      move_row(d_sums, sums, n.d_lse[r + i], table);
      for (int64_t t = 0; t < table; ++t) to[t] = sums[t] * n.factor[r + i], d_to[t] = d_sums[t] * n.d_factor[r + i];
    }
  }
};

}  // namespace

int dot_jvp(const regard_dot& p, const regard_dot_tangent& tangent, const regard_dot_result& result) {
  if (p.dtype == REGARD_FLOAT64) return Jvp<double>(p, tangent, result).run();
  return Jvp<float>(p, tangent, result).run();
}

}  // namespace regard::REGARD_ISA
