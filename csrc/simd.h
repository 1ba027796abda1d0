// Vectors of the compiler (GCC, Clang), one source for every instruction set.
//
// This header and everything that includes it is compiled once per instruction set, each time inside a namespace of
// its own (REGARD_ISA: baseline, avx2, avx512, neon). Nothing here may come from the C++ standard library: an inline
// function of it, compiled for AVX-512 and merged by the linker, would then run on machines without AVX-512.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef REGARD_ISA
#define REGARD_ISA baseline
#endif

#define REGARD_INLINE inline __attribute__((always_inline))
#define REGARD_UNROLL _Pragma("GCC unroll 16")

namespace regard::REGARD_ISA {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
constexpr int vector_registers = 32;
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
constexpr int vector_registers = 16;
#elif defined(__ARM_NEON)
constexpr int vector_bytes = 16;
constexpr int vector_registers = 32;
#else
constexpr int vector_bytes = 16;
constexpr int vector_registers = 16;
#endif

// What is stored in memory. Arithmetic is done in float, or in double for double.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class T> struct SimdOf;
template <> struct SimdOf<float> {
  static constexpr int lanes = vector_bytes / 4;
  typedef float Vector __attribute__((vector_size(vector_bytes)));
  typedef int32_t Integer __attribute__((vector_size(vector_bytes)));
  typedef uint32_t Word __attribute__((vector_size(vector_bytes)));  // one 32-bit word per lane
  typedef int32_t SignedWord __attribute__((vector_size(vector_bytes)));
  typedef uint16_t Half __attribute__((vector_size(vector_bytes / 2)));  // one 16-bit half per lane
  typedef float Unaligned __attribute__((vector_size(vector_bytes), aligned(4), may_alias));
};
template <> struct SimdOf<double> {
  static constexpr int lanes = vector_bytes / 8;
  typedef double Vector __attribute__((vector_size(vector_bytes)));
  typedef int64_t Integer __attribute__((vector_size(vector_bytes)));
  typedef uint32_t Word __attribute__((vector_size(vector_bytes / 2)));
  typedef int32_t SignedWord __attribute__((vector_size(vector_bytes / 2)));
  typedef double Unaligned __attribute__((vector_size(vector_bytes), aligned(8), may_alias));
};
template <class T> using Vec = typename SimdOf<T>::Vector;
template <class T> using IntVec = typename SimdOf<T>::Integer;
template <class T> using WordVec = typename SimdOf<T>::Word;
template <class T> constexpr int lanes = SimdOf<T>::lanes;

using VecF = Vec<float>;
using VecD = Vec<double>;

constexpr float infinity = __builtin_inff();
constexpr double log2_e = 1.4426950408889634074;
constexpr double ln_2 = 0.69314718055994530942;

template <class A> REGARD_INLINE A least(A a, A b) { return b < a ? b : a; }
template <class A> REGARD_INLINE A greatest(A a, A b) { return a < b ? b : a; }
REGARD_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// x - 0 is x for every x (also -0 and NaN), so the compiler reduces this to one broadcast.
template <class T> REGARD_INLINE Vec<T> broadcast(T x) { return x - Vec<T>{}; }

template <class T> REGARD_INLINE Vec<T> load(const T* p) { return *(const typename SimdOf<T>::Unaligned*)p; }
template <class T> REGARD_INLINE void store(T* p, Vec<T> x) { *(typename SimdOf<T>::Unaligned*)p = x; }

template <class To, class From> REGARD_INLINE To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

template <class V, class M> REGARD_INLINE V select(M mask, V yes, V no) { return mask ? yes : no; }

// If either is NaN the result is b, as the x86 instruction has it: max(limit, x) lets a NaN in x through.
template <class V> REGARD_INLINE V max(V a, V b) { return a > b ? a : b; }
template <class V> REGARD_INLINE V min(V a, V b) { return a < b ? a : b; }
#if defined(__AVX512F__)
REGARD_INLINE VecF max(VecF a, VecF b) { return _mm512_max_ps(a, b); }
REGARD_INLINE VecD max(VecD a, VecD b) { return _mm512_max_pd(a, b); }
REGARD_INLINE VecF min(VecF a, VecF b) { return _mm512_min_ps(a, b); }
REGARD_INLINE VecD min(VecD a, VecD b) { return _mm512_min_pd(a, b); }
#elif defined(__AVX__)
REGARD_INLINE VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
REGARD_INLINE VecD max(VecD a, VecD b) { return _mm256_max_pd(a, b); }
REGARD_INLINE VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }
REGARD_INLINE VecD min(VecD a, VecD b) { return _mm256_min_pd(a, b); }
#elif defined(__SSE2__)
REGARD_INLINE VecF max(VecF a, VecF b) { return _mm_max_ps(a, b); }
REGARD_INLINE VecD max(VecD a, VecD b) { return _mm_max_pd(a, b); }
REGARD_INLINE VecF min(VecF a, VecF b) { return _mm_min_ps(a, b); }
REGARD_INLINE VecD min(VecD a, VecD b) { return _mm_min_pd(a, b); }
#endif

