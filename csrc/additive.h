// The additive score, weight · tanh(q + k), and its gradients on tiles.
//
// tanh(q + k) = 1 - 2r with r = 1 / (1 + e^2q e^2k). Each exponential depends on one vector only: both are computed
// once while packing, which leaves a multiply-add and a reciprocal per element of the tile. Two more steps:
// dividing e^2q and the 1 by the weight gives weight * r at no cost, and two such terms share one reciprocal,
// 1/x + 1/y = (x + y) / (x y). Each has its range, which `AdditiveWeight::mode` checks against the data; out of it, tanh is
// computed directly; and also where all arguments are small, by a polynomial, since 1 - 2r has no more digits than 1.
#pragma once
#include "pack.h"

namespace regard::REGARD_ISA {

enum class AdditiveMode { small, paired, single, direct };

constexpr int64_t additive_part = 16;  // columns in one part of a score's sum

// n / x + c, and 1 / x + c. With a fused multiply-add: an estimate and one Newton step, arranged so that what is rounded
// before the end is only n * estimate; without one the step would lose the digits that it should win.
#if defined(__AVX512F__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#if defined(__AVX512F__)
REGARD_INLINE VecF reciprocal_estimate(VecF x) { return _mm512_rcp14_ps(x); }
#elif defined(__AVX__)
REGARD_INLINE VecF reciprocal_estimate(VecF x) { return _mm256_rcp_ps(x); }
#else
REGARD_INLINE VecF reciprocal_estimate(VecF x) {
  const VecF r = vrecpeq_f32(x);  // 8 bits only: a step more than the others
  return r * (2.0f - x * r);
}
#endif
REGARD_INLINE VecF quotient_plus(VecF n, VecF x, VecF c) {
  const VecF r = reciprocal_estimate(x), e = 1.0f - x * r, t = n * r;
  return t * e + (t + c);
}
REGARD_INLINE VecF reciprocal_plus(VecF x, VecF c) {
  const VecF r = reciprocal_estimate(x), e = 1.0f - x * r;
  return r * e + (r + c);
}
#else
REGARD_INLINE VecF quotient_plus(VecF n, VecF x, VecF c) { return n / x + c; }
REGARD_INLINE VecF reciprocal_plus(VecF x, VecF c) { return 1.0f / x + c; }
#endif
REGARD_INLINE VecD quotient_plus(VecD n, VecD x, VecD c) { return n / x + c; }
REGARD_INLINE VecD reciprocal_plus(VecD x, VecD c) { return 1.0 / x + c; }

// tanh(x) for |x| up to 0.625, relative also near zero: the polynomial of Cephes (tanhf.c).
REGARD_INLINE VecF small_tanh(VecF x) {
  const VecF z = x * x;
  VecF p = broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return (p * z) * x + x;
}

// tanh to one rounding or two. It takes a little longer than tanh in simd.h, which near 1 is off by a few: here D of them
// are summed, and their gradients have the factor 1 - tanh^2.
REGARD_INLINE VecF precise_tanh(VecF x) {
  const VecF a = absolute(x);
  const VecF far = 1.0f - 2.0f * reciprocal(exp2(min(broadcast(30.0f), a * float(2 * log2_e))) + 1.0f);
  const VecF y = select(a < 0.625f, small_tanh(x), select(x < 0.0f, -far, far));
  return select(x != x, x, y);
}
REGARD_INLINE VecD small_tanh(VecD x) { return tanh(x); }
REGARD_INLINE VecD precise_tanh(VecD x) { return tanh(x); }

template <class T> struct AdditiveLimits;
template <> struct AdditiveLimits<float> {
  static constexpr float exponent = 86, smallest_weight = 0x1p-26f;
};
template <> struct AdditiveLimits<double> {
  static constexpr double exponent = 700, smallest_weight = 0x1p-56;
};

// The smallest and the largest of the included numbers and zero, and whether all are finite.
template <class T> struct AdditiveRange {
  T least = 0, greatest = 0;
  bool finite = true;

  void include(const AdditiveRange& other) {
    least = other.least < least ? other.least : least;
    greatest = other.greatest > greatest ? other.greatest : greatest;
    finite = finite && other.finite;
  }
  __attribute__((noinline)) void include(const Matrix& x) {
    Vec<T> low{}, high{};
    NonFiniteCheck<T> watch;
    with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
      using S = typename decltype(stored)::type;
      for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t c = 0; c < x.columns; c += lanes<T>) {
          const Vec<T> v = watch(load_some(at<S>(x, r, c), x.column_stride, x.columns - c));
          low = min(v, low), high = max(v, high);
        }
    });
    include({-reduce_max<T>(-low), reduce_max<T>(high), !watch.bad()});
  }
};

