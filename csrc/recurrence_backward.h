// The gradients of the recurrence. With D the gradient of the state after a chunk and the names of recurrence.h:
//
//   d_U = P^T d_out + (after K) D;   solved backward for d_W: d_W = beta (d_U - B^T d_W);   d_V = d_W
//   d_P = tril(d_out U^T) * G;   d_B = -tril(d_W U^T, -1) * G
//   d_Q = d_P K + before (d_out S^T)
//   d_K = d_B K - before (d_W S^T)  (as a reader)  +  d_P^T Q + d_B^T K + after (U D^T)  (as a writer)
//   D   = total D + (before Q)^T d_out - (before K)^T d_W
//
// A decay scales what is read at or after its token, but was written before: with r_s the sum of what token s reads times
// its gradients and w_s that of what it writes, its gradient is the sum over s >= t of r_s - w_s, and of D * S at the end
// of the chunk.
//
// States are computed again, from the last checkpoint on, a window of chunks at a time.
#pragma once
#include "recurrence.h"

namespace regard::REGARD_ISA {

constexpr int window_chunks = 16;
static_assert(window_chunks * chunk_rows == REGARD_CHECKPOINT);

template <class T> struct RecurrenceBackward : Recurrence<T> {
  using Base = Recurrence<T>;
  using Base::x, Base::M, Base::wide_m;
  using typename Base::Chunk, typename Base::Head;

  const regard_recurrence_gradient& gradient;
  const int64_t E, wide_e;

  RecurrenceBackward(const regard_recurrence& x, const regard_recurrence_gradient& gradient)
      : Base(x), gradient(gradient), E(x.E), wide_e(round_up(x.E, NR<T>)) {}

  struct Scratch {
    Chunk chunk;
    T *states, *errors;                 // transposed states of the chunks of a window and after them; their W
    T *state, *d_state, *transposed_d;  // panels of S and D; D transposed
    T *d_out, *d_u, *d_q, *d_reader, *d_writer, *d_beta, *d_decay;  // rows
    T *transposed_u, *query_panels, *negative_panels;               // of (before Q) and -(before K)
    T *d_p, *d_b;
  };
  Scratch allocate_scratch(Parts<T>& part) const {
    const int64_t n = chunk_rows;
    Scratch s;
    s.chunk = this->allocate_chunk(part, wide_e);
    s.states = part(window_chunks + 1, E * wide_m), s.errors = part(window_chunks * n, wide_e);
    s.state = part(M, wide_e), s.d_state = part(M, wide_e), s.transposed_d = part(E, wide_m);
    s.d_out = part(n, wide_e), s.d_u = part(n, wide_e), s.d_q = part(n, wide_m), s.d_reader = part(n, wide_m);
    s.d_writer = part(n, wide_m), s.d_beta = part(1, n), s.d_decay = part(n, wide_m);
    s.transposed_u = part(n, E), s.query_panels = part(n, wide_m), s.negative_panels = part(n, wide_m);
    s.d_p = part(n, n), s.d_b = part(n, n);
    return s;
  }

  void transpose_state(const T* state, T* out) const {
    for (int64_t e = 0; e < E; e += NR<T>)
      transpose_rows<T>(scratch_matrix(state + e * M, NR<T>, M, least<int64_t>(NR<T>, E - e)), 0, M, E,
                        out + e * NR<T>);
  }
  T* state_after(const Scratch& s, int64_t n) const { return s.states + n * E * wide_m; }

  // The forward from the last checkpoint to the end of a window of `count` chunks of `step` rows.
  void recompute(const Head& head, int64_t first, int64_t end, int64_t step, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const int64_t start = first / REGARD_CHECKPOINT * REGARD_CHECKPOINT;
    const bool alone = step == 1;
    this->load_state(head, this->checkpoint_of(gradient.checkpoints, head.b, head.h, start), s.state);
    for (int64_t row = start, rows; row < end; row += rows) {
      const int64_t n = (row - first) / step;
      rows = least<int64_t>(step, end - row);
      this->read(head, row, rows, c);
      if (alone) this->clear_decayed(head, c.before, s.state);
      if (row >= first) transpose_state(s.state, state_after(s, n));
      this->prepare(head, rows, false, c);
      if (head.beta) this->solve(head, rows, s.state, c);
      if (head.beta && row >= first)
        copy_rows<T>(scratch_matrix(c.w, wide_e, rows, wide_e), 0, rows, errors_of(s, n), wide_e);
      this->update(head, rows, c, head.beta ? c.u : c.w, s.state);
    }
    transpose_state(s.state, state_after(s, (end - first + step - 1) / step));
  }
  T* errors_of(const Scratch& s, int64_t n) const { return s.errors + n * chunk_rows * wide_e; }

  // d_W in the place of d_U, and d_beta.
  void solve_backward(int64_t rows, const Scratch& s) const {
    const Chunk& c = s.chunk;
    int64_t starts[chunk_rows], blocks = 0;
    for_blocks<T>(rows, false, [&](int64_t i, int) { starts[blocks++] = i; });
    for (int64_t end = rows; blocks--;) {
      const int64_t i = starts[blocks], count = end - i;
      multiply<T, 1, chunk_rows, Into::add>(int(count), wide_e / NR<T>, rows - end, c.b + end * chunk_rows + i,
                                            s.d_u + end * wide_e, NR<T>, s.d_u + i * wide_e, wide_e, nullptr, wide_e);
      for (int64_t r = end - 1; r >= i; --r) {
        T* const d_u = s.d_u + r * wide_e;
        const int64_t later = end - 1 - r;
        if (later)
          multiply<T, 1, chunk_rows, Into::add>(1, wide_e / NR<T>, later, c.b + (r + 1) * chunk_rows + r, d_u + wide_e,
                                                NR<T>, d_u, wide_e, nullptr, wide_e);
        Vec<T> sum{};
        for (int64_t e = 0; e < wide_e; e += lanes<T>) {
          sum += load(d_u + e) * load(c.w + r * wide_e + e);
          store(d_u + e, load(d_u + e) * c.beta[r]);
        }
        s.d_beta[r] = reduce_add<T>(sum);
      }
      end = i;
    }
  }

  // d_q, d_reader and d_writer but for what their own chunk gives, and d_p and d_b.
  void state_gradients(const Head& head, int64_t n, int64_t rows, const T* u, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const T* state = state_after(s, n);
    const auto times_state = [&](int count, const T* left, const T* right, T* to) {
      multiply<T, any_row, 1, Into::overwrite>(count, wide_m / NR<T>, E, left, right, E * NR<T>, to, wide_m, nullptr,
                                               NR<T>, wide_e);
    };
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      const int64_t pairs = i * chunk_rows;
      times_state(count, s.d_out + i * wide_e, state, s.d_q + i * wide_m);
      times_state(count, u + i * wide_e, s.transposed_d, s.d_writer + i * wide_m);
      multiply_visible<any_row, 1>(count, i, E, s.d_out + i * wide_e, s.transposed_u, s.d_p + pairs, wide_e);
      if (!head.beta) return;
      times_state(count, s.d_u + i * wide_e, state, s.d_reader + i * wide_m);
      multiply_visible<any_row, 1>(count, i, E, s.d_u + i * wide_e, s.transposed_u, s.d_b + pairs, wide_e);
      for (int r = 0; r < count; ++r) s.d_b[pairs + r * chunk_rows + i + r] = 0;
    });
    for (int64_t i = 0; i < rows * wide_m; i += lanes<T>) {
      const Vec<T> before = load(c.before + i);
      store(s.d_q + i, load(s.d_q + i) * before);
      store(s.d_reader + i, head.beta ? -(load(s.d_reader + i) * before) : Vec<T>{});
      store(s.d_writer + i, load(s.d_writer + i) * load(c.after + i));
    }
  }

  void add_pairs(const Head& head, int64_t rows, const Scratch& s) const {
    const Chunk& c = s.chunk;
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      const int64_t pairs = i * chunk_rows, width = round_up(i + count, NR<T>);
      for (int64_t r = pairs; r < pairs + count * chunk_rows; r += chunk_rows) {
        this->scale(s.d_p + r, c.gamma + r, width, T(1));
        if (head.beta) this->scale(s.d_b + r, c.gamma + r, width, T(-1));
      }
      multiply_block<Into::add>(count, i + count, s.d_p + pairs, chunk_rows, c.k, s.d_q + i * wide_m, wide_m);
      if (head.beta)
        multiply_block<Into::add>(count, i + count, s.d_b + pairs, chunk_rows, c.k, s.d_reader + i * wide_m, wide_m);
    });
    for_blocks<T>(rows, false, [&](int64_t j, int count) {
      multiply_below(count, j, rows, s.d_p, c.q, s.d_writer, wide_m);
      if (head.beta) multiply_below(count, j, rows, s.d_b, c.k, s.d_writer, wide_m);
    });
  }

  // The same for decays of single channels. What token j wrote decays on its way to later readers, and their gradients on
  // their way back.
  void add_channel_pairs(const Head& head, int64_t rows, const Scratch& s) const {
    const Chunk& c = s.chunk;
    for (int64_t j = 0; j < rows; ++j) {
      const T* written = c.k + j * wide_m;
      for (int64_t i = j; i < rows; ++i) {
        const T d_p = s.d_p[i * chunk_rows + j], d_b = head.beta ? -s.d_b[i * chunk_rows + j] : T(0);
        for (int64_t m = 0; m < wide_m; m += lanes<T>) {
          const int64_t at = i * wide_m + m;
          Vec<T> left = load(written + m);
          if (i > j) store(c.run + m, left *= load(c.factor + at));
          store(s.d_q + at, load(s.d_q + at) + left * d_p);
          if (head.beta) store(s.d_reader + at, load(s.d_reader + at) + left * d_b);
        }
        if (i > j) written = c.run;
      }
      fill<T>(c.run, wide_m, 0);
      for (int64_t i = rows - 1; i >= j; --i) {
        const T d_p = s.d_p[i * chunk_rows + j], d_b = head.beta ? -s.d_b[i * chunk_rows + j] : T(0);
        for (int64_t m = 0; m < wide_m; m += lanes<T>) {
          const int64_t at = i * wide_m + m;
          const Vec<T> later = i + 1 < rows ? load(c.run + m) * load(c.factor + at + wide_m) : Vec<T>{};
          store(c.run + m, later + load(c.q + at) * d_p + load(c.k + at) * d_b);
        }
      }
      accumulate(s.d_writer + j * wide_m, c.run, wide_m);
    }
  }

  void decay_gradients(const Head& head, int64_t row, int64_t rows, int64_t n, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const T* after = state_after(s, n + 1);
    for (int64_t m = 0; m < wide_m; m += lanes<T>) {
      const int64_t first = m / NR<T> * E * NR<T> + m % NR<T>;
      Vec<T> at_end{}, sum{};
      for (int64_t e = 0; e < E; ++e)
        at_end += load(s.transposed_d + first + e * NR<T>) * load(after + first + e * NR<T>);
      for (int64_t i = rows - 1; i >= 0; --i) {
        const int64_t at = i * wide_m + m;
        const Vec<T> k = load(c.k + at);
        sum += load(c.q + at) * load(s.d_q + at) + k * (load(s.d_reader + at) - load(s.d_writer + at));
        store(s.d_decay + at, sum + at_end);
      }
    }
    // What a decay of -infinity hides has no gradient; the sums that cancel may leave a rounding error.
    T* const to = (T*)Base::numbers_of(gradient.d_decay, head.b, head.h);
    for (int64_t i = 0; i < rows; ++i) {
      T* const row_to = to + (row + i) * gradient.d_decay.stride[2];
      Vec<T> sum{};
      for (int64_t m = 0; m < wide_m; m += lanes<T>) {
        const Vec<T> d = load(s.d_decay + i * wide_m + m);
        if (x.per_channel)
          store(s.d_decay + i * wide_m + m, select(load(c.factor + i * wide_m + m) == Vec<T>{}, Vec<T>{}, d));
        else sum += d;
      }
      if (x.per_channel) put_row(row_to, M, gradient.d_decay.stride[3], s.d_decay + i * wide_m, T(1));
      else *row_to = factor_of(head, row + i) == 0 ? T(0) : reduce_add<T>(sum);
    }
  }
  T factor_of(const Head& head, int64_t row) const {
    return decay_factor<T>(broadcast(head.decay[row * x.decay.stride[2]]))[0];
  }

  void differentiate(const Head& head, int64_t row, int64_t rows, int64_t n, bool alone, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const T one = 1;
    this->read(head, row, rows, c);
    this->prepare(head, rows, true, c);
    if (head.beta) {
      copy_rows<T>(scratch_matrix(errors_of(s, n), wide_e, rows, wide_e), 0, rows, c.w, wide_e);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t e = i * wide_e; e < (i + 1) * wide_e; e += lanes<T>) store(c.u + e, load(c.w + e) * c.beta[i]);
    }
    const T* u = head.beta ? c.u : c.w;
    if (gradient.d_out.data)
      copy_rows<T>(matrix_of(gradient.d_out, x.dtype, head.b, head.h, x.N, E), row, rows, s.d_out, wide_e);
    else fill<T>(s.d_out, rows * wide_e, 0);
    transpose_rows<T>(scratch_matrix(u, wide_e, rows, E), 0, rows, E, s.transposed_u);
    transpose_state(s.d_state, s.transposed_d);
    for_blocks<T>(rows, false, [&](int64_t i, int count) {
      multiply<T, any_row, 1, Into::overwrite>(count, wide_e / NR<T>, M, c.ke + i * wide_m, s.d_state, M * NR<T>,
                                               s.d_u + i * wide_e, wide_e, nullptr, NR<T>, wide_m);
      multiply_below(count, i, rows, c.p, s.d_out, s.d_u, wide_e);
    });
    if (head.beta) solve_backward(rows, s);
    state_gradients(head, n, rows, u, s);
    if (x.per_channel) add_channel_pairs(head, rows, s);
    else add_pairs(head, rows, s);

    const Matrix d_q = matrix_of(gradient.d_q, x.dtype, head.b, head.h, x.N, M),
                 d_k = matrix_of(gradient.d_k, x.dtype, head.b, head.h, x.N, M),
                 d_v = matrix_of(gradient.d_v, x.dtype, head.b, head.h, x.N, E);
    unpack_rows<T>(d_q, row, rows, s.d_q, wide_m, &one, 0);
    unpack_rows<T>(d_v, row, rows, s.d_u, wide_e, &one, 0);
    if (head.beta) {
      T* const d_beta = (T*)Base::numbers_of(gradient.d_beta, head.b, head.h);
      for (int64_t i = 0; i < rows; ++i) d_beta[(row + i) * gradient.d_beta.stride[2]] = s.d_beta[i];
    }
    if (head.decay) decay_gradients(head, row, rows, n, s);
    accumulate(s.d_writer, s.d_reader, rows * wide_m);
    unpack_rows<T>(d_k, row, rows, s.d_writer, wide_m, &one, 0);
    update_gradient(head, rows, alone, s);
  }

  void update_gradient(const Head& head, int64_t rows, bool alone, const Scratch& s) const {
    const Chunk& c = s.chunk;
    const T* total = c.before + (rows - 1) * wide_m;
    if (alone) this->clear_decayed(head, total, s.d_state);
    pack_panels<T>(scratch_matrix(c.qb, wide_m, rows, M), 0, rows, s.query_panels, chunk_rows * NR<T>);
    if (head.beta)
      pack_panels<T>(scratch_matrix(c.kb, wide_m, rows, M), 0, rows, s.negative_panels, chunk_rows * NR<T>);
    for (int64_t e = 0; e < wide_e; e += NR<T>)
      for_blocks<T>(M, false, [&](int64_t m, int count) {
        T* const to = s.d_state + (e * M + m * NR<T>);
        multiply<T, 1, NR<T>, Into::rescale>(count, 1, rows, panels_at(s.query_panels, chunk_rows * NR<T>, m),
                                             s.d_out + e, 0, to, NR<T>, total + m, wide_e);
        if (head.beta)
          multiply<T, 1, NR<T>, Into::add>(count, 1, rows, panels_at(s.negative_panels, chunk_rows * NR<T>, m),
                                           s.d_u + e, 0, to, NR<T>, nullptr, wide_e);
      });
  }

  // Whether anything that this head reads is NaN or an infinity.
  bool is_bad(const Head& head) const {
    const auto bad = [](const Matrix& rows) {
      for (int64_t r = 0; rows.data && r < rows.rows; ++r)
        if (row_is_bad<T>(row_of(rows, r), rows.columns, rows.column_stride, rows.dtype)) return true;
      return false;
    };
    if (bad(head.q) || bad(head.k) || bad(head.v)) return true;
    if (bad(matrix_of(gradient.d_out, x.dtype, head.b, head.h, x.N, E))) return true;
    if (bad(this->state_of(x.state, head.b, head.h)) || bad(this->state_of(gradient.d_final, head.b, head.h)))
      return true;
    for (int64_t i = 0; i < x.N; ++i) {
      if (head.beta && head.beta[i * x.beta.stride[2]] - head.beta[i * x.beta.stride[2]] != 0) return true;
      for (int64_t m = 0; head.decay && m < (x.per_channel ? M : 1); ++m) {
        const T decay = head.decay[i * x.decay.stride[2] + m * x.decay.stride[3]];
        if (decay != decay) return true;
      }
    }
    return false;
  }

  void scan(const Head& head, const Scratch& s) const {
    const int64_t step = is_bad(head) ? 1 : chunk_rows, span = step * window_chunks;
    this->load_state(head, this->state_of(gradient.d_final, head.b, head.h), s.d_state);
    for (int64_t first = (x.N - 1) / span * span; first >= 0; first -= span) {
      const int64_t end = least<int64_t>(x.N, first + span);
      recompute(head, first, end, step, s);
      for (int64_t n = (end - first - 1) / step; n >= 0; --n) {
        const int64_t row = first + n * step;
        differentiate(head, row, least<int64_t>(step, end - row), n, step == 1, s);
      }
    }
    if (gradient.d_state.data) this->store_state(head, s.d_state, this->state_of(gradient.d_state, head.b, head.h));
  }

  int operator()(int thread, int threads) const {
    return with_scratch<T>(*this, [&](const Scratch& s) {
      const int64_t work = x.B * x.H;
      for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w)
        scan(this->head_of(w / x.H, w % x.H, 0, E), s);
    });
  }
};

}  // namespace regard::REGARD_ISA
