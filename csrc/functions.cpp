// The elementary functions of simd.h and additive.h over arrays: what tests/test_functions.py and tools/functions.py compare
// with exact results. Built with -DREGARD_FUNCTIONS=ON only.
#include "additive.h"

namespace regard::REGARD_ISA {
namespace {

template <class T, class F> REGARD_INLINE void over(const T* in, T* out, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += lanes<T>) store_some(out + i, 1, n - i, f(load_some(in + i, 1, n - i)));
}

}  // namespace
}  // namespace regard::REGARD_ISA

#define REGARD_JOINED(name, isa) name##_##isa
#define REGARD_NAME(name, isa) REGARD_JOINED(name, isa)
#define REGARD_FUNCTION(type, name, suffix, expression)                                                                \
  extern "C" REGARD_EXPORT void REGARD_NAME(name##_##suffix, REGARD_ISA)(const type* in, type* out, int64_t n) {       \
    using namespace regard::REGARD_ISA;                                                                                \
    over<type>(in, out, n, [](Vec<type> x) __attribute__((always_inline)) { return regard::REGARD_ISA::expression; }); \
  }
#define REGARD_BOTH(name, expression)           \
  REGARD_FUNCTION(float, name, f32, expression) \
  REGARD_FUNCTION(double, name, f64, expression)

REGARD_BOTH(exp2, exp2(x))
REGARD_BOTH(exp, exp(x))
REGARD_BOTH(log2, log2(x))
REGARD_BOTH(reciprocal, reciprocal(x))
REGARD_BOTH(tanh, tanh(x))
REGARD_BOTH(small_tanh, small_tanh(x))
REGARD_BOTH(precise_tanh, precise_tanh(x))

// Halves are given and returned as their bits.
#define REGARD_HALF(type)                                                                                            \
  extern "C" REGARD_EXPORT void REGARD_NAME(widen_##type, REGARD_ISA)(const uint16_t* in, float* out, int64_t n) {   \
    using namespace regard::REGARD_ISA;                                                                              \
    for (int64_t i = 0; i < n; i += lanes<float>)                                                                    \
      store_some(out + i, 1, n - i, load_some((const type*)in + i, 1, n - i));                                       \
  }                                                                                                                  \
  extern "C" REGARD_EXPORT void REGARD_NAME(narrow_##type, REGARD_ISA)(const float* in, uint16_t* out, int64_t n) {  \
    using namespace regard::REGARD_ISA;                                                                              \
    for (int64_t i = 0; i < n; i += lanes<float>) store_some((type*)out + i, 1, n - i, load_some(in + i, 1, n - i)); \
  }

REGARD_HALF(bfloat16)
REGARD_HALF(float16)