// The weight vector of one head in the forms that tiles read: three rows of `storage`, of D numbers each.
template <class T> struct AdditiveWeight {
  int64_t depth;
  T largest, smallest;  // of |weight|, the smallest relative to the largest
  bool finite;
  T *weight, *inverse, *shift;

  // A weight of zero has no inverse: it is raised to a share of the largest one that rounding cannot see.
  AdditiveWeight(const T* source, int64_t stride, int64_t D, T* storage)
      : depth(D), largest(0), smallest(1), finite(true), weight(storage), inverse(storage + D), shift(storage + 2 * D) {
    for (int64_t d = 0; d < D; ++d) {
      weight[d] = source[d * stride];
      largest = greatest(largest, weight[d] < 0 ? -weight[d] : weight[d]);
      finite = finite && weight[d] - weight[d] == 0;
    }
    for (int64_t d = 0; d < D; ++d) {
      const T share = largest > 0 ? weight[d] / largest : T(0);
      const T size = greatest(share < 0 ? -share : share, AdditiveLimits<T>::smallest_weight);
      inverse[d] = share < 0 ? -1 / size : 1 / size;
      shift[d] = T(-0.5) / inverse[d];
      smallest = least(smallest, size);
    }
  }

  // The same for every head: whether no argument of tanh leaves the polynomial's range.
  static bool small(const AdditiveRange<T>& q, const AdditiveRange<T>& k) {
    return sizeof(T) == 4 && q.finite && k.finite && q.greatest + k.greatest <= T(0.625) &&
           q.least + k.least >= T(-0.625);
  }

  // Every x = (1 + e^2(q+k)) / weight, its reciprocal, and for pairs the product of two of them must be normal numbers.
  AdditiveMode mode(const AdditiveRange<T>& q, const AdditiveRange<T>& k) const {
    constexpr T limit = AdditiveLimits<T>::exponent;
    if (!finite || !q.finite || !k.finite) return AdditiveMode::direct;
    const T spread = T(-ln_2) * log2(broadcast(smallest))[0] + 1;
    const T top = greatest(T(0), 2 * (q.greatest + k.greatest)) + spread;
    const bool factors =
        2 * q.greatest + spread <= limit && 2 * k.greatest <= limit && 2 * q.least >= -limit && 2 * k.least >= -limit;
    if (!factors || top > limit) return AdditiveMode::direct;
    return 2 * top > limit ? AdditiveMode::single : AdditiveMode::paired;
  }
};