REGARD_INLINE VecF absolute(VecF x) { return bits_as<VecF>(bits_as<IntVec<float>>(x) & 0x7fffffff); }
REGARD_INLINE VecD absolute(VecD x) { return bits_as<VecD>(bits_as<IntVec<double>>(x) & 0x7fffffffffffffff); }

// 0, 1, 2, ... in every lane.
template <class I> REGARD_INLINE I lane_numbers() {
  I x{};
  REGARD_UNROLL
  for (int i = 0; i < int(sizeof(I) / sizeof(x[0])); ++i) x[i] = i;
  return x;
}

namespace detail {
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
  using type = Indices<I...>;
};

template <int Step, class V, int... I> REGARD_INLINE V swap_lanes(V x, Indices<I...>) {
  return __builtin_shufflevector(x, x, (I ^ Step)...);
}
template <int Step, class V, int... I> REGARD_INLINE V even_blocks(V a, V b, Indices<I...>) {
  return __builtin_shufflevector(a, b, ((I & Step) ? int(sizeof...(I)) + I - Step : I)...);
}
template <int Step, class V, int... I> REGARD_INLINE V odd_blocks(V a, V b, Indices<I...>) {
  return __builtin_shufflevector(a, b, ((I & Step) ? int(sizeof...(I)) + I : I + Step)...);
}
template <class T> using LaneIndices = typename Count<lanes<T>>::type;

template <class T, int Step> REGARD_INLINE void transpose_stage(Vec<T>* rows) {
  if constexpr (Step > 0) {
    REGARD_UNROLL
    for (int i = 0; i < lanes<T>; ++i) {
      if (i & Step) continue;
      const Vec<T> a = rows[i], b = rows[i + Step];
      rows[i] = even_blocks<Step>(a, b, LaneIndices<T>{});
      rows[i + Step] = odd_blocks<Step>(a, b, LaneIndices<T>{});
    }
    transpose_stage<T, Step / 2>(rows);
  }
}
// A transposition that only keeps the combination of all rows.
template <class T, int Step, class F> REGARD_INLINE Vec<T> reduce_stage(Vec<T>* rows, F combine) {
  if constexpr (Step == 0) {
    return rows[0];
  } else {
    REGARD_UNROLL
    for (int i = 0; i < Step; ++i)
      rows[i] = combine(even_blocks<Step>(rows[i], rows[i + Step], LaneIndices<T>{}),
                        odd_blocks<Step>(rows[i], rows[i + Step], LaneIndices<T>{}));
    return reduce_stage<T, Step / 2>(rows, combine);
  }
}
template <class T, int Step, class F> REGARD_INLINE Vec<T> butterfly(Vec<T> x, F combine) {
  if constexpr (Step > 0) return butterfly<T, Step / 2>(combine(x, swap_lanes<Step>(x, LaneIndices<T>{})), combine);
  else return x;
}
}  // namespace detail

// A square of lanes x lanes numbers, rows in `rows`, is transposed in place.
template <class T> REGARD_INLINE void transpose(Vec<T>* rows) { detail::transpose_stage<T, lanes<T> / 2>(rows); }

