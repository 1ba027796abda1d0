// The forms of pack.h for pairs of bfloat16 numbers. No factor is multiplied in: the products would be rounded.
#pragma once
#include "pack.h"
#include "softmax.h"

#if defined(REGARD_PAIR_PRODUCTS)

namespace regard::REGARD_ISA {

using Half = SimdOf<float>::Half;
using Word = SimdOf<float>::Word;

// Up to `n` numbers of a row; the others, and those of a null row, are zero.
template <class Bits> REGARD_INLINE Bits load_halves(const bfloat16* row, int64_t stride, int64_t n) {
  constexpr int64_t count = sizeof(Bits) / 2;
  Bits bits{};
  if (row && stride == 1 && n >= count) {
    __builtin_memcpy(&bits, row, sizeof(bits));
  } else if (row) {
    alignas(vector_bytes) uint16_t numbers[count] = {};
    for (int64_t i = 0; i < least(n, count); ++i) numbers[i] = row[i * stride].bits;
    __builtin_memcpy(&bits, numbers, sizeof(bits));
  }
  return bits;
}

// Gathers whether a NaN or an infinity passed by: only their exponent carries into the sign.
struct NonFinitePairs {
  Word carries{};
  REGARD_INLINE Word operator()(Word x) {
    carries |= ((x & 0x7f80) + 0x80) | ((x & 0x7f800000) + 0x800000);
    return x;
  }
  REGARD_INLINE bool bad() const { return any_lane(carries & 0x80008000); }
};

// Squares of lanes x lanes words, from `words(i, column)` of line i, transposed: out[column / 2][width] + i.
template <class F> REGARD_INLINE void transpose_words(int64_t columns, int lines, Pair* out, int width, F&& words) {
  constexpr int L = lanes<Pair>;
  for (int64_t c = 0; c < columns; c += 2 * L) {
    VecF v[L];
    REGARD_UNROLL
    for (int i = 0; i < L; ++i) v[i] = i < lines ? bits_as<VecF>(words(i, c)) : VecF{};
    transpose<float>(v);
    for (int64_t i = 0; i < least<int64_t>(L, row_operands<Pair>(columns - c)); ++i)
      *(SimdOf<Pair>::Unaligned*)(out + (c / 2 + i) * width) = bits_as<Vec<Pair>>(v[i]);
  }
}

// Rows [row, row + NR) side by side: out[column / 2][NR]. Returns whether any of them holds NaN or an infinity.
inline __attribute__((noinline)) bool pack_transposed(const Matrix& x, int64_t row, float, Pair* out) {
  constexpr int L = lanes<Pair>;
  NonFinitePairs watch;
  for (int half = 0; half < NR<float>; half += L)
    transpose_words(x.columns, L, out + half, NR<float>, [&](int i, int64_t c) __attribute__((always_inline)) {
      const bfloat16* from = row + half + i < x.rows ? at<bfloat16>(x, row + half + i, c) : nullptr;
      return watch(load_halves<Word>(from, x.column_stride, x.columns - c));
    });
  return watch.bad();
}

// Rows [row, row + count) into panels that lie `panel` operands apart: out[column / NR][row / 2][NR], with the rows past the
// end of the tensor, a second row of the last pair and the columns up to the next multiple of NR zero.
inline __attribute__((noinline)) bool pack_panels(const Matrix& x, int64_t row, int64_t count, Pair* out,
                                                  int64_t panel) {
  constexpr int L = lanes<Pair>;
  NonFinitePairs watch;
  for (int64_t r = 0; r < count; r += 2) {
    const bfloat16* first = row + r < x.rows ? at<bfloat16>(x, row + r, 0) : nullptr;
    const bfloat16* second = r + 1 < count && row + r + 1 < x.rows ? at<bfloat16>(x, row + r + 1, 0) : nullptr;
    Pair* to = out + r / 2 * NR<float>;
    for (int64_t c = 0; c < round_up(x.columns, NR<float>); c += L) {
      const int64_t step = c * x.column_stride, left = x.columns - c;
      const Half a = load_halves<Half>(first && left > 0 ? first + step : nullptr, x.column_stride, left);
      const Half b = load_halves<Half>(second && left > 0 ? second + step : nullptr, x.column_stride, left);
      const Word both = __builtin_convertvector(a, Word) | __builtin_convertvector(b, Word) << 16;
      *(SimdOf<Pair>::Unaligned*)(to + c / NR<float> * panel + c % NR<float>) = watch(both);
    }
  }
  return watch.bad();
}

#if defined(__AMX_BF16__)
// Rows [row, row + count) side by side: out[column][row / 2], lines of which lie `pitch` pairs apart, in whole strips of MR rows
// and whole vectors of columns. What lies outside is zero.
inline __attribute__((noinline)) void pack_columns(const Matrix& x, int64_t row, int64_t count, Pair* out,
                                                   int64_t pitch) {
  constexpr int L = lanes<Pair>;
  static_assert(MR == 2 * L);
  for (int64_t c = 0; c < x.columns; c += L) {
    VecF v[L];
    const auto numbers = [&](int64_t r) __attribute__((always_inline)) {
      const bfloat16* from = r < count && row + r < x.rows ? at<bfloat16>(x, row + r, c) : nullptr;
      return __builtin_convertvector(load_halves<Half>(from, x.column_stride, x.columns - c), Word);
    };
    REGARD_UNROLL
    for (int i = 0; i < L; ++i) v[i] = bits_as<VecF>(numbers(2 * i) | numbers(2 * i + 1) << 16);
    transpose<float>(v);
    REGARD_UNROLL
    for (int i = 0; i < L; ++i) store((float*)(out + (c + i) * pitch), v[i]);
  }
}

// Columns of numbers that lie `pitch` apart to rows [row, row + count), times a factor.
inline __attribute__((noinline)) void unpack_columns(const Matrix& x, int64_t row, int64_t count, const float* numbers,
                                                     int64_t pitch, float factor) {
  constexpr int L = lanes<float>;
  for (int64_t r = 0; r < count; r += L)
    for (int64_t c = 0; c < x.columns; c += L) {
      VecF v[L];
      REGARD_UNROLL
      for (int i = 0; i < L; ++i) v[i] = load(numbers + (c + i) * pitch + r);
      transpose<float>(v);
      Matrix part = x;
      part.data = at<bfloat16>(x, 0, c);
      part.columns = least<int64_t>(L, x.columns - c);
      unpack_rows<float>(part, row + r, least<int64_t>(L, count - r), (const float*)v, L, &factor, 0);
    }
}

// MR rows of whole tiles, one after another. Returns whether NaN or an infinity was met.
inline __attribute__((noinline)) bool pack_strip(const RowPointers& x, Pair* out) {
  NonFinitePairs watch;
  for (int r = 0; r < MR; ++r)
    for (int64_t c = 0; c < x.columns; c += 2 * lanes<Pair>, out += lanes<Pair>) {
      const bfloat16* row = (const bfloat16*)x.row[r];
      const Word words = load_halves<Word>(row ? row + c * x.column_stride : nullptr, x.column_stride, x.columns - c);
      *(SimdOf<Pair>::Unaligned*)out = watch(words);
    }
  return watch.bad();
}
#else
// MR rows side by side: out[column / 2][MR]. Returns whether NaN or an infinity was met.
inline __attribute__((noinline)) bool pack_strip(const RowPointers& x, Pair* out) {
  constexpr int L = lanes<Pair>;
  static_assert(MR <= L || MR % L == 0);
  NonFinitePairs watch;
  // Where MR < L a store of a whole vector runs into the next column, which is stored later.
  for (int first = 0; first < MR; first += L)
    transpose_words(x.columns, least(MR, L), out + first, MR, [&](int r, int64_t c) __attribute__((always_inline)) {
      const bfloat16* row = (const bfloat16*)x.row[first + r];
      return watch(load_halves<Word>(row ? row + c * x.column_stride : nullptr, x.column_stride, x.columns - c));
    });
  return watch.bad();
}

#endif

// In place: columns [lo, hi) of a row of weights become pairs of neighbours, `x[c / 2]`. Both are multiples of a panel.
REGARD_INLINE void round_to_pairs(float* x, int64_t lo, int64_t hi) {
  for (int64_t c = lo; c < hi; c += 2 * lanes<float>) {
    const Vec<Pair> both = to_pairs(load(x + c), load(x + c + lanes<float>));
    *(SimdOf<Pair>::Unaligned*)(x + c / 2) = both;
  }
}

#if defined(__AMX_BF16__)
// How a softmax reads scores that are still to be multiplied by a scale: weights take their place as numbers, or as pairs.
struct Scaled : InPlace<float> {
  float scale;
  explicit Scaled(float scale) : scale(scale) {}
  REGARD_INLINE VecF logits(const float* x) const { return load(x) * scale; }
};
struct ToPairs : Scaled {
  using Scaled::Scaled;
  REGARD_INLINE void put(float* row, int64_t c, VecF a, VecF b) const {
    *(SimdOf<Pair>::Unaligned*)(row + c / 2) = to_pairs(a, b);
  }
};
#endif

}  // namespace regard::REGARD_ISA

#endif
