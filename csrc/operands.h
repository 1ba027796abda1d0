// What the register kernel multiplies: numbers of the type of its sums, or pairs of bfloat16 numbers.
#pragma once
#include "simd.h"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define REGARD_PAIR_PRODUCTS
#endif

namespace regard::REGARD_ISA {

// Two bfloat16 numbers that follow one another along the axis of a sum: an operand of the CPU's own products, which add both
// to a float sum. The products of the pair are exact, each addition is rounded once (on ARM to odd: off by up to one unit in the
// last place, not half of one), subnormal operands and sums count as zero.
struct Pair {
  uint32_t bits;
};

template <> struct SimdOf<Pair> {
  static constexpr int lanes = vector_bytes / 4;
  typedef uint32_t Vector __attribute__((vector_size(vector_bytes)));
  typedef uint32_t Unaligned __attribute__((vector_size(vector_bytes), aligned(2), may_alias));
};

// What keys and values of a cache may be stored as: eight signed bits, exactly.
struct int8 {
  int8_t bits;
};
REGARD_INLINE VecF load_as(const int8* p) {
  typedef int8_t Bytes __attribute__((vector_size(vector_bytes / 4)));
  Bytes x;
  __builtin_memcpy(&x, p, sizeof(x));
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits_as<__m128i>(x)));
#elif defined(__AVX2__)
  long long low;
  __builtin_memcpy(&low, &x, sizeof(low));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(low)));
#else
  return __builtin_convertvector(__builtin_convertvector(x, IntVec<float>), VecF);
#endif
}
#if defined(__AVX512F__) && !defined(REGARD_SANITIZE)
REGARD_INLINE VecF load_first(const int8* p, int64_t n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(__mmask16(first_lanes(n)), p)));
}
#endif
REGARD_INLINE float get(const int8* p) { return float(p->bits); }

// How many terms of a sum an operand holds, and how many operands `n` terms take.
template <class A> constexpr int terms = 1;
template <> constexpr int terms<Pair> = 2;
template <class A> REGARD_INLINE int64_t operands(int64_t n) { return (n + terms<A> - 1) / terms<A>; }

// Term `n` of an operand becomes zero.
template <class A> REGARD_INLINE void clear_term(A* x, int64_t n) {
  constexpr size_t bytes = sizeof(A) / terms<A>;
  __builtin_memset((char*)x + size_t(n % terms<A>) * bytes, 0, bytes);
}

template <class T> REGARD_INLINE Vec<T> broadcast_operand(const T* x) { return broadcast(*x); }
template <class V> REGARD_INLINE V product(V x, V y) { return x * y; }
template <class V> REGARD_INLINE V add_product(V sum, V x, V y) { return sum + x * y; }

#if defined(REGARD_PAIR_PRODUCTS)
REGARD_INLINE Vec<Pair> broadcast_operand(const Pair* x) {
  uint32_t bits;
  __builtin_memcpy(&bits, x, sizeof(bits));
  return Vec<Pair>{} + bits;
}
// to_pairs: rounded to nearest even, low[0], low[1], ... and then high[0], ...; subnormal numbers may become zero.
#if defined(__AVX512BF16__)
REGARD_INLINE VecF add_product(VecF sum, Vec<Pair> x, Vec<Pair> y) {
  return _mm512_dpbf16_ps(sum, bits_as<__m512bh>(x), bits_as<__m512bh>(y));
}
REGARD_INLINE Vec<Pair> to_pairs(VecF low, VecF high) { return bits_as<Vec<Pair>>(_mm512_cvtne2ps_pbh(high, low)); }
#else
REGARD_INLINE VecF add_product(VecF sum, Vec<Pair> x, Vec<Pair> y) {
  return vbfdotq_f32(sum, bits_as<bfloat16x8_t>(x), bits_as<bfloat16x8_t>(y));
}
REGARD_INLINE Vec<Pair> to_pairs(VecF low, VecF high) {
  return bits_as<Vec<Pair>>(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
#endif
REGARD_INLINE VecF product(Vec<Pair> x, Vec<Pair> y) { return add_product(VecF{}, x, y); }

namespace detail {
template <class V, int... I> REGARD_INLINE V zip_halves(V x, Indices<I...>) {
  return __builtin_shufflevector(x, x, (I / 2 + I % 2 * int(sizeof...(I) / 2))...);
}
}  // namespace detail

// The pairs (first[0], second[0]), (first[1], second[1]), ...
REGARD_INLINE Vec<Pair> zip_pairs(VecF first, VecF second) {
  typedef uint16_t Halves __attribute__((vector_size(vector_bytes)));
  const Halves x = bits_as<Halves>(to_pairs(first, second));
  return bits_as<Vec<Pair>>(detail::zip_halves(x, typename detail::Count<2 * lanes<Pair>>::type{}));
}
#endif

}  // namespace regard::REGARD_ISA
