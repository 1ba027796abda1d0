// Causal linear attention, forward and backward.
#include "dot.h"
#include "linear_backward.h"

namespace regard::REGARD_ISA {

int linear_forward(const regard_linear& x, const regard_linear_result& result) {
  if (x.dtype == REGARD_FLOAT64) return LinearForward<double>(x, result).run();
  return LinearForward<float>(x, result).run();
}

int linear_backward(const regard_linear& x, const regard_linear_gradient& gradient) {
  if (x.dtype == REGARD_FLOAT64) return LinearBackward<double>(x, gradient).run();
  return LinearBackward<float>(x, gradient).run();
}

}  // namespace regard::REGARD_ISA
