#pragma once
#include "regard.h"
#include "simd.h"

namespace regard::REGARD_ISA {

int64_t packed_bytes(int64_t N, int64_t K, int32_t format);
int packed_linear(const regard_packed_linear& p);

}  // namespace regard::REGARD_ISA
