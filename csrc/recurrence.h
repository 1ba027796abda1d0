// The recurrence of linear attention, chunk by chunk. Of token t, with a state S of M x E numbers:
//
//   S = exp(decay_t) S;   u_t = v_t, or beta_t (v_t - S^T k_t) where there is a beta;   S += k_t u_t^T;   out_t = S^T q_t
//
// Within a chunk, with G_ij the decay of what token j wrote until token i reads it, B = tril(K K^T * G, -1) and
// P = tril(Q K^T * G):
//
//   W = V - (before K) S - B U,  U = beta W;   out = (before Q) S + P U;   S = total S + (after K)^T U
//
// `before` is the decay from the start of the chunk to a token, `after` from a token to the end and `total` that of the
// whole chunk. Each is the exponential of a sum of decays: nothing is divided by a decay, and so any of them may be 0.
// Decays of single channels do not factor out of G: there the chunk's own products are computed pair by pair.
//
// A matrix product multiplies what a token may not see by zero, and NaN times zero is NaN. From a token with NaN or an
// infinity on, chunks have one token, and a state whose decay is 0 is replaced by 0.
#pragma once
#include "linear.h"

namespace regard::REGARD_ISA {

template <class T> REGARD_INLINE Vec<T> decay_factor(Vec<T> decay) {
  constexpr T most = sizeof(T) == 8 ? T(708) : T(87);
  return select(decay < -most, Vec<T>{}, exp(min(broadcast(most), max(broadcast(-most), decay))));
}

// Rows [row, row + count) with `pitch` numbers each, zero past the columns. Returns whether NaN or an infinity was met.
template <class T> bool copy_rows(const Matrix& x, int64_t row, int64_t count, T* out, int64_t pitch) {
  NonFiniteCheck<T> watch;
  with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    const int64_t whole = x.column_stride == 1 ? x.columns / lanes<T> * lanes<T> : 0;
    for (int64_t r = 0; r < count; ++r, out += pitch) {
      const S* from = at<S>(x, row + r, 0);
      int64_t c = 0;
      for (; c < whole; c += lanes<T>) store(out + c, watch(load_as(from + c), int(c / lanes<T>)));
      for (; c < x.columns; c += lanes<T>)
        store(out + c, watch(load_some(from + c * x.column_stride, x.column_stride, x.columns - c)));
      for (; c < pitch; c += lanes<T>) store(out + c, Vec<T>{});
    }
  });
  return watch.bad();
}

template <class T> Matrix scratch_matrix(const T* rows, int64_t pitch, int64_t count, int64_t columns) {
  return {rows, pitch, 1, count, columns, dtype_of<T>};
}

// C[rows][...] (+)= A B of rows of scratch: A has a_pitch numbers a row, B and C have `pitch`.
template <Into into, class T>
void multiply_block(int count, int64_t depth, const T* a, int64_t a_pitch, const T* b, T* c, int64_t pitch) {
  multiply<T, any_row, 1, into>(count, pitch / NR<T>, depth, a, b, NR<T>, c, pitch, nullptr, pitch, a_pitch);
}

// The same with A a triangle of a chunk, read down its columns from the diagonal on: rows [j, j + count) of A^T B.
template <class T>
void multiply_below(int count, int64_t j, int64_t rows, const T* a, const T* b, T* c, int64_t pitch) {
  multiply<T, 1, chunk_rows, Into::add>(count, pitch / NR<T>, rows - j, a + j * chunk_rows + j, b + j * pitch, NR<T>,
                                        c + j * pitch, pitch, nullptr, pitch);
}

// Calls body with the scratch memory of this thread.
template <class T, class Job, class F> int with_scratch(const Job& job, F&& body) {
  Parts<T> sizes{};
  job.allocate_scratch(sizes);
  if (!sizes.layout.ok) return REGARD_TOO_LARGE;
  Parts<T> part{(char*)thread_scratch(sizes.layout.bytes), {}};
  if (!part.base) return REGARD_NO_MEMORY;
  body(job.allocate_scratch(part));
  trim_thread_scratch();
  return REGARD_OK;
}

