// Pack rows of any dtype and strides into the forms that the micro-kernel reads.
//
//   strips   strip[column][MR]: MR rows side by side, the left operand of a product over columns
//   panels   panel[row][NR]: NR columns of many rows, the right operand of a product over rows
//   turned   panel[column][NR]: NR rows side by side, the right operand of a product over columns
//
// Numbers become float (double) on the way and are multiplied by a factor; what lies outside the tensor becomes zero.
#pragma once
#include "gemm.h"
#include "regard.h"

namespace regard::REGARD_ISA {

// Rows of one head: element (row, column) is data[row * row_stride + column * column_stride].
struct Matrix {
  const void* data;
  int64_t row_stride, column_stride;
  int64_t rows, columns;
  int32_t dtype;
  const float* scale = nullptr;  // of each row, of numbers of eight bits
  int64_t scale_stride = 0;

  // A row is its numbers times this.
  REGARD_INLINE float scale_of(int64_t row) const { return scale ? scale[row * scale_stride] : 1.0f; }
};

template <class S> REGARD_INLINE const S* at(const Matrix& x, int64_t row, int64_t column) {
  return (const S*)x.data + row * x.row_stride + column * x.column_stride;
}
inline size_t storage_bytes(int32_t dtype) {
  return dtype == REGARD_FLOAT64 ? 8 : dtype == REGARD_FLOAT32 ? 4 : dtype == REGARD_INT8 ? 1 : 2;
}
inline void* row_of(const Matrix& x, int64_t row) {
  return (char*)x.data + row * x.row_stride * int64_t(storage_bytes(x.dtype));
}

// Calls f with the type that is stored in memory, for those that T computes.
template <class S> struct Stored {
  using type = S;
};
template <class T, class F> REGARD_INLINE void with_storage(int32_t dtype, F&& f) {
  if constexpr (sizeof(T) == 8) f(Stored<double>{});
  else if (dtype == REGARD_BFLOAT16) f(Stored<bfloat16>{});
  else if (dtype == REGARD_FLOAT16) f(Stored<float16>{});
  else f(Stored<float>{});
}

// The same for keys and values, which may also be numbers of eight bits.
template <class T, class F> REGARD_INLINE void with_key_storage(int32_t dtype, F&& f) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == REGARD_INT8) return f(Stored<int8>{});
  }
  with_storage<T>(dtype, f);
}

// Prefetch rows that are needed soon, which the hardware cannot predict while it computes something else. They go into the
// second-level cache: the first level has room for few requests, and the current work would wait for them. Addresses past
// the end have no effect. (If it were not inlined, the compiler would remove calls that do nothing else.)
REGARD_INLINE void fetch_rows(const void* first, int64_t row_bytes, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t at = 0; at < bytes; at += 64)
      __builtin_prefetch((const void*)(uintptr_t(first) + uintptr_t(r * row_bytes + at)), 0, 2);
}
REGARD_INLINE void fetch_rows(const Matrix& x, int64_t row, int64_t rows) {
  const int64_t size = int64_t(storage_bytes(x.dtype));
  if (x.data && x.column_stride == 1) fetch_rows(row_of(x, row), x.row_stride * size, rows, x.columns * size);
}

// Prefetches in small portions between the products of a head: one burst would delay them.
struct Prefetcher {
  static constexpr int64_t most_bytes = 256 << 10;  // more would drive out what is in use
  Matrix parts[8];
  int count = 0;
  int64_t turn = 0, turns = 0, bytes = 0;

  void reset(int64_t wanted_turns) { count = 0, turn = 0, turns = wanted_turns, bytes = 0; }
  void add(const Matrix& x) {
    parts[count++] = x;
    bytes += x.rows * x.columns * int64_t(storage_bytes(x.dtype));
  }
  REGARD_INLINE void prefetch_next() {
    if (turn >= turns || bytes > most_bytes) return;
    for (int n = 0; n < count; ++n) {
      const int64_t from = parts[n].rows * turn / turns;
      fetch_rows(parts[n], from, parts[n].rows * (turn + 1) / turns - from);
    }
    ++turn;
  }
};

