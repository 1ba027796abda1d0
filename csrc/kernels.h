// The table of functions that every instruction set provides.
#pragma once
#include "regard.h"

namespace regard {

struct Kernels {
  const char* name;
  int (*dot_forward)(const regard_dot&, const regard_dot_result&);
  int (*dot_backward)(const regard_dot&, const regard_dot_gradient&);
  int (*dot_jvp)(const regard_dot&, const regard_dot_tangent&, const regard_dot_result&);
  int (*dot_statistics)(const regard_dot&, const regard_dot_statistics&);
  int (*dot_weights)(const regard_dot&, const regard_dot_columns&);
  int (*dot_map)(const regard_dot&, const regard_dot_pool&);
  int (*linear_forward)(const regard_linear&, const regard_linear_result&);
  int (*linear_backward)(const regard_linear&, const regard_linear_gradient&);
  int64_t (*packed_size)(int64_t N, int64_t K);
  int (*packed_linear)(const regard_packed_linear&);
};

}  // namespace regard
