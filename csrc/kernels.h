// The table of functions that every instruction set provides.
#pragma once
#include "regard.h"

// F(result, name, parameters) for every kernel.
// clang-format off
#define REGARD_KERNELS(F)                                                                      \
  F(int, dot_forward, (const regard_dot&, const regard_dot_result&))                           \
  F(int, dot_backward, (const regard_dot&, const regard_dot_gradient&))                        \
  F(int, dot_jvp, (const regard_dot&, const regard_dot_tangent&, const regard_dot_result&))    \
  F(int, dot_statistics, (const regard_dot&, const regard_dot_statistics&))                    \
  F(int, dot_weights, (const regard_dot&, const regard_dot_columns&))                          \
  F(int, dot_map, (const regard_dot&, const regard_dot_pool&))                                 \
  F(int, linear_forward, (const regard_linear&, const regard_linear_result&))                  \
  F(int, linear_backward, (const regard_linear&, const regard_linear_gradient&))               \
  F(int, recurrence_forward, (const regard_recurrence&, const regard_recurrence_result&))      \
  F(int, recurrence_backward, (const regard_recurrence&, const regard_recurrence_gradient&))   \
  F(int64_t, packed_bytes, (int64_t N, int64_t K, int32_t format))                             \
  F(int, packed_linear, (const regard_packed_linear&))                                         \
  F(int, run_stack, (const regard_stack&))
// clang-format on
#define REGARD_DECLARE_KERNEL(result, name, parameters) result name parameters;

namespace regard {

struct Kernels {
  const char* name;
#define REGARD_POINTER(result, name, parameters) result(*name) parameters;
  REGARD_KERNELS(REGARD_POINTER)
#undef REGARD_POINTER
};

// An instruction set that extends another one, REGARD_EXTENDS, compiles only the kernels that gain from it.
#ifdef REGARD_EXTENDS
namespace REGARD_EXTENDS {
REGARD_KERNELS(REGARD_DECLARE_KERNEL)
}
#endif

}  // namespace regard