// Whether a row, times a scale, holds NaN or an infinity.
template <class T> __attribute__((noinline)) bool row_is_bad(const void* row, int64_t columns, int64_t stride,
                                                             int32_t dtype, T scale = 1) {
  IntVec<T> non_finite{};
  with_key_storage<T>(dtype, [&](auto stored) {
    using S = typename decltype(stored)::type;
    for (int64_t c = 0; c < columns; c += lanes<T>)
      non_finite |= not_finite<T>(load_some((const S*)row + c * stride, stride, columns - c) * scale);
  });
  return any_lane(non_finite);
}
template <class T> bool row_is_bad(const Matrix& x, int64_t row) {
  return row_is_bad<T>(row_of(x, row), x.columns, x.column_stride, x.dtype, T(x.scale_of(row)));
}

// Gathers whether a NaN or an infinity passed by, for one multiply-add a vector: only these times zero are not zero. Vectors
// that take turns do not wait for one another.
template <class T> struct NonFiniteCheck {
  Vec<T> sum[4]{};
  REGARD_INLINE Vec<T> operator()(Vec<T> x, int turn = 0) {
    sum[turn % 4] += x * T(0);
    return x;
  }
  REGARD_INLINE bool bad() const { return any_lane((sum[0] + sum[1]) + (sum[2] + sum[3]) != Vec<T>{}); }
};

// Whether one of rows [row, row + NR), of whole panels of T, holds NaN or an infinity.
template <class T> __attribute__((noinline)) bool panel_is_bad(const Matrix& x, int64_t row) {
  NonFiniteCheck<T> watch;
  for (const int64_t end = least(row + NR<T>, x.rows); row < end; ++row) {
    const T* from = (const T*)row_of(x, row);
    for (int64_t c = 0; c < x.columns; c += NR<T>) watch(load(from + c), 0), watch(load(from + c + lanes<T>), 1);
  }
  return watch.bad();
}

// Whether whole vectors of unit stride can be loaded, or only parts of them; a null row is zero.
template <bool B> struct Flag {
  static constexpr bool value = B;
};
template <bool whole, class S> REGARD_INLINE Vec<Computed<S>> load_row(const S* row, int64_t c, int64_t stride,
                                                                       int64_t width) {
  if constexpr (whole) return load_as(row + c);
  else return row ? load_some(row + c * stride, stride, width) : Vec<Computed<S>>{};
}

// Rows [row, row + NR) side by side: out[column][NR]. Returns whether any of them holds NaN or an infinity.
template <class T> __attribute__((noinline)) bool pack_transposed(const Matrix& x, int64_t row, T factor, T* out) {
  constexpr int L = lanes<T>;
  NonFiniteCheck<T> watch;
  with_key_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    constexpr bool scaled = sizeof(S) == 1;
    const auto squares = [&](auto whole, int64_t from, int64_t to) __attribute__((always_inline)) {
      for (int half = 0; half < NR<T>; half += L) {
        if (!decltype(whole)::value && row + half >= x.rows) {
          for (int64_t c = from; c < to; ++c) store(out + c * NR<T> + half, Vec<T>{});
          continue;
        }
        const S* rows[L];
        T scale[L];
        REGARD_UNROLL
        for (int i = 0; i < L; ++i) {
          rows[i] = row + half + i < x.rows ? at<S>(x, row + half + i, 0) : nullptr;
          if constexpr (scaled) scale[i] = rows[i] ? x.scale_of(row + half + i) : T(0);
        }
        for (int64_t c = from; c < to; c += L) {
          const int64_t width = to - c;
          Vec<T> v[L];
          REGARD_UNROLL
          for (int i = 0; i < L; ++i) {
            Vec<T> numbers = load_row<decltype(whole)::value>(rows[i], c, x.column_stride, width);
            if constexpr (scaled) numbers *= scale[i];
            v[i] = watch(numbers, i) * factor;
          }
          transpose<T>(v);
          REGARD_UNROLL
          for (int i = 0; i < L; ++i)
            if (decltype(whole)::value || i < width) store(out + (c + i) * NR<T> + half, v[i]);
        }
      }
    };
    const bool simple = x.column_stride == 1 && row + NR<T> <= x.rows;
    const int64_t whole = simple ? x.columns / L * L : 0;
    if (whole) squares(Flag<true>{}, 0, whole);
    if (whole < x.columns) squares(Flag<false>{}, whole, x.columns);
  });
  return watch.bad();
}

