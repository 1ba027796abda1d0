// The table of functions that every instruction set provides.
#pragma once
#include "regard.h"

namespace regard {

struct Kernels {
  const char* name;
  int (*dot_forward)(const regard_dot&, const regard_dot_result&);
  int (*dot_backward)(const regard_dot&, const regard_dot_gradient&);
  int (*dot_statistics)(const regard_dot&, const regard_dot_statistics&);
  int (*linear_forward)(const regard_linear&, const regard_linear_result&);
  int (*linear_backward)(const regard_linear&, const regard_linear_gradient&);
};

}  // namespace regard
