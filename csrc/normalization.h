// Normalisations of single logits: the weight of a key does not depend on other keys.
#pragma once
#include "regard.h"
#include "simd.h"

namespace regard::REGARD_ISA {

// The derivative is by the logit; logits are in base two.
template <class T> struct WeightAndSlope {
  Vec<T> weight, slope;
};

// 1 / (1 + 2^-x), and its derivative by x * ln(2). Beyond `most` the weight is less than any normal number.
template <class T> REGARD_INLINE WeightAndSlope<T> sigmoid(Vec<T> x) {
  constexpr T most = sizeof(T) == 8 ? T(1021) : T(125);
  const Vec<T> power = exp2(-x), weight = reciprocal(power + T(1));
  const auto vanishes = x < -most;
  return {select(vanishes, Vec<T>{}, weight), select(vanishes, Vec<T>{}, power * weight * weight)};
}

// The normalisation of a problem; `bias` is added to every logit, in base two.
template <class T> struct ElementwiseWeights {
  const int32_t kind;
  const T bias;

  explicit ElementwiseWeights(const regard_dot& p) : kind(p.normalization), bias(T(p.normalization_bias * log2_e)) {}

  // Calls use(function), where function(logit) is the weight and its slope. NaN stays NaN.
  template <class F> REGARD_INLINE void with_weights(T marker, F&& use) const {
    const Vec<T> added = broadcast(bias + marker), zero{};
    const T natural = T(ln_2);
    if (kind == REGARD_SIGMOID) {
      use([&](Vec<T> x) __attribute__((always_inline)) { return sigmoid<T>(x + added); });
    } else if (kind == REGARD_RELU_WEIGHTS) {
      use([&](Vec<T> x) __attribute__((always_inline)) {
        x += added;
        return WeightAndSlope<T>{max(zero, x) * natural, select(x <= zero, zero, broadcast(T(1)))};
      });
    } else {
      use([&](Vec<T> x) __attribute__((always_inline)) {
        const Vec<T> y = max(zero, x + added) * natural;
        return WeightAndSlope<T>{y * y, y + y};
      });
    }
  }

  // s[c] = the weight of the logit s[c], for c in [lo, hi).
  __attribute__((noinline)) void weigh(T* s, int64_t lo, int64_t hi) const {
    with_weights(T(0), [&](auto weigh) __attribute__((always_inline)) {
      for (int64_t c = lo; c < hi; c += lanes<T>) store(s + c, weigh(load(s + c)).weight);
    });
  }
};

}  // namespace regard::REGARD_ISA