// Rows [row, row + count) into panels that lie `panel` numbers apart: out[column / NR][row][NR], with the rows past the
// end of the tensor and the columns up to the next multiple of NR zero. Returns whether NaN or an infinity was met.
template <class T>
__attribute__((noinline)) bool pack_panels(const Matrix& x, int64_t row, int64_t count, T* out, int64_t panel) {
  constexpr int L = lanes<T>;
  NonFiniteCheck<T> watch;
  with_key_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    const int64_t whole = x.column_stride == 1 ? x.columns / NR<T> * NR<T> : 0;
    for (int64_t r = 0; r < count; ++r) {
      const S* from = row + r < x.rows ? at<S>(x, row + r, 0) : nullptr;
      const T scale = sizeof(S) == 1 && from ? T(x.scale_of(row + r)) : T(1);
      const auto scaled = [&](Vec<T> numbers) __attribute__((always_inline)) {
        if constexpr (sizeof(S) == 1) return numbers * scale;
        else return numbers;
      };
      T* to = out + r * NR<T>;
      int64_t c = 0;
      if (from)
        for (; c < whole; c += NR<T>, to += panel) {
          store(to, watch(scaled(load_as(from + c)), 0));
          store(to + L, watch(scaled(load_as(from + c + L)), 1));
        }
      for (; c < x.columns; c += NR<T>, to += panel) {
        const int64_t left = x.columns - c, right = left - L;
        store(to, watch(scaled(load_row<false>(from, c, x.column_stride, left))));
        store(to + L, watch(scaled(load_row<false>(right > 0 ? from : nullptr, c + L, x.column_stride, right))));
      }
    }
  });
  return watch.bad();
}

// Rows that may lie anywhere (heads of one group follow one another): null stands for a row of zeros.
struct RowPointers {
  const void* row[MR];
  int64_t columns, column_stride;
  int32_t dtype;
};

// How many numbers a strip takes: whole vectors are stored, so a little more than columns * MR.
template <class T> int64_t strip_size(int64_t columns) {
  return round_up(columns * MR + round_up(MR, lanes<T>) - MR, 64 / int64_t(sizeof(T)));
}

// At least the sum of the squares of each of `count` rows, and not much more; infinity where one holds NaN or an infinity.
template <class T> __attribute__((noinline)) T squares_bound(const RowPointers& x, int count) {
  constexpr int L = lanes<T>;
  Vec<T> all{}, most{};
  with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    const int64_t whole = x.column_stride == 1 ? x.columns / L * L : 0;
    for (int r = 0; r < count; ++r) {
      const S* row = (const S*)x.row[r];
      Vec<T> sum{};
      const auto add = [&](Vec<T> x) __attribute__((always_inline)) { sum += x * x; };
      for (int64_t c = 0; c < whole; c += L) add(load_row<true>(row, c, 1, L));
      for (int64_t c = whole; c < x.columns; c += L) add(load_row<false>(row, c, x.column_stride, x.columns - c));
      all += sum;
      most = max(most, sum);
    }
  });
  return any_lane(!(all < T(infinity))) ? T(infinity) : reduce_add<T>(most);
}

