#pragma once
#include "kernels.h"
#include "simd.h"

namespace regard::REGARD_ISA {

REGARD_KERNELS(REGARD_DECLARE_KERNEL)
bool decode_is_better(const regard_dot& p, const regard_dot_result& result);
int dot_decode(const regard_dot& p, const regard_dot_result& result);

}  // namespace regard::REGARD_ISA