// One call: what forward and backward share.
template <class T> struct Recurrence {
  const regard_recurrence& x;
  const int64_t M, wide_m;

  explicit Recurrence(const regard_recurrence& x) : x(x), M(x.M), wide_m(round_up(x.M, NR<T>)) {}

  // One head, or some of its columns of values.
  struct Head {
    int64_t b, h;
    Matrix q, k, v;
    const T *decay, *beta;
    int64_t E, wide_e;
  };
  Matrix shared(const regard_tensor& t, int64_t b, int64_t h, int64_t heads, int64_t columns) const {
    return matrix_of(t, x.dtype, b, h / (x.H / heads), x.N, columns);
  }
  static const T* numbers_of(const regard_tensor& t, int64_t b, int64_t h) {
    return t.data ? (const T*)t.data + b * t.stride[0] + h * t.stride[1] : nullptr;
  }
  static Matrix columns_of(Matrix x, int64_t first, int64_t count) {
    x.data = (const char*)x.data + first * x.column_stride * int64_t(storage_bytes(x.dtype));
    x.columns = count;
    return x;
  }
  Matrix state_of(const regard_tensor& t, int64_t b, int64_t h) const {
    return matrix_of(t, dtype_of<T>, b, h, M, x.E);
  }
  // Checkpoints are states of close rows, one every REGARD_CHECKPOINT tokens.
  Matrix checkpoint_of(const regard_tensor& t, int64_t b, int64_t h, int64_t row) const {
    T* const first = (T*)t.data + b * t.stride[0] + h * t.stride[1] + row / REGARD_CHECKPOINT * t.stride[2];
    return {first, x.E, 1, M, x.E, dtype_of<T>};
  }
  Head head_of(int64_t b, int64_t h, int64_t first, int64_t columns) const {
    return {b,
            h,
            shared(x.q, b, h, x.q_heads, M),
            shared(x.k, b, h, x.k_heads, M),
            columns_of(shared(x.v, b, h, x.v_heads, x.E), first, columns),
            numbers_of(x.decay, b, h),
            numbers_of(x.beta, b, h),
            columns,
            round_up(columns, NR<T>)};
  }

  // A chunk of one head. What has rows has chunk_rows of them.
  struct Chunk {
    T *q, *k, *ke, *w, *u, *beta;           // rows; ke is (after K), and u is w where there is no beta
    T *before, *after, *factor, *gamma;     // rows; of single tokens (single channels only); of pairs (not these)
    T *qb, *kb;                             // rows: (before Q) and -(before K)
    T *transposed_keys, *key_panels, *run;  // of K, and of ke; one row
    T *p, *b;                               // P and -B
  };
  Chunk allocate_chunk(Parts<T>& part, int64_t wide_e) const {
    const int64_t n = chunk_rows;
    Chunk c;
    c.q = part(n, wide_m), c.k = part(n, wide_m), c.ke = part(n, wide_m);
    c.w = part(n, wide_e), c.u = part(n, wide_e), c.beta = part(1, n);
    c.before = part(n, wide_m), c.after = part(n, wide_m);
    c.factor = part(x.per_channel ? n : 0, wide_m), c.gamma = part(n, n);
    c.qb = part(n, wide_m), c.kb = part(n, wide_m);
    c.transposed_keys = part(n, M), c.key_panels = part(n, wide_m), c.run = part(1, wide_m);
    c.p = part(n, n), c.b = part(n, n);
    return c;
  }

  // Reads a chunk. Returns whether NaN or an infinity was met (a decay of -infinity is none).
  bool read(const Head& head, int64_t row, int64_t rows, const Chunk& c) const {
    bool bad = copy_rows<T>(head.q, row, rows, c.q, wide_m);
    bad |= copy_rows<T>(head.k, row, rows, c.k, wide_m);
    bad |= copy_rows<T>(head.v, row, rows, c.w, head.wide_e);
    for (int64_t i = 0; head.beta && i < rows; ++i) {
      c.beta[i] = head.beta[(row + i) * x.beta.stride[2]];
      bad |= !(c.beta[i] - c.beta[i] == 0);
    }
    return read_decays(head, row, rows, c) || bad;
  }

  bool read_decays(const Head& head, int64_t row, int64_t rows, const Chunk& c) const {
    if (x.per_channel) return read_channel_decays(head, row, rows, c);
    using Lane = __typeof__(IntVec<T>{}[0]);
    bool bad = false;
    Vec<T> sums[chunk_rows / lanes<T>]{};  // of the decays from after token j on
    T sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const T decay = head.decay ? head.decay[(row + i) * x.decay.stride[2]] : T(0);
      bad |= decay != decay;
      for (int64_t j = 0, n = 0; j < chunk_rows; j += lanes<T>, ++n) {
        const IntVec<T> token = lane_numbers<IntVec<T>>() + Lane(j);
        sums[n] = select(token < Lane(i), sums[n] + decay, Vec<T>{});
        store(c.gamma + i * chunk_rows + j, select(token > Lane(i), Vec<T>{}, decay_factor<T>(sums[n])));
      }
      sum += decay;
      fill_row(c.before + i * wide_m, decay_factor<T>(broadcast(sum)));
    }
    for (int64_t i = 0; i < rows; ++i) fill_row(c.after + i * wide_m, broadcast(c.gamma[(rows - 1) * chunk_rows + i]));
    return bad;
  }
  void fill_row(T* row, Vec<T> value) const {
    for (int64_t m = 0; m < wide_m; m += lanes<T>) store(row + m, value);
  }

  bool read_channel_decays(const Head& head, int64_t row, int64_t rows, const Chunk& c) const {
    const Matrix decays = {head.decay, x.decay.stride[2], x.decay.stride[3], x.N, M, dtype_of<T>};
    copy_rows<T>(decays, row, rows, c.factor, wide_m);
    IntVec<T> unknown{};
    for (int64_t m = 0; m < wide_m; m += lanes<T>) {
      Vec<T> sum{};
      for (int64_t i = 0; i < rows; ++i) {
        const Vec<T> decay = load(c.factor + i * wide_m + m);
        unknown |= decay != decay;
        store(c.before + i * wide_m + m, decay_factor<T>(sum += decay));
      }
      sum = Vec<T>{};
      for (int64_t i = rows - 1; i >= 0; --i) {
        T* const factor = c.factor + i * wide_m + m;
        store(c.after + i * wide_m + m, decay_factor<T>(sum));
        sum += load(factor);
        store(factor, decay_factor<T>(load(factor)));
      }
    }
    return any_lane(unknown);
  }

  // P where `reads`, and B, and the rows that are multiplied by their decays.
  void prepare(const Head& head, int64_t rows, bool reads, const Chunk& c) const {
    for (int64_t i = 0; i < rows * wide_m; i += lanes<T>) {
      const Vec<T> before = load(c.before + i), k = load(c.k + i);
      if (reads) store(c.qb + i, load(c.q + i) * before);
      store(c.kb + i, -(k * before));
      store(c.ke + i, k * load(c.after + i));
    }
    pack_panels<T>(scratch_matrix(c.ke, wide_m, rows, M), 0, rows, c.key_panels, chunk_rows * NR<T>);
    if (x.per_channel) return pair_products(head, rows, reads, c);
    transpose_rows<T>(scratch_matrix(c.k, wide_m, rows, M), 0, rows, M, c.transposed_keys);
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      const int64_t first = i * chunk_rows, width = round_up(i + count, NR<T>);
      if (reads) {
        multiply_visible<any_row, 1>(count, i, M, c.q + i * wide_m, c.transposed_keys, c.p + first, wide_m);
        for (int r = 0; r < count; ++r)
          scale(c.p + first + r * chunk_rows, c.gamma + first + r * chunk_rows, width, T(1));
      }
      if (!head.beta) return;
      multiply_visible<any_row, 1>(count, i, M, c.k + i * wide_m, c.transposed_keys, c.b + first, wide_m);
      for (int r = 0; r < count; ++r) {
        scale(c.b + first + r * chunk_rows, c.gamma + first + r * chunk_rows, width, T(-1));
        c.b[first + r * chunk_rows + i + r] = 0;
      }
    });
  }
  static void scale(T* row, const T* factors, int64_t width, T sign) {
    for (int64_t j = 0; j < width; j += lanes<T>) store(row + j, load(row + j) * load(factors + j) * sign);
  }

  // P and -B for decays of single channels: what token j wrote decays from one token to the next.
  void pair_products(const Head& head, int64_t rows, bool reads, const Chunk& c) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = i; j < chunk_rows; ++j) c.p[i * chunk_rows + j] = c.b[i * chunk_rows + j] = 0;
    for (int64_t j = 0; j < rows; ++j) {
      const T* written = c.k + j * wide_m;
      for (int64_t i = j; i < rows; ++i) {
        Vec<T> with_query{}, with_key{};
        for (int64_t m = 0; m < wide_m; m += lanes<T>) {
          Vec<T> left = load(written + m);
          if (i > j) store(c.run + m, left *= load(c.factor + i * wide_m + m));
          with_query += load(c.q + i * wide_m + m) * left;
          with_key += load(c.k + i * wide_m + m) * left;
        }
        if (i > j) written = c.run;
        if (reads) c.p[i * chunk_rows + j] = reduce_add<T>(with_query);
        if (head.beta && i > j) c.b[i * chunk_rows + j] = -reduce_add<T>(with_key);
      }
    }
  }

  // W and U, from the values in c.w.
  void solve(const Head& head, int64_t rows, const T* state, const Chunk& c) const {
    const int64_t wide_e = head.wide_e;
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      T* const w = c.w + i * wide_e;
      multiply<T, any_row, 1, Into::add>(count, wide_e / NR<T>, M, c.kb + i * wide_m, state, M * NR<T>, w, wide_e,
                                         nullptr, NR<T>, wide_m);
      multiply_block<Into::add>(count, i, c.b + i * chunk_rows, chunk_rows, c.u, w, wide_e);
      for (int r = 0; r < count; ++r) {
        const T* b = c.b + (i + r) * chunk_rows + i;
        if (r) multiply_block<Into::add>(1, r, b, chunk_rows, c.u + i * wide_e, w + r * wide_e, wide_e);
        for (int64_t e = 0; e < wide_e; e += lanes<T>)
          store(c.u + (i + r) * wide_e + e, load(w + r * wide_e + e) * c.beta[i + r]);
      }
    });
  }

  // S = total S + (after K)^T U
  void update(const Head& head, int64_t rows, const Chunk& c, const T* u, T* state) const {
    const T* total = c.before + (rows - 1) * wide_m;
    for (int64_t e = 0; e < head.wide_e; e += NR<T>, state += M * NR<T>)
      for_blocks<T>(M, false, [&](int64_t m, int count) {
        multiply<T, 1, NR<T>, Into::rescale>(count, 1, rows, panels_at(c.key_panels, chunk_rows * NR<T>, m), u + e, 0,
                                             state + m * NR<T>, NR<T>, total + m, head.wide_e);
      });
  }

  // Where the decay is 0, also if the state holds NaN or infinity.
  void clear_decayed(const Head& head, const T* total, T* state) const {
    for (int64_t m = 0; m < M; ++m)
      for (int64_t e = 0; total[m] == 0 && e < head.wide_e; e += NR<T>) fill<T>(state + (e * M + m * NR<T>), NR<T>, 0);
  }

  void load_state(const Head& head, const Matrix& from, T* state) const {
    if (from.data) pack_panels<T>(from, 0, M, state, M * NR<T>);
    else fill<T>(state, M * head.wide_e, 0);
  }
  void store_state(const Head& head, const T* state, const Matrix& to) const {
    const T one = 1;
    for (int64_t e = 0; e < head.E; e += NR<T>)
      unpack_rows<T>(columns_of(to, e, least<int64_t>(NR<T>, head.E - e)), 0, M, state + e * M, NR<T>, &one, 0);
  }
};