// MR rows side by side: out[column][MR]. Returns whether NaN or an infinity was met.
template <class T> __attribute__((noinline)) bool pack_strip(const RowPointers& x, T* out) {
  constexpr int L = lanes<T>, blocks = (MR + L - 1) / L;
  NonFiniteCheck<T> watch;
  with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    const auto squares = [&](auto whole, int64_t from, int64_t to) __attribute__((always_inline)) {
      for (int64_t c = from; c < to; c += L) {
        const int64_t width = to - c;
        Vec<T> v[blocks][L];
        REGARD_UNROLL
        for (int r = 0; r < blocks * L; ++r) {
          v[r / L][r % L] = Vec<T>{};
          if (r < MR)
            v[r / L][r % L] = watch(load_row<decltype(whole)::value>((const S*)x.row[r], c, x.column_stride, width), r);
        }
        REGARD_UNROLL
        for (int k = 0; k < blocks; ++k) transpose<T>(v[k]);
        // A store of a whole vector runs into the next column, which is stored later.
        REGARD_UNROLL
        for (int i = 0; i < L; ++i)
          if (decltype(whole)::value || i < width)
            for (int k = 0; k < blocks; ++k) store(out + (c + i) * MR + k * L, v[k][i]);
      }
    };
    bool simple = x.column_stride == 1;
    for (int r = 0; r < MR; ++r) simple &= x.row[r] != nullptr;
    const int64_t whole = simple ? x.columns / L * L : 0;
    if (whole) squares(Flag<true>{}, 0, whole);
    if (whole < x.columns) squares(Flag<false>{}, whole, x.columns);
  });
  return watch.bad();
}

// numbers[c] * factor, one for each column, to the address of a row.
template <class T, class S> REGARD_INLINE void put_row(S* row, int64_t columns, int64_t stride, const T* numbers,
                                                       T factor) {
  int64_t c = 0;
  if (stride == 1)
    for (; c + lanes<T> <= columns; c += lanes<T>) store_as(row + c, load(numbers + c) * factor);
  for (; c < columns; c += lanes<T>) store_some(row + c * stride, stride, columns - c, load(numbers + c) * factor);
}

// Rows of numbers that lie `pitch` apart to rows [row, row + count); row r is multiplied by factor[r * step].
template <class T>
__attribute__((noinline)) void unpack_rows(const Matrix& x, int64_t row, int64_t count, const T* numbers, int64_t pitch,
                                           const T* factor, int64_t step) {
  with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    S* const to = (S*)row_of(x, row);
    for (int64_t r = 0; r < count; ++r)
      put_row(to + r * x.row_stride, x.columns, x.column_stride, numbers + r * pitch, factor[r * step]);
  });
}
template <class T> void unpack_row(const Matrix& x, int64_t row, const T* numbers, T factor) {
  unpack_rows<T>(x, row, 1, numbers, 0, &factor, 0);
}

// The rows of head `head` of batch `b` of a tensor.
inline Matrix matrix_of(const regard_tensor& t, int32_t dtype, int64_t b, int64_t head, int64_t rows, int64_t columns) {
  const int64_t first = (b * t.stride[0] + head * t.stride[1]) * int64_t(storage_bytes(dtype));
  return {t.data ? (const char*)t.data + first : nullptr, t.stride[2], t.stride[3], rows, columns, dtype};
}
inline Matrix scaled_matrix_of(const regard_tensor& t, const regard_tensor& scale, int32_t dtype, int64_t b,
                               int64_t head, int64_t rows, int64_t columns) {
  Matrix x = matrix_of(t, dtype, b, head, rows, columns);
  if (scale.data) x.scale = (const float*)scale.data + b * scale.stride[0] + head * scale.stride[1];
  x.scale_stride = scale.stride[2];
  return x;
}
// Keys and values of a key/value head.
inline Matrix keys_of(const regard_dot& p, int64_t b, int64_t g) {
  return scaled_matrix_of(p.k, p.k_scale, p.kv_dtype, b, g, p.K, p.D);
}
inline Matrix values_of(const regard_dot& p, int64_t b, int64_t g) {
  return scaled_matrix_of(p.v, p.v_scale, p.kv_dtype, b, g, p.K, p.E);
}

}  // namespace regard::REGARD_ISA