// c[r][0..NR) = scale * score of M queries, packed as a strip a[d][MR] of e^2q / weight, and the keys of one panel
// b[d][NR] of e^2k; in direct mode both are packed as they are. The sum over columns is taken in parts: a single long one
// would cost the digits that the terms have.
template <AdditiveMode mode, class T, int M>
REGARD_INLINE void additive_scores(const AdditiveWeight<T>& w, const T* __restrict a, const T* __restrict b,
                                   T* __restrict c, int64_t c_row, T scale) {
  using V = Vec<T>;
  constexpr int L = lanes<T>;
  constexpr bool plain = mode == AdditiveMode::direct || mode == AdditiveMode::small;
  const V factor = broadcast(plain ? scale : -2 * w.largest * scale);
  for (int64_t d = 0; d < w.depth;) {
    const int64_t end = least<int64_t>(w.depth, d + additive_part);
    const bool first = d == 0;
    // The sums are of weight * (r - 1/2) = -weight * tanh / 2 and not of weight * r: small scores keep their digits.
    V sum[M][2];
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) sum[r][0] = sum[r][1] = V{};
    if constexpr (mode == AdditiveMode::paired) {
      for (; d + 2 <= end; d += 2, a += 2 * MR, b += 2 * NR<T>) {
        const V over0 = broadcast(w.inverse[d]), over1 = broadcast(w.inverse[d + 1]);
        const V shift = broadcast(w.shift[d] + w.shift[d + 1]);
        REGARD_UNROLL
        for (int r = 0; r < M; ++r) {
          const V q0 = broadcast(a[r]), q1 = broadcast(a[MR + r]);
          REGARD_UNROLL
          for (int half = 0; half < 2; ++half) {
            const V x = q0 * load(b + half * L) + over0, y = q1 * load(b + NR<T> + half * L) + over1;
            sum[r][half] += quotient_plus(x + y, x * y, shift);
          }
        }
      }
    }
    for (; d < end; ++d, a += MR, b += NR<T>) {
      const V over = broadcast(w.inverse[d]), shift = broadcast(w.shift[d]), weight = broadcast(w.weight[d]);
      REGARD_UNROLL
      for (int r = 0; r < M; ++r) {
        const V q = broadcast(a[r]);
        REGARD_UNROLL
        for (int half = 0; half < 2; ++half) {
          const V k = load(b + half * L);
          if constexpr (mode == AdditiveMode::small) sum[r][half] += weight * small_tanh(q + k);
          else if constexpr (mode == AdditiveMode::direct) sum[r][half] += weight * precise_tanh(q + k);
          else sum[r][half] += reciprocal_plus(q * k + over, shift);
        }
      }
    }
    REGARD_UNROLL
    for (int r = 0; r < M; ++r)
      for (int half = 0; half < 2; ++half) {
        T* to = c + r * c_row + half * L;
        store(to, factor * sum[r][half] + (first ? V{} : load(to)));
      }
  }
}

// Rows in panels [d / NR][row][NR], which lie `panel` numbers apart: queries as e^2q / 2 and keys as e^2k, or in direct
// mode as they are.
template <class T> struct AdditiveRows {
  const T* data;
  int64_t panel;
  REGARD_INLINE const T* at(int64_t d) const { return data + d / NR<T> * panel + d % NR<T>; }
};

// Of M queries and `keys` keys with the gradients ds[r][j] of their scores: adds (1 - tanh^2) ds to dq and dk, which still
// want the factor weight, and -tanh * ds to `moment`, the gradient of -weight. dq and dk have rows of `width` numbers, D in
// whole panels.
template <AdditiveMode mode, class T, int M>
REGARD_INLINE void additive_gradients(int64_t width, int64_t keys, AdditiveRows<T> q, AdditiveRows<T> k,
                                      const T* __restrict ds, int64_t ds_row, T* __restrict dq, T* __restrict dk,
                                      T* __restrict moment) {
  using V = Vec<T>;
  constexpr bool plain = mode == AdditiveMode::direct || mode == AdditiveMode::small;
  const V zero{}, half = broadcast(T(0.5));
  for (int64_t d = 0; d < width; d += lanes<T>) {
    const T* key_row = k.at(d);
    T* key_sums = dk + d;
    V query[M], query_sum[M], moments[2] = {zero, zero};
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) query[r] = load(q.at(d) + r * NR<T>), query_sum[r] = zero;
    for (int64_t j = 0; j < keys; ++j, key_row += NR<T>, key_sums += width) {
      const V key = load(key_row);
      V key_sum = zero;
      REGARD_UNROLL
      for (int r = 0; r < M; ++r) {
        const V given = broadcast(ds[r * ds_row + j]);
        V first, second;
        if constexpr (plain) {
          const V t = mode == AdditiveMode::small ? small_tanh(query[r] + key) : precise_tanh(query[r] + key);
          first = -given * t, second = given + first * t;
        } else {
          // 1 - tanh^2 = 4 e^2x / (1 + e^2x)^2, with all its digits where tanh is near 1
          const V product = query[r] * key, r2 = reciprocal(product + half), share = given * r2;
          first = share - given, second = (product * r2) * (share + share);
        }
        moments[r & 1] += first;
        query_sum[r] += second;
        key_sum += second;
      }
      store(key_sums, load(key_sums) + key_sum);
    }
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) store(dq + r * width + d, load(dq + r * width + d) + query_sum[r]);
    store(moment + d, load(moment + d) + (moments[0] + moments[1]));
  }
}

}  // namespace regard::REGARD_ISA