template <class T> struct RecurrenceForward : Recurrence<T> {
  using Base = Recurrence<T>;
  using Base::x, Base::M, Base::wide_m;
  using typename Base::Chunk, typename Base::Head;

  const regard_recurrence_result& result;
  int64_t parts = 1;  // of the columns of a head: they do not depend on one another

  RecurrenceForward(const regard_recurrence& x, const regard_recurrence_result& result) : Base(x), result(result) {
    if (x.B * x.H < x.threads) parts = least<int64_t>(x.threads / (x.B * x.H), (x.E + NR<T> - 1) / NR<T>);
  }

  struct Scratch {
    Chunk chunk;
    T *state, *out;
  };
  Scratch allocate_scratch(Parts<T>& part) const {
    const int64_t wide_e = round_up(x.E, NR<T>);
    Scratch s;
    s.chunk = this->allocate_chunk(part, wide_e);
    s.state = part(M, wide_e), s.out = part(MR, wide_e);
    return s;
  }

  void attend(const Head& head, const Matrix& out, int64_t row, int64_t rows, bool alone, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const T* u = head.beta ? c.u : c.w;
    if (alone) this->clear_decayed(head, c.before, s.state);
    this->prepare(head, rows, true, c);
    if (head.beta) this->solve(head, rows, s.state, c);
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      multiply<T, any_row, 1, Into::overwrite>(count, head.wide_e / NR<T>, M, c.qb + i * wide_m, s.state, M * NR<T>,
                                               s.out, head.wide_e, nullptr, NR<T>, wide_m);
      multiply_block<Into::add>(count, i + count, c.p + i * chunk_rows, chunk_rows, u, s.out, head.wide_e);
      const T one = 1;
      unpack_rows<T>(out, row + i, count, s.out, head.wide_e, &one, 0);
    });
    this->update(head, rows, c, u, s.state);
  }

  void scan(const Head& head, int64_t first, const Scratch& s) const {
    const Matrix out = this->columns_of(matrix_of(result.out, x.dtype, head.b, head.h, x.N, x.E), first, head.E);
    Matrix start = this->state_of(x.state, head.b, head.h);
    if (start.data) start = this->columns_of(start, first, head.E);
    this->load_state(head, start, s.state);
    bool alone = start.data && state_is_bad(start);
    for (int64_t row = 0, rows; row < x.N; row += rows) {
      if (result.checkpoints.data && row % REGARD_CHECKPOINT == 0)
        this->store_state(
            head, s.state,
            this->columns_of(this->checkpoint_of(result.checkpoints, head.b, head.h, row), first, head.E));
      rows = alone ? 1 : least<int64_t>(chunk_rows, x.N - row);
      if (this->read(head, row, rows, s.chunk) && !alone) {
        alone = true, rows = 1;
        this->read(head, row, rows, s.chunk);
      }
      attend(head, out, row, rows, alone, s);
    }
    this->store_state(head, s.state, this->columns_of(this->state_of(result.state, head.b, head.h), first, head.E));
  }
  bool state_is_bad(const Matrix& state) const {
    for (int64_t m = 0; m < M; ++m)
      if (row_is_bad<T>(row_of(state, m), state.columns, state.column_stride, dtype_of<T>)) return true;
    return false;
  }

  int operator()(int thread, int threads) const {
    return with_scratch<T>(*this, [&](const Scratch& s) {
      const int64_t work = x.B * x.H * parts, panels = (x.E + NR<T> - 1) / NR<T>;
      for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w) {
        const int64_t head = w / parts, first = panels * (w % parts) / parts * NR<T>,
                      end = least<int64_t>(x.E, panels * (w % parts + 1) / parts * NR<T>);
        scan(this->head_of(head / x.H, head % x.H, first, end - first), first, s);
      }
    });
  }
};

}  // namespace regard::REGARD_ISA
