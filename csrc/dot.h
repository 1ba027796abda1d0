#pragma once
#include "regard.h"
#include "simd.h"

namespace regard::REGARD_ISA {

int dot_forward(const regard_dot& p, const regard_dot_result& result);
bool decode_is_better(const regard_dot& p, const regard_dot_result& result);
int dot_decode(const regard_dot& p, const regard_dot_result& result);
int dot_statistics(const regard_dot& p, const regard_dot_statistics& result);
int dot_weights(const regard_dot& p, const regard_dot_columns& result);
int dot_map(const regard_dot& p, const regard_dot_pool& result);
int dot_jvp(const regard_dot& p, const regard_dot_tangent& tangent, const regard_dot_result& result);
int dot_backward(const regard_dot& p, const regard_dot_gradient& gradient);
int linear_forward(const regard_linear& x, const regard_linear_result& result);
int linear_backward(const regard_linear& x, const regard_linear_gradient& gradient);

}  // namespace regard::REGARD_ISA