// The lanes of each of `lanes` vectors combined, as one vector; the vectors are spoiled.
template <class T> REGARD_INLINE Vec<T> max_of_each(Vec<T>* x) {
  return detail::reduce_stage<T, lanes<T> / 2>(x, [](Vec<T> a, Vec<T> b) { return max(a, b); });
}
template <class T> REGARD_INLINE Vec<T> sum_of_each(Vec<T>* x) {
  return detail::reduce_stage<T, lanes<T> / 2>(x, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <class T> REGARD_INLINE T reduce_add(Vec<T> x) {
  return detail::butterfly<T, lanes<T> / 2>(x, [](Vec<T> a, Vec<T> b) { return a + b; })[0];
}
template <class T> REGARD_INLINE T reduce_max(Vec<T> x) {
  return detail::butterfly<T, lanes<T> / 2>(x, [](Vec<T> a, Vec<T> b) { return max(a, b); })[0];
}
template <class I> REGARD_INLINE bool any_lane(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bits_as<__m512i>(mask), bits_as<__m512i>(mask)) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256(bits_as<__m256i>(mask), bits_as<__m256i>(mask));
#elif defined(__SSE2__)
  return _mm_movemask_epi8(bits_as<__m128i>(mask)) != 0;
#else
  typedef long long Wide __attribute__((vector_size(vector_bytes)));
  const Wide wide = bits_as<Wide>(mask);
  long long all = 0;
  REGARD_UNROLL
  for (int i = 0; i < vector_bytes / 8; ++i) all |= wide[i];
  return all != 0;
#endif
}

// Bit i is set where lane i of the mask of a comparison is.
template <class I> REGARD_INLINE uint32_t lane_bits(I mask) {
  [[maybe_unused]] constexpr bool wide = sizeof(mask[0]) == 8;
#if defined(__AVX512F__)
  if constexpr (wide) return _mm512_test_epi64_mask(bits_as<__m512i>(mask), bits_as<__m512i>(mask));
  else return _mm512_test_epi32_mask(bits_as<__m512i>(mask), bits_as<__m512i>(mask));
#elif defined(__AVX__)
  if constexpr (wide) return uint32_t(_mm256_movemask_pd(bits_as<__m256d>(mask)));
  else return uint32_t(_mm256_movemask_ps(bits_as<__m256>(mask)));
#elif defined(__SSE2__)
  if constexpr (wide) return uint32_t(_mm_movemask_pd(bits_as<__m128d>(mask)));
  else return uint32_t(_mm_movemask_ps(bits_as<__m128>(mask)));
#else
  uint32_t bits = 0;
  REGARD_UNROLL
  for (int i = 0; i < int(sizeof(I) / sizeof(mask[0])); ++i) bits |= uint32_t(mask[i] != 0) << i;
  return bits;
#endif
}

REGARD_INLINE VecF widen(bfloat16, SimdOf<float>::Half h) {
  return bits_as<VecF>(__builtin_convertvector(h, SimdOf<float>::Word) << 16);
}
REGARD_INLINE SimdOf<float>::Half narrow(bfloat16, VecF x) {
  using Word = SimdOf<float>::Word;
  const Word u = bits_as<Word>(x);
  const Word rounded = (u + (((u >> 16) & 1) + 0x7fff)) >> 16;
  const Word quiet = (u >> 16) | 0x40;  // rounding could carry a NaN into infinity
  return __builtin_convertvector(select((u & 0x7fffffff) > 0x7f800000, quiet, rounded), SimdOf<float>::Half);
}

#if defined(__AVX512F__)
REGARD_INLINE VecF widen(float16, SimdOf<float>::Half h) { return _mm512_cvtph_ps(bits_as<__m256i>(h)); }
REGARD_INLINE SimdOf<float>::Half narrow(float16, VecF x) {
  return bits_as<SimdOf<float>::Half>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
REGARD_INLINE VecF widen(float16, SimdOf<float>::Half h) { return _mm256_cvtph_ps(bits_as<__m128i>(h)); }
REGARD_INLINE SimdOf<float>::Half narrow(float16, VecF x) {
  return bits_as<SimdOf<float>::Half>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
// Exponents are rebased by a multiplication with 2^112, which is exact and also normalises subnormal halves.
REGARD_INLINE VecF widen(float16, SimdOf<float>::Half h) {
  using Word = SimdOf<float>::Word;
  const Word u = __builtin_convertvector(h, Word);
  const Word magnitude = u & 0x7fff, sign = (u & 0x8000) << 16;
  const Word finite = bits_as<Word>(bits_as<VecF>(magnitude << 13) * 0x1p112f);
  const Word special = (magnitude << 13) | 0x7f800000;
  return bits_as<VecF>(select(magnitude >= 0x7c00, special, finite) | sign);
}
REGARD_INLINE SimdOf<float>::Half narrow(float16, VecF x) {
  using Word = SimdOf<float>::Word;
  const Word u = bits_as<Word>(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  // Below 2^-14 the half is subnormal: adding 0.5 lets the adder do the rounding to multiples of 2^-24.
  const Word small = bits_as<Word>(bits_as<VecF>(magnitude) + 0.5f) - 0x3f000000;
  const Word normal = (magnitude + (((magnitude >> 13) & 1) + (0xc8000fffu))) >> 13;
  Word half = select(magnitude < 0x38800000, small, normal & 0xffff);
  half = select(magnitude >= 0x477ff000, Word{} + 0x7c00, half);
  half = select(magnitude > 0x7f800000, Word{} + 0x7e00, half);
  return __builtin_convertvector(half | sign, SimdOf<float>::Half);
}
#endif

template <class S> struct ComputedAs {
  using type = float;
};
template <> struct ComputedAs<double> {
  using type = double;
};
template <class S> using Computed = typename ComputedAs<S>::type;

REGARD_INLINE VecF load_as(const float* p) { return load(p); }
REGARD_INLINE VecD load_as(const double* p) { return load(p); }
template <class S> REGARD_INLINE VecF load_as(const S* p) {
  typename SimdOf<float>::Half h;
  __builtin_memcpy(&h, p, sizeof(h));
  return widen(S{}, h);
}
REGARD_INLINE void store_as(float* p, VecF x) { store(p, x); }
REGARD_INLINE void store_as(double* p, VecD x) { store(p, x); }
template <class S> REGARD_INLINE void store_as(S* p, VecF x) {
  const auto h = narrow(S{}, x);
  __builtin_memcpy((void*)p, &h, sizeof(h));
}

REGARD_INLINE float get(const float* p) { return *p; }
REGARD_INLINE double get(const double* p) { return *p; }
template <class S> REGARD_INLINE float get(const S* p) {
  typename SimdOf<float>::Half h{};
  h[0] = p->bits;
  return widen(S{}, h)[0];
}
REGARD_INLINE void put(float* p, float x) { *p = x; }
REGARD_INLINE void put(double* p, double x) { *p = x; }
template <class S> REGARD_INLINE void put(S* p, float x) { p->bits = narrow(S{}, broadcast(x))[0]; }

// The first n lanes of a row, n < lanes, and zeros; and only these stored. What lies past the end is not touched.
template <class S> REGARD_INLINE Vec<Computed<S>> load_first(const S* p, int64_t stride, int64_t n) {
  using T = Computed<S>;
  alignas(vector_bytes) T x[lanes<T>] = {};
  for (int64_t i = 0; i < least<int64_t>(n, lanes<T>); ++i) x[i] = get(p + i * stride);
  return load(x);
}
template <class S> REGARD_INLINE void store_first(S* p, int64_t stride, int64_t n, Vec<Computed<S>> x) {
  using T = Computed<S>;
  for (int64_t i = 0; i < least<int64_t>(n, lanes<T>); ++i) put(p + i * stride, T(x[i]));
}
// With masks where the CPU has them: a loop over lanes is slow. Sanitizers do not check masked accesses.
#if defined(__AVX512F__) && !defined(REGARD_SANITIZE)
REGARD_INLINE uint32_t first_lanes(int64_t n) { return (uint32_t(1) << greatest<int64_t>(0, n)) - 1; }
REGARD_INLINE VecF load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(__mmask16(first_lanes(n)), p); }
REGARD_INLINE VecD load_first(const double* p, int64_t n) { return _mm512_maskz_loadu_pd(__mmask8(first_lanes(n)), p); }
REGARD_INLINE void store_first(float* p, int64_t n, VecF x) { _mm512_mask_storeu_ps(p, __mmask16(first_lanes(n)), x); }
REGARD_INLINE void store_first(double* p, int64_t n, VecD x) { _mm512_mask_storeu_pd(p, __mmask8(first_lanes(n)), x); }
template <class S> REGARD_INLINE VecF load_first_halves(const S* p, int64_t n) {
  return widen(S{}, bits_as<SimdOf<float>::Half>(_mm256_maskz_loadu_epi16(__mmask16(first_lanes(n)), p)));
}
template <class S> REGARD_INLINE void store_first_halves(S* p, int64_t n, VecF x) {
  _mm256_mask_storeu_epi16(p, __mmask16(first_lanes(n)), bits_as<__m256i>(narrow(S{}, x)));
}
REGARD_INLINE VecF load_first(const bfloat16* p, int64_t n) { return load_first_halves(p, n); }
REGARD_INLINE VecF load_first(const float16* p, int64_t n) { return load_first_halves(p, n); }
REGARD_INLINE void store_first(bfloat16* p, int64_t n, VecF x) { store_first_halves(p, n, x); }
REGARD_INLINE void store_first(float16* p, int64_t n, VecF x) { store_first_halves(p, n, x); }
#elif defined(__AVX2__) && !defined(REGARD_SANITIZE)
REGARD_INLINE __m256i first_lanes(int64_t n) {
  return bits_as<__m256i>(lane_numbers<IntVec<float>>() < int32_t(least<int64_t>(n, lanes<float>)));
}
REGARD_INLINE __m256i first_wide_lanes(int64_t n) { return bits_as<__m256i>(lane_numbers<IntVec<double>>() < n); }
REGARD_INLINE VecF load_first(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
REGARD_INLINE VecD load_first(const double* p, int64_t n) { return _mm256_maskload_pd(p, first_wide_lanes(n)); }
REGARD_INLINE void store_first(float* p, int64_t n, VecF x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
REGARD_INLINE void store_first(double* p, int64_t n, VecD x) { _mm256_maskstore_pd(p, first_wide_lanes(n), x); }
template <class S> REGARD_INLINE Vec<Computed<S>> load_first(const S* p, int64_t n) { return load_first(p, 1, n); }
template <class S> REGARD_INLINE void store_first(S* p, int64_t n, Vec<Computed<S>> x) { store_first(p, 1, n, x); }
#else
template <class S> REGARD_INLINE Vec<Computed<S>> load_first(const S* p, int64_t n) { return load_first(p, 1, n); }
template <class S> REGARD_INLINE void store_first(S* p, int64_t n, Vec<Computed<S>> x) { store_first(p, 1, n, x); }
#endif

// The first n lanes of a row with any element stride; the others are zero.
template <class S> REGARD_INLINE Vec<Computed<S>> load_some(const S* p, int64_t stride, int64_t n) {
  if (stride != 1) return load_first(p, stride, n);
  return n >= lanes<Computed<S>> ? load_as(p) : load_first(p, n);
}
template <class S> REGARD_INLINE void store_some(S* p, int64_t stride, int64_t n, Vec<Computed<S>> x) {
  if (stride != 1) store_first(p, stride, n, x);
  else if (n >= lanes<Computed<S>>) store_as(p, x);
  else store_first(p, n, x);
}

// All ones in the lanes that hold NaN or an infinity.
template <class T> REGARD_INLINE IntVec<T> not_finite(Vec<T> x) { return (x - x) != Vec<T>{}; }

// Adding 1.5 * 2^23 (2^52) to a number leaves its nearest integer in the low bits of the sum.
template <class T> constexpr T rounder = sizeof(T) == 8 ? T(6755399441055744.0) : T(12582912.0);
template <class T> constexpr T least_exponent = sizeof(T) == 8 ? T(-1023) : T(-127);

// 2^(x - zero) for an integer `zero` and x from least_exponent to 127 (1023) above it, given rounder - zero: the difference
// itself is never formed. Relative error 1.9e-7 (2e-16), of which the polynomial has 9.2e-8 (2.8e-17). At the least exponent it
// is exactly 0, because the polynomial is exactly 1 at 0. NaN stays NaN. The coefficients are the minimax ones with p(0) = 1
// on [-1/2, 1/2] for the relative error: tools/polynomials.py computes them.
REGARD_INLINE VecF exp2_within(VecF x, VecF round) {
  const VecF shifted = x + round, f = x - (shifted - round);
  VecF p = broadcast(0.0013264714114021637717f);
  p = p * f + 0.0096715135419328830442f;
  p = p * f + 0.055507337867617040903f;
  p = p * f + 0.24022242065701926527f;
  p = p * f + 0.69314697756884821262f;
  p = p * f + 1.0f;
  return bits_as<VecF>(bits_as<SimdOf<float>::Word>(p) + (bits_as<SimdOf<float>::Word>(shifted) << 23));
}
REGARD_INLINE VecD exp2_within(VecD x, VecD round) {
  typedef uint64_t Word64 __attribute__((vector_size(vector_bytes)));
  const VecD shifted = x + round, f = x - (shifted - round);
  VecD p = broadcast(4.4347624440325122047e-10);
  p = p * f + 7.0737840401526117308e-9;
  p = p * f + 1.0178199636678781967e-7;
  p = p * f + 1.3215435277174218009e-6;
  p = p * f + 0.000015252733492952328623;
  p = p * f + 0.00015403530457123817071;
  p = p * f + 0.0013333558146774831645;
  p = p * f + 0.0096181291075941091561;
  p = p * f + 0.055504108664820082162;
  p = p * f + 0.24022650695910131294;
  p = p * f + 0.69314718055994532582;
  p = p * f + 1.0;
  return bits_as<VecD>(bits_as<Word64>(p) + (bits_as<Word64>(shifted) << 52));
}
// The same for any x up to there, given zero + least_exponent: below it is 0, so that a masked logit of -infinity weighs
// nothing.
template <class V> REGARD_INLINE V exp2_above(V x, V least, V round) { return exp2_within(max(least, x), round); }
REGARD_INLINE VecF exp2(VecF x) { return exp2_above(x, broadcast(least_exponent<float>), broadcast(rounder<float>)); }
REGARD_INLINE VecD exp2(VecD x) { return exp2_above(x, broadcast(least_exponent<double>), broadcast(rounder<double>)); }

// e^y for |y| up to 87 (709), to within about one rounding. The argument is reduced in two steps, since rounding
// y * log2(e) to one number would cost as many digits as the exponent has. In float ln(2) is split as in Cephes' expf, and
// the coefficients are Taylor's, 1/n!; in double ln(2) is split as in fdlibm.
REGARD_INLINE VecF exp(VecF y) {
  const VecF shifted = y * float(log2_e) + rounder<float>, n = shifted - rounder<float>;
  const VecF f = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  VecF p = broadcast(float(1.0 / 5040));
  p = p * f + float(1.0 / 720);
  p = p * f + float(1.0 / 120);
  p = p * f + float(1.0 / 24);
  p = p * f + float(1.0 / 6);
  p = p * f + 0.5f;
  p = (p * (f * f) + f) + 1.0f;
  return bits_as<VecF>(bits_as<SimdOf<float>::Word>(p) + (bits_as<SimdOf<float>::Word>(shifted) << 23));
}
REGARD_INLINE VecD exp(VecD y) {
  typedef uint64_t Word64 __attribute__((vector_size(vector_bytes)));
  const VecD shifted = y * log2_e + rounder<double>, n = shifted - rounder<double>;
  const VecD f = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  const auto power = bits_as<Word64>(exp2(f * log2_e));
  return bits_as<VecD>(power + (bits_as<Word64>(shifted) << 52));
}

// log2(x) for normal x > 0: the exponent, and the mantissa m in [sqrt(1/2), sqrt(2)) by the series of artanh((m-1)/(m+1)),
// whose coefficients are 2 log2(e) / n for odd n.
REGARD_INLINE VecF log2(VecF x) {
  using I = IntVec<float>;
  const I bits = bits_as<I>(x), exponent = (bits - 0x3f3504f3) >> 23;
  const VecF m = bits_as<VecF>(bits - (exponent << 23));
  const VecF s = (m - 1.0f) / (m + 1.0f), z = s * s;
  VecF p = broadcast(0.32059890f);
  p = p * z + 0.41219859f;
  p = p * z + 0.57707802f;
  p = p * z + 0.96179670f;
  p = p * z + 2.88539008f;
  return p * s + __builtin_convertvector(exponent, VecF);
}
REGARD_INLINE VecD log2(VecD x) {
  using I = IntVec<double>;
  const I bits = bits_as<I>(x), exponent = (bits - 0x3fe6a09e667f3bcdLL) >> 52;
  const VecD m = bits_as<VecD>(bits - (exponent << 52));
  const VecD s = (m - 1.0) / (m + 1.0), z = s * s;
  VecD p = broadcast(0.0);
  REGARD_UNROLL
  for (int n = 25; n >= 1; n -= 2) p = p * z + 2.0 * log2_e / n;
  return p * s + __builtin_convertvector(exponent, VecD);
}

// log2 of every lane, as doubles: a log-sum-exp near 10 that was rounded twice on its way
// would cost a digit of every weight that the backward computes from it.
REGARD_INLINE void log2_exactly(VecF x, double* out) {
  typedef float Part __attribute__((vector_size(vector_bytes / 2)));
  REGARD_UNROLL
  for (int half = 0; half < 2; ++half) {
    Part part;
    __builtin_memcpy(&part, (const Part*)&x + half, sizeof(part));
    store(out + half * lanes<double>, log2(__builtin_convertvector(part, VecD)));
  }
}
REGARD_INLINE void log2_exactly(VecD x, double* out) { store(out, log2(x)); }

// 1/x to within 3 units in the last place, for normal x whose reciprocal is normal: an estimate and a step of Newton.
REGARD_INLINE VecF reciprocal(VecF x) {
#if defined(__AVX512F__)
  const VecF r = _mm512_rcp14_ps(x);
  return r * (2.0f - x * r);
#elif defined(__AVX__)
  const VecF r = _mm256_rcp_ps(x);
  return r * (2.0f - x * r);
#else
  return 1.0f / x;
#endif
}
REGARD_INLINE VecD reciprocal(VecD x) { return 1.0 / x; }

// tanh to a few roundings, relative also near zero (where 1 - 2/(1+e^2x) would lose digits). In float a quotient of odd
// and even polynomials, and exactly 1 where no other number is as close: gradients are multiplied by 1 - tanh^2, and where
// all is saturated nothing must be left of them. The float quotient is that of Eigen (generic_fast_tanh_float in
// MathFunctionsImpl.h), the double one below 0.625 that of Cephes (tanh.c).
REGARD_INLINE VecF tanh(VecF x) {
  const VecF limit = broadcast(7.90531110763549805f), one = broadcast(1.0f);
  const VecF c = max(-limit, min(limit, x)), z = c * c;
  VecF p = broadcast(-2.76076847742355e-16f);
  p = p * z + 2.00018790482477e-13f;
  p = p * z - 8.60467152213735e-11f;
  p = p * z + 5.12229709037114e-08f;
  p = p * z + 1.48572235717979e-05f;
  p = p * z + 6.37261928875436e-04f;
  p = p * z + 4.89352455891786e-03f;
  VecF q = broadcast(1.19825839466702e-06f);
  q = q * z + 1.18534705686654e-04f;
  q = q * z + 2.26843463243900e-03f;
  q = q * z + 4.89352518554385e-03f;
  const VecF y = c * (p / q);
  return select(x > 9.0109f, one, select(x < -9.0109f, -one, y));
}
REGARD_INLINE VecD tanh(VecD x) {
  const VecD a = absolute(x), z = x * x;
  const VecD p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
  const VecD q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
  const VecD near = x + x * z * (p / q);
  const VecD far = 1.0 - 2.0 / (exp2(min(broadcast(60.0), a * (2 * log2_e))) + 1.0);
  const VecD y = select(a < 0.625, near, select(x < 0.0, -far, far));
  return select(x != x, x, y);
}

// One key per (batch, head, query); `row` counts them: (b * H + h) * Q + i.
REGARD_INLINE uint32_t dropout_row_key(uint64_t seed, uint64_t row) {
  uint64_t x = seed + 0x9E3779B97F4A7C15u * (row + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return uint32_t(x ^ (x >> 31));
}

// All ones in the lanes of keys j, j+1, ... that are kept: those whose hash is at least the threshold.
template <class T> REGARD_INLINE IntVec<T> dropout_keeps(uint32_t row_key, uint32_t j, uint32_t threshold) {
  using W = WordVec<T>;
  W y = lane_numbers<W>() * 0x9E3779B9u + (row_key + j * 0x9E3779B9u);
  y ^= y >> 16;
  y *= 0x21F0AAADu;
  y ^= y >> 15;
  y *= 0x735A2D97u;
  y ^= y >> 15;
  using Signed = typename SimdOf<T>::SignedWord;
  // Vector units compare signed numbers: flip the top bit on both sides.
  const Signed kept = (Signed)(y ^ 0x80000000u) >= int32_t(threshold ^ 0x80000000u);
  return __builtin_convertvector(kept, IntVec<T>);
}

}  // namespace regard::REGARD_ISA
