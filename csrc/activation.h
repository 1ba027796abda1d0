// The activations of feed-forward layers, with the limits of torch's functions at NaN and infinities.
#pragma once
#include "regard.h"
#include "simd.h"

namespace regard::REGARD_ISA {

// erf to within 3e-7: a quotient of polynomials on [-4, 4], that of Eigen (generic_fast_erf_float in
// MathFunctionsImpl.h), and exactly 1 or -1 beyond.
REGARD_INLINE VecF erf(VecF x) {
  const VecF limit = broadcast(4.0f), one = broadcast(1.0f);
  const VecF c = max(-limit, min(limit, x)), z = c * c;
  VecF p = broadcast(-2.72614225801306e-10f);
  p = p * z + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  VecF q = broadcast(-1.45660718464996e-05f);
  q = q * z - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  return select(x > 4.0f, one, select(x < -4.0f, -one, c * (p / q)));
}

// x / (1 + e^(-slope x)); far below zero it is -0, and NaN for -infinity.
REGARD_INLINE VecF times_sigmoid(VecF x, float slope) {
  const VecF y = x * -slope;
  return select(y > 87.0f, x * 0.0f, x / (1.0f + exp(max(broadcast(-87.0f), min(broadcast(87.0f), y)))));
}

REGARD_INLINE VecF activate(int32_t activation, VecF x) {
  switch (activation) {
    case REGARD_RELU:
      return select(x <= 0.0f, VecF{}, x);
    case REGARD_GELU:
      return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
    case REGARD_GELU_TANH:
      return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case REGARD_QUICK_GELU:
      return times_sigmoid(x, 1.702f);
    case REGARD_SILU:
      return times_sigmoid(x, 1.0f);
    case REGARD_TANH:
      return tanh(x);
    default:
      return x;
  }
}

// f(x) of every number of a row, in place; times the same number of `factor` if there is one.
inline __attribute__((noinline)) void activate_row(int32_t activation, float* x, const float* factor, int64_t n) {
  constexpr int L = lanes<float>;
  for (int64_t i = 0; i < n; i += L) {
    VecF y = activate(activation, load_some(x + i, 1, n - i));
    if (factor) y *= load_some(factor + i, 1, n - i);
    store_some(x + i, 1, n - i, y);
  }
}

}  // namespace regard::REGARD_ISA
