// Causal linear attention on features, chunk by chunk:
//
//   out_i = sum over j <= i of (q_i . k_j) v_j / norm_i,    norm_i = q_i . (sum over j <= i of k_j)
//
// of features q and k, which are computed while packing.
// Within a chunk the products q.k are formed and the upper triangle is dropped; everything before the chunk is in the
// state S = sum of k v^T and z = sum of k. A head that is too long for one thread is cut into segments: a first pass adds
// up the states of parts of them, and every segment starts from the sum of the parts before it.
//
// Between products the rows that the next chunk reads are fetched, and those that a block writes: a block of one tensor or two
// at a time, since more would have to queue.
#pragma once
#include "memory.h"
#include "pack.h"

namespace regard::REGARD_ISA {

constexpr int chunk_rows = 32;  // a multiple of NR on every instruction set

// elu(x) + 1, with all digits near 0, where 1 - 1 + e^x would have none. Below -80 it is exactly 0.
template <class T> REGARD_INLINE Vec<T> elu_feature(Vec<T> x) {
  const Vec<T> zero{}, power = exp(min(zero, max(broadcast(T(-87)), x)));
  return select(x < T(-80), zero, power + max(zero, x));
}
template <class T> void make_features(T* x, int64_t n) {
  for (int64_t i = 0; i < n; i += lanes<T>) store(x + i, elu_feature<T>(load(x + i)));
}
template <class T> constexpr int32_t dtype_of = sizeof(T) == 8 ? REGARD_FLOAT64 : REGARD_FLOAT32;

// Blocks of rows that do not cross a panel: f(first row, rows). What a row may not see is multiplied by zero: the smaller
// the block, the less; below 8 rows the products become slow. And NaN times zero is NaN: where there is one, every row is a
// block of its own.
template <class T, class F> REGARD_INLINE void for_blocks(int64_t rows, bool alone, F&& f) {
  constexpr int most = MR < 8 ? MR : 8, pieces = (NR<T> + most - 1) / most;
  const int block = alone ? 1 : (NR<T> + pieces - 1) / pieces;
  for (int64_t panel = 0; panel < rows; panel += NR<T>) {
    const int64_t end = least<int64_t>(panel + NR<T>, rows);
    for (int64_t i = panel; i < end; i += block) f(i, int(least<int64_t>(block, end - i)));
  }
}

// The left operand of a product over columns, rows [row, ...) of a turned matrix; and of a product over rows, columns
// [column, ...) of panels. Both are read in steps of NR.
template <class T> REGARD_INLINE const T* transposed_at(const T* transposed, int64_t depth, int64_t row) {
  return transposed + row / NR<T> * depth * NR<T> + row % NR<T>;
}
template <class T> REGARD_INLINE const T* panels_at(const T* panels, int64_t panel, int64_t column) {
  return panels + column / NR<T> * panel + column % NR<T>;
}

// Up to a chunk of rows, transposed, each panel with room for `depth` >= columns rows. Returns whether NaN or an infinity was met.
template <class T> bool transpose_rows(const Matrix& x, int64_t row, int64_t rows, int64_t depth, T* out) {
  bool bad = false;
  for (int64_t p = 0; p < rows; p += NR<T>) bad |= pack_transposed<T>(x, row + p, T(1), out + p * depth);
  return bad;
}

// The same from rows that are panels already.
template <class T> void transpose_panels(const T* panels, int64_t rows, int64_t columns, int64_t depth, T* out) {
  for (int64_t c = 0; c < columns; c += NR<T>) {
    const Matrix panel{panels + c * chunk_rows, NR<T>, 1, rows, least<int64_t>(NR<T>, columns - c), dtype_of<T>};
    transpose_rows<T>(panel, 0, rows, depth, out + c * NR<T>);
  }
}

// The right operand of a product over rows: panels of a chunk, or rows of any length.
template <class T> struct Right {
  const T* first;
  int64_t panel = chunk_rows * NR<T>, row = NR<T>;
};

// state[panel of c][r][NR] += sum over rows i of left(i, r) * right(i, c), the left ones given as panels of a chunk.
template <class T>
void add_outer(int64_t rows, const T* left, int64_t left_columns, Right<T> right, int64_t right_columns, T* state,
               int64_t state_panel) {
  for (int64_t c = 0; c < right_columns; c += NR<T>, right.first += right.panel, state += state_panel)
    for_blocks<T>(left_columns, false, [&](int64_t r, int count) {
      multiply<T, 1, NR<T>, Into::add>(count, 1, rows, panels_at(left, chunk_rows * NR<T>, r), right.first, 0,
                                       state + r * NR<T>, NR<T>, nullptr, right.row);
    });
}

template <class T> void fill(T* x, int64_t n, T value) {
  for (int64_t i = 0; i < n; ++i) x[i] = value;
}
template <class T> void accumulate(T* x, const T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

// How the rows of all heads are distributed. A segment is processed by one thread; it consists of `segments` parts, whose
// states are added up in the first pass.
struct LinearSplit {
  int64_t heads, chunks, segments = 1;

  LinearSplit(int64_t heads, int64_t rows, int threads) : heads(heads), chunks((rows + chunk_rows - 1) / chunk_rows) {
    int64_t a = heads, b = threads;
    while (b) {
      const int64_t rest = a % b;
      a = b, b = rest;
    }
    // An extra pass over keys and values costs a third of the work: not worth it where the shares are nearly equal.
    const int64_t wanted = heads >= 4 * int64_t(threads) || a == 0 ? 1 : threads / a;
    segments = greatest<int64_t>(1, least<int64_t>(wanted, chunks / 8));
  }
  int64_t parts() const { return segments * segments; }
  int64_t first_chunk(int64_t part) const { return chunks * part / parts(); }
};

// products[r][j] of query i + r and key j, and 0 where the key lies behind the query.
template <int ARow, int AStep, class T>
REGARD_INLINE void multiply_visible(int count, int64_t i, int64_t depth, const T* queries, const T* keys, T* products,
                                    int64_t a_row = 0) {
  const int64_t seen = i + count, width = round_up(seen, NR<T>);
  multiply_wanted<T, ARow, AStep>(count, {width / NR<T>, false, width - seen >= lanes<T>}, depth, queries, keys,
                                  depth * NR<T>, products, chunk_rows, a_row);
  for (int r = 0; r < count; ++r)
    for (int64_t j = i + r + 1; j < width; ++j) products[r * chunk_rows + j] = 0;
}

// The share of `thread` of n equal pieces of work.
REGARD_INLINE int64_t share(int64_t n, int thread, int threads) { return n * thread / threads; }

// One call: what forward and backward share. State and gradients have whole panels of columns.
template <class T> struct LinearProblem {
  const regard_linear& x;
  const LinearSplit split;
  const int64_t M, E, wide_m, wide_e;

  explicit LinearProblem(const regard_linear& x)
      : x(x), split(x.B * x.G, x.N, x.threads), M(x.M), E(x.E), wide_m(round_up(M, NR<T>)), wide_e(round_up(E, NR<T>)) {
  }

  Matrix keys(int64_t head) const { return matrix_of(x.k, x.dtype, head / x.G, head % x.G, x.N, M); }
  Matrix values(int64_t head) const { return matrix_of(x.v, x.dtype, head / x.G, head % x.G, x.N, E); }
  Matrix queries(int64_t b, int64_t h) const { return matrix_of(x.q, x.dtype, b, h, x.N, M); }

  // Features of up to a chunk of rows as panels; returns whether NaN or an infinity was met.
  bool feature_panels(const Matrix& from, int64_t row, int64_t rows, T* out) const {
    const bool bad = pack_panels<T>(from, row, rows, out, chunk_rows * NR<T>);
    if (x.map == REGARD_ELU)
      for (int64_t m = 0; m < wide_m; m += NR<T>) make_features(out + m * chunk_rows, rows * NR<T>);
    return bad;
  }
  void transpose_features(const T* panels, int64_t rows, T* out) const { transpose_panels<T>(panels, rows, M, M, out); }

  // From the gradients of the features of row `row + i`, its own: the derivative of a feature is itself up to 1, and then 1.
  void store_row(const T* panels, int64_t i, const Matrix& to, int64_t row, T* gradient) const {
    if (x.map == REGARD_ELU)
      for (int64_t m = 0; m < wide_m; m += lanes<T>)
        store(gradient + m,
              load(gradient + m) * min(broadcast(T(1)), load(panels_at(panels, chunk_rows * NR<T>, m) + i * NR<T>)));
    unpack_row(to, row + i, gradient, T(1));
  }

  int64_t rows_of(int64_t c) const { return least<int64_t>(chunk_rows, x.N - c * chunk_rows); }
};

// Scratch memory as a list of parts: called once with no memory, to learn the size, and once with it.
template <class T> struct Parts {
  char* base;
  Layout layout;
  T* operator()(int64_t count, int64_t width) {
    const size_t at = layout.add(count, width, sizeof(T));
    return base ? (T*)(base + at) : nullptr;
  }
};

// Scratch for every thread, the states of the parts for all of them, then the passes: sum_states where heads are cut into
// segments, and walk.
template <class T, class Job> int run_passes(Job& job, int threads, bool segmented, const Layout& shared, T*& states) {
  Buffer buffer;
  Parts<T> sizes{};
  job.allocate_scratch(sizes);
  if (!shared.ok || !sizes.layout.ok) return REGARD_TOO_LARGE;
  if (!buffer.reserve(shared.bytes)) return REGARD_NO_MEMORY;
  states = (T*)buffer.data;
  bool walking = !segmented;
  auto body = [&](int thread, int count) {
    Parts<T> parts{(char*)thread_scratch(sizes.layout.bytes), {}};
    if (!parts.base) return int(REGARD_NO_MEMORY);
    const auto scratch = job.allocate_scratch(parts);
    const int status = walking ? job.attend_chunks(scratch, thread, count) : job.sum_states(scratch, thread, count);
    if (walking) trim_thread_scratch();
    return status;
  };
  if (segmented)
    if (const int status = parallel(threads, body)) return status;
  walking = true;
  return parallel(threads, body);
}

template <class T> struct LinearForward : LinearProblem<T> {
  using Problem = LinearProblem<T>;
  using Problem::x, Problem::split, Problem::M, Problem::E, Problem::wide_m, Problem::wide_e;

  const regard_linear_result& result;
  const int64_t state_size;  // S as panels[E / NR][M][NR], then z
  T* states = nullptr;       // of the parts of all heads

  LinearForward(const regard_linear& x, const regard_linear_result& result)
      : Problem(x), result(result), state_size(M * wide_e + wide_m) {}

  struct Scratch {
    T *state, *keys, *transposed_keys, *values, *query_rows, *queries, *products, *norms, *out;
  };
  Scratch allocate_scratch(Parts<T>& part) const {
    return {part(1, state_size),      part(chunk_rows, wide_m), part(chunk_rows, M),
            part(chunk_rows, wide_e), part(chunk_rows, wide_m), part(chunk_rows, M),
            part(MR, chunk_rows),     part(1, chunk_rows),      part(MR, wide_e)};
  }

  void extend_state(int64_t rows, const Scratch& s, T* state) const {
    const T one = 1;
    add_outer<T>(rows, s.keys, M, {s.values}, wide_e, state, M * NR<T>);
    multiply<T, 0, 0, Into::add>(1, wide_m / NR<T>, rows, &one, s.keys, chunk_rows * NR<T>, state + M * wide_e, 0);
  }

  bool pack(const Matrix& k, const Matrix& v, int64_t row, int64_t rows, const Scratch& s) const {
    const bool bad = this->feature_panels(k, row, rows, s.keys);
    return pack_panels<T>(v, row, rows, s.values, chunk_rows * NR<T>) || bad;
  }

  void attend(int64_t head, int64_t h, int64_t row, int64_t rows, bool alone, const Scratch& s) const {
    const int64_t b = head / x.G, next = row + chunk_rows;
    const Matrix q = this->queries(b, h), k = this->keys(head), v = this->values(head);
    const Matrix out = matrix_of(result.out, x.dtype, b, h, x.N, E);
    T* norm = (T*)result.norm.data + b * result.norm.stride[0] + h * result.norm.stride[1];
    this->feature_panels(q, row, rows, s.query_rows);
    this->transpose_features(s.query_rows, rows, s.queries);
    for (int64_t p = 0; p < rows; p += NR<T>)
      multiply<T, 0, 1, Into::overwrite>(1, 1, M, s.state + M * wide_e, s.queries + p * M, 0, s.norms + p, 0);

    for_blocks<T>(rows, alone, [&](int64_t i, int count) {
      const T* queries = transposed_at(s.queries, M, i);
      fetch_rows(q, next + i, count);
      multiply_visible<1, NR<T>>(count, i, M, queries, s.transposed_keys, s.products);
      fetch_rows(k, next + i, count);
      multiply<T, 1, NR<T>, Into::overwrite>(count, wide_e / NR<T>, M, queries, s.state, M * NR<T>, s.out, wide_e);
      fetch_rows(v, next + i, count);
      fetch_rows(out, row + i, count);
      multiply<T, chunk_rows, 1, Into::add>(count, wide_e / NR<T>, i + count, s.products, s.values, chunk_rows * NR<T>,
                                            s.out, wide_e);
      for (int r = 0; r < count; ++r) {
        Vec<T> sum{};
        for (int64_t j = 0; j < i + count; j += lanes<T>) sum += load(s.products + r * chunk_rows + j);
        const T total = s.norms[i + r] + reduce_add<T>(sum);
        unpack_row(out, row + i + r, s.out + r * wide_e, total == 0 ? T(0) : 1 / total);
        norm[(row + i + r) * result.norm.stride[2]] = total;
      }
    });
  }

  int sum_states(const Scratch& s, int thread, int threads) const {
    const int64_t parts = split.parts() - split.segments,
                  work = split.heads * parts;  // nothing depends on the last segment
    for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w) {
      const int64_t head = w / parts, part = w % parts;
      T* state = states + (head * split.parts() + part) * state_size;
      fill<T>(state, state_size, 0);
      for (int64_t c = split.first_chunk(part); c < split.first_chunk(part + 1); ++c) {
        pack(this->keys(head), this->values(head), c * chunk_rows, this->rows_of(c), s);
        extend_state(this->rows_of(c), s, state);
      }
    }
    return REGARD_OK;
  }

  int attend_chunks(const Scratch& s, int thread, int threads) const {
    const int64_t work = split.heads * split.segments, group = x.H / x.G;
    for (int64_t w = share(work, thread, threads); w < share(work, thread + 1, threads); ++w) {
      const int64_t head = w / split.segments, segment = w % split.segments, g = head % x.G;
      const Matrix k = this->keys(head), v = this->values(head);
      fill<T>(s.state, state_size, 0);
      for (int64_t part = 0; part < segment * split.segments; ++part)
        accumulate(s.state, states + (head * split.parts() + part) * state_size, state_size);
      const int64_t end = split.first_chunk((segment + 1) * split.segments);
      for (int64_t c = split.first_chunk(segment * split.segments); c < end; ++c) {
        const int64_t row = c * chunk_rows, rows = this->rows_of(c);
        const bool bad = pack(k, v, row, rows, s);
        this->transpose_features(s.keys, rows, s.transposed_keys);
        for (int64_t h = g * group; h < (g + 1) * group; ++h) attend(head, h, row, rows, bad, s);
        if (c + 1 < end) extend_state(rows, s, s.state);
      }
    }
    return REGARD_OK;
  }

  int run() {
    Layout shared;
    shared.add(split.segments > 1 ? split.heads * split.parts() : 0, state_size, sizeof(T));
    return run_passes<T>(*this, x.threads, split.segments > 1, shared, states);
  }
};

}  // namespace regard::REGARD_ISA
