// The queries of one head and their gradients, packed for the backward.
#pragma once
#include "backward.h"

namespace regard::REGARD_ISA {

// The data of one query head that all its key tiles read.
template <class T, class A> struct HeadRows {
  int64_t Q, D, E, pitch;        // pitch: operands of all rows
  int64_t cut, per_cut, strips;  // strips begin anew at every row tile of a tile table
  A *query_strips, *query_panels, *grad_strips, *grad_panels;
  T* delta;
  LogSum<T>* lse;
  Row<T>* rows;
  Span* spans;

  struct Places {
    size_t query_strips, query_panels, grad_strips, grad_panels, lse, delta, rows, spans;
  };

  static int64_t cut_of(const regard_dot& p) { return p.tiles.pointer ? int64_t(REGARD_TILE) : round_up(p.Q + 1, MR); }
  static int64_t strips_of(const regard_dot& p) {
    return (p.Q + cut_of(p) - 1) / cut_of(p) * ((cut_of(p) + MR - 1) / MR);
  }

  static int64_t pitch_of(const regard_dot& p) { return row_operands<A>(p.Q) + NR<T>; }

  static Places place(const regard_dot& p, Layout& layout) {
    const int64_t strips = strips_of(p), pitch = pitch_of(p);
    return {layout.add(strips, strip_size<A>(row_operands<A>(p.D)), sizeof(A)),
            layout.add(pitch, round_up(p.D, NR<T>), sizeof(A)),
            layout.add(strips, strip_size<A>(row_operands<A>(p.E)), sizeof(A)),
            layout.add(pitch, round_up(p.E, NR<T>), sizeof(A)),
            layout.add(p.Q, 1, sizeof(LogSum<T>)),
            layout.add(p.Q, 1, sizeof(T)),
            layout.add(p.Q, 1, sizeof(Row<T>)),
            layout.add(strips, 1, sizeof(Span))};
  }

  HeadRows(const regard_dot& p, char* memory, const Places& at)
      : Q(p.Q), D(p.D), E(p.E), pitch(pitch_of(p)), cut(cut_of(p)), per_cut((cut + MR - 1) / MR), strips(strips_of(p)),
        query_strips((A*)(memory + at.query_strips)), query_panels((A*)(memory + at.query_panels)),
        grad_strips((A*)(memory + at.grad_strips)), grad_panels((A*)(memory + at.grad_panels)),
        delta((T*)(memory + at.delta)), lse((LogSum<T>*)(memory + at.lse)), rows((Row<T>*)(memory + at.rows)),
        spans((Span*)(memory + at.spans)) {}

  int64_t first(int64_t strip) const { return strip / per_cut * cut + strip % per_cut * MR; }
  int64_t strip_at(int64_t i) const { return i / cut * per_cut + i % cut / MR; }
  int count(int64_t strip) const {
    const int64_t end = least(Q, (strip / per_cut + 1) * cut);
    return int(greatest<int64_t>(0, least<int64_t>(MR, end - first(strip))));
  }

  const A* query_strip(int64_t s) const { return query_strips + s * strip_size<A>(row_operands<A>(D)); }
  const A* grad_strip(int64_t s) const { return grad_strips + s * strip_size<A>(row_operands<A>(E)); }
  // Rows from i, the first of an operand, on.
  const A* query_rows(int64_t i) const { return query_panels + i / terms<A> * apart; }
  const A* grad_rows(int64_t i) const { return grad_panels + i / terms<A> * apart; }

  template <class Score>
  void load(const Score& score, const regard_dot& p, const regard_dot_gradient& g, int64_t b, int64_t h) {
    const bool checks = p.intervals.start || p.tiles.pointer;
    const Matrix q = matrix_of(p.q, p.dtype, b, h, Q, D), d_out = matrix_of(g.d_out, p.dtype, b, h, Q, E);
    const Matrix out = matrix_of(g.out, p.dtype, b, h, Q, E);
    for (int64_t s = 0; s < strips; ++s) {
      RowPointers queries{{}, D, q.column_stride, p.dtype}, grads{{}, E, d_out.column_stride, p.dtype};
      dot_rows<T>(out, d_out, first(s), count(s), delta + first(s));
      for (int r = 0; r < count(s); ++r) {
        const int64_t i = first(s) + r;
        set_row(rows[i], p, b, h, i);
        queries.row[r] = row_of(q, i);
        grads.row[r] = row_of(d_out, i);
        load_row_numbers(p, g, i);
      }
      spans[s] = span_of(rows + first(s), count(s), p.K);
      A *const query_strip = (A*)this->query_strip(s), *const query_rows = (A*)this->query_rows(first(s));
      const bool bad = pack_strip(queries, query_strip) | pack_strip(grads, (A*)grad_strip(s));
      pack_rows(q, first(s), count(s), query_rows);
      pack_rows(d_out, first(s), count(s), (A*)grad_rows(first(s)));
      if (bad && checks) quarantine(queries, grads, s);
      score.ready_queries(h, query_strip);
      score.ready_rows(query_rows, count(s), pitch * NR<T>, T(0.5));
    }
  }

 private:
#if defined(__AMX_BF16__)
  static constexpr int64_t apart = 1;  // [column][row / 2]: the left side of a product over rows
  void pack_rows(const Matrix& x, int64_t row, int64_t count, A* out) const { pack_columns(x, row, count, out, pitch); }
  void clear_packed(A* out, int64_t columns, int64_t row) const {
    for (int64_t c = 0; c < columns; ++c) clear_term(out + c * pitch, row);
  }
#else
  static constexpr int64_t apart = NR<T>;
  void pack_rows(const Matrix& x, int64_t row, int64_t count, A* out) const {
    pack_panels(x, row, count, out, pitch * NR<T>);
  }
  void clear_packed(A* out, int64_t columns, int64_t row) const { clear_row<T>(out, pitch * NR<T>, columns, row); }
#endif

  void load_row_numbers(const regard_dot& p, const regard_dot_gradient& g, int64_t i) {
    const Row<T>& row = rows[i];
    T sum = delta[i];
    if (g.d_out_table.data) {
      const T *a = real_row<T>(g.out_table, row.b, row.h, i), *da = real_row<T>(g.d_out_table, row.b, row.h, i);
      for (int64_t t = 0; t <= 2 * p.radius; ++t) sum += a[t] * da[t];
    }
    if (g.d_lse.data) sum -= *real_row<T>(g.d_lse, row.b, row.h, i);
    if (g.delta.data) *const_cast<T*>(real_row<T>(g.delta, row.b, row.h, i)) = sum;
    const double x = double(*real_row<T>(g.lse, row.b, row.h, i)) * log2_e, above = double(infinity);
    // A row without visible keys has weights 2^(logit - infinity) = 0.
    lse[i] = LogSum<T>(x == -above ? above : x == above ? __builtin_nan("") : x);
    delta[i] = x == -above ? T(0) : sum;
  }

  // A row whose query or gradient is not finite makes every weight that it sees NaN. Its own numbers become zeros: in a
  // product, zero weights of the keys that it does not see would turn them into NaN there too.
  void quarantine(RowPointers& queries, RowPointers& grads, int64_t s) {
    for (int r = 0; r < count(s); ++r) {
      if (!row_is_bad<T>(queries.row[r], D, queries.column_stride, queries.dtype) &&
          !row_is_bad<T>(grads.row[r], E, grads.column_stride, grads.dtype))
        continue;
      const int64_t i = first(s) + r;
      queries.row[r] = grads.row[r] = nullptr;
      lse[i] = LogSum<T>(__builtin_nan(""));
      delta[i] = 0;
      clear_packed((A*)query_rows(i), D, i);
      clear_packed((A*)grad_rows(i), E, i);
    }
    pack_strip(queries, (A*)query_strip(s));
    pack_strip(grads, (A*)grad_strip(s));
  }
};

}  // namespace regard::REGARD_ISA
