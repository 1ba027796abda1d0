// The gradients of causal linear attention. With n_i = d_out_i / norm_i and m_i = -(n_i . out_i), and with a one appended
// to every value and m to every n, so that the norm is one more value column:
//
//   d_q_i = sum over j <= i of (n_i . v_j) k_j          a walk forward, behind it the state sum of v k^T
//   d_k_j = sum over i >= j of (n_i . v_j) q_i          a walk backward, behind it the state sum of q n^T
//   d_v_j = sum over i >= j of (q_i . k_j) n_i          the same walk and state
#pragma once
#include "linear.h"

namespace regard::REGARD_ISA {

template <class T> struct LinearBackward : LinearProblem<T> {
  using Problem = LinearProblem<T>;
  using Problem::x, Problem::split, Problem::M, Problem::E, Problem::wide_m, Problem::wide_e;

  const regard_linear_gradient& gradient;
  const int64_t past_size;    // panels[M / NR][E + 1][NR]
  const int64_t future_size;  // panels[E / NR][M][NR], then the sum of m q
  const int64_t pitch;        // of rows of n
  T* states = nullptr;        // past and future of the parts of all heads

  LinearBackward(const regard_linear& x, const regard_linear_gradient& gradient)
      : Problem(x), gradient(gradient), past_size((E + 1) * wide_m), future_size(M * wide_e + wide_m),
        pitch(round_up(E + 1, NR<T>)) {}

  struct Scratch {
    T *past, *future, *transposed_future;
    T *keys, *transposed_keys, *values, *transposed_values, *queries, *transposed_queries;  // a chunk of rows each
    T *rows, *appended;  // n with m at its end, and m alone
    T *scores, *products, *d_keys, *d_values;
  };
  Scratch allocate_scratch(Parts<T>& part) const {
    const int64_t n = chunk_rows;
    Scratch s;
    s.past = part(1, past_size), s.future = part(1, future_size), s.transposed_future = part(1, past_size);
    s.keys = part(n, wide_m), s.transposed_keys = part(n, M);
    s.values = part(n, wide_e), s.transposed_values = part(n, E + 1);
    s.queries = part(n, wide_m), s.transposed_queries = part(n, M);
    s.rows = part(n, pitch), s.appended = part(1, n);
    s.scores = part(n, n), s.products = part(n, n), s.d_keys = part(n, wide_m), s.d_values = part(n, wide_e);
    return s;
  }

  Matrix outputs(int64_t b, int64_t h) const { return matrix_of(gradient.out, x.dtype, b, h, x.N, E); }
  Matrix d_outputs(int64_t b, int64_t h) const { return matrix_of(gradient.d_out, x.dtype, b, h, x.N, E); }

  bool pack_keys(int64_t head, int64_t row, int64_t rows, const Scratch& s) const {
    return this->feature_panels(this->keys(head), row, rows, s.keys);
  }
  void pack_values(int64_t head, int64_t row, int64_t rows, const Scratch& s) const {
    pack_panels<T>(this->values(head), row, rows, s.values, chunk_rows * NR<T>);
  }
  void transpose_values(int64_t head, int64_t row, int64_t rows, const Scratch& s) const {
    transpose_rows<T>(this->values(head), row, rows, E + 1, s.transposed_values);
    for (int64_t p = 0; p < rows; p += NR<T>) fill<T>(s.transposed_values + p * (E + 1) + E * NR<T>, NR<T>, 1);
  }
  bool pack_queries(int64_t b, int64_t h, int64_t row, int64_t rows, const Scratch& s) const {
    return this->feature_panels(this->queries(b, h), row, rows, s.queries);
  }

  // n and m. Returns whether NaN or an infinity was met in n.
  bool prepare(int64_t b, int64_t h, int64_t row, int64_t rows, const Scratch& s) const {
    const Matrix out = outputs(b, h), d_out = d_outputs(b, h);
    const T* norm = (const T*)gradient.norm.data + b * gradient.norm.stride[0] + h * gradient.norm.stride[1];
    NonFiniteCheck<T> watch;
    with_storage<T>(x.dtype, [&](auto stored) {
      using S = typename decltype(stored)::type;
      for (int64_t i = 0; i < rows; ++i) {
        const T total = norm[(row + i) * gradient.norm.stride[2]], factor = total == 0 ? T(0) : 1 / total;
        Vec<T> sum{};
        for (int64_t e = 0; e < E; e += lanes<T>) {
          const Vec<T> d = watch(load_some(at<S>(d_out, row + i, e), d_out.column_stride, E - e) * factor);
          sum += d * load_some(at<S>(out, row + i, e), out.column_stride, E - e);
          store(s.rows + i * pitch + e, d);
        }
        s.rows[i * pitch + E] = s.appended[i] = -reduce_add<T>(sum);
      }
    });
    return watch.bad();
  }

  void extend_past(int64_t rows, const Scratch& s, T* past) const {
    const T one = 1;
    add_outer<T>(rows, s.values, E, {s.keys}, wide_m, past, (E + 1) * NR<T>);
    for (int64_t m = 0; m < wide_m; m += NR<T>)
      multiply<T, 0, 0, Into::add>(1, 1, rows, &one, s.keys + m * chunk_rows, 0, past + (m + NR<T>)*(E + 1) - NR<T>, 0);
  }
  void extend_future(int64_t rows, const Scratch& s, T* future) const {
    add_outer<T>(rows, s.queries, M, {s.rows, NR<T>, pitch}, wide_e, future, M * NR<T>);
    multiply<T, 0, 1, Into::add>(1, wide_m / NR<T>, rows, s.appended, s.queries, chunk_rows * NR<T>,
                                 future + M * wide_e, 0);
  }
  void transpose_future(const Scratch& s) const {
    for (int64_t e = 0; e < E; e += NR<T>) {
      const Matrix panel{s.future + e * M, NR<T>, 1, M, least<int64_t>(NR<T>, E - e), dtype_of<T>};
      transpose_rows<T>(panel, 0, M, E + 1, s.transposed_future + e * NR<T>);
    }
    for (int64_t m = 0; m < wide_m; m += NR<T>)
      for (int64_t c = 0; c < NR<T>; ++c)
        s.transposed_future[m * (E + 1) + E * NR<T> + c] = s.future[M * wide_e + m + c];
  }

  void query_gradients(int64_t head, int64_t h, int64_t row, int64_t rows, bool alone, const Scratch& s) const {
    const int64_t b = head / x.G, next = row + chunk_rows;
    const Matrix q = this->queries(b, h), k = this->keys(head), v = this->values(head);
    const Matrix out = outputs(b, h), d_out = d_outputs(b, h), d_q = matrix_of(gradient.d_q, x.dtype, b, h, x.N, M);
    prepare(b, h, row, rows, s);
    if (x.map == REGARD_ELU) pack_queries(b, h, row, rows, s);
    for_blocks<T>(rows, alone, [&](int64_t i, int count) {
      const T* left = s.rows + i * pitch;
      fetch_rows(q, next + i, count);
      fetch_rows(k, next + i, count);
      multiply_visible<any_row, 1>(count, i, E + 1, left, s.transposed_values, s.products, pitch);
      fetch_rows(v, next + i, count);
      fetch_rows(out, next + i, count);
      multiply<T, any_row, 1, Into::overwrite>(count, wide_m / NR<T>, E + 1, left, s.past, (E + 1) * NR<T>, s.d_keys,
                                               wide_m, nullptr, NR<T>, pitch);
      fetch_rows(d_out, next + i, count);
      fetch_rows(d_q, row + i, count);
      multiply<T, chunk_rows, 1, Into::add>(count, wide_m / NR<T>, i + count, s.products, s.keys, chunk_rows * NR<T>,
                                            s.d_keys, wide_m);
      for (int r = 0; r < count; ++r) this->store_row(s.queries, i + r, d_q, row, s.d_keys + r * wide_m);
    });
  }

  // Adds the contribution of the queries of one head in this chunk to the gradients of keys and values, and to the state.
  void key_gradients(int64_t b, int64_t h, int64_t row, int64_t rows, const Scratch& s) const {
    const int64_t next = row - chunk_rows;
    const Matrix q = this->queries(b, h), out = outputs(b, h), d_out = d_outputs(b, h);
    const bool bad_rows = prepare(b, h, row, rows, s), bad_queries = pack_queries(b, h, row, rows, s);
    this->transpose_features(s.queries, rows, s.transposed_queries);
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      fetch_rows(q, next + i, count);
      multiply_visible<1, NR<T>>(count, i, M, transposed_at(s.transposed_queries, M, i), s.transposed_keys,
                                 s.scores + i * chunk_rows);
      multiply_visible<any_row, 1>(count, i, E + 1, s.rows + i * pitch, s.transposed_values,
                                   s.products + i * chunk_rows, pitch);
    });
    for_blocks<T>(rows, bad_rows || bad_queries, [&](int64_t j, int count) {
      const int64_t corner = j * chunk_rows + j;
      fetch_rows(out, next + j, count);
      multiply<T, 1, chunk_rows, Into::add>(count, wide_e / NR<T>, rows - j, s.scores + corner, s.rows + j * pitch,
                                            NR<T>, s.d_values + j * wide_e, wide_e, nullptr, pitch);
      fetch_rows(d_out, next + j, count);
      multiply<T, 1, chunk_rows, Into::add>(count, wide_m / NR<T>, rows - j, s.products + corner, s.queries + j * NR<T>,
                                            chunk_rows * NR<T>, s.d_keys + j * wide_m, wide_m);
    });
    extend_future(rows, s, s.future);
  }

  void scan_forward(int64_t head, int64_t segment, const Scratch& s) const {
    const int64_t end = split.first_chunk((segment + 1) * split.segments), group = x.H / x.G;
    fill<T>(s.past, past_size, 0);
    for (int64_t part = 0; part < segment * split.segments; ++part) accumulate(s.past, past_of(head, part), past_size);
    for (int64_t c = split.first_chunk(segment * split.segments); c < end; ++c) {
      const int64_t row = c * chunk_rows, rows = this->rows_of(c), first = head % x.G * group;
      const bool bad = pack_keys(head, row, rows, s);
      transpose_values(head, row, rows, s);
      for (int64_t h = first; h < first + group; ++h) query_gradients(head, h, row, rows, bad, s);
      if (c + 1 == end) break;
      pack_values(head, row, rows, s);
      extend_past(rows, s, s.past);
    }
  }

  void scan_backward(int64_t head, int64_t segment, const Scratch& s) const {
    const int64_t start = split.first_chunk(segment * split.segments), b = head / x.G, g = head % x.G,
                  group = x.H / x.G;
    const Matrix k = this->keys(head), v = this->values(head);
    const Matrix d_k = matrix_of(gradient.d_k, x.dtype, b, g, x.N, M),
                 d_v = matrix_of(gradient.d_v, x.dtype, b, g, x.N, E);
    fill<T>(s.future, future_size, 0);
    for (int64_t part = (segment + 1) * split.segments; part < split.parts(); ++part)
      accumulate(s.future, future_of(head, part), future_size);
    for (int64_t c = split.first_chunk((segment + 1) * split.segments) - 1; c >= start; --c) {
      const int64_t row = c * chunk_rows, rows = this->rows_of(c), next = row - chunk_rows;
      pack_keys(head, row, rows, s);
      this->transpose_features(s.keys, rows, s.transposed_keys);
      transpose_values(head, row, rows, s);
      transpose_future(s);
      for_blocks<T>(rows, false, [&](int64_t j, int count) {
        fetch_rows(k, next + j, count);
        fetch_rows(d_k, row + j, count);
        multiply<T, 1, NR<T>, Into::overwrite>(count, wide_e / NR<T>, M, transposed_at(s.transposed_keys, M, j),
                                               s.future, M * NR<T>, s.d_values + j * wide_e, wide_e);
        fetch_rows(v, next + j, count);
        fetch_rows(d_v, row + j, count);
        multiply<T, 1, NR<T>, Into::overwrite>(count, wide_m / NR<T>, E + 1,
                                               transposed_at(s.transposed_values, E + 1, j), s.transposed_future,
                                               (E + 1) * NR<T>, s.d_keys + j * wide_m, wide_m);
      });
      for (int64_t h = g * group; h < (g + 1) * group; ++h) key_gradients(b, h, row, rows, s);
      for (int64_t j = 0; j < rows; ++j) {
        this->store_row(s.keys, j, d_k, row, s.d_keys + j * wide_m);
        unpack_row(d_v, row + j, s.d_values + j * wide_e, T(1));
      }
    }
  }

  T* past_of(int64_t head, int64_t part) const {
    return states + (head * split.parts() + part) * (past_size + future_size);
  }
  T* future_of(int64_t head, int64_t part) const { return past_of(head, part) + past_size; }

  int sum_states(const Scratch& s, int thread, int threads) const {
    const int64_t work = split.heads * split.parts(), group = x.H / x.G;
    for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w) {
      const int64_t head = w / split.parts(), part = w % split.parts(), b = head / x.G, first = head % x.G * group;
      T *past = past_of(head, part), *future = future_of(head, part);
      fill<T>(past, past_size + future_size, 0);
      for (int64_t c = split.first_chunk(part); c < split.first_chunk(part + 1); ++c) {
        const int64_t row = c * chunk_rows, rows = this->rows_of(c);
        if (part < split.parts() - split.segments) {
          pack_keys(head, row, rows, s);
          pack_values(head, row, rows, s);
          extend_past(rows, s, past);
        }
        for (int64_t h = first; part >= split.segments && h < first + group; ++h) {
          prepare(b, h, row, rows, s);
          pack_queries(b, h, row, rows, s);
          extend_future(rows, s, future);
        }
      }
    }
    return REGARD_OK;
  }

  int attend_chunks(const Scratch& s, int thread, int threads) const {
    const int64_t work = split.heads * split.segments;
    for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w) {
      scan_forward(w / split.segments, w % split.segments, s);
      scan_backward(w / split.segments, w % split.segments, s);
    }
    return REGARD_OK;
  }

  int run() {
    Layout shared;
    shared.add(split.segments > 1 ? split.heads * split.parts() : 0, past_size + future_size, sizeof(T));
    return run_passes<T>(*this, x.threads, split.segments > 1, shared, states);
  }
};

}  // namespace regard::REGARD_ISA
