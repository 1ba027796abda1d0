#pragma once
#include "regard.h"
#include "simd.h"

namespace regard::REGARD_ISA {

int64_t packed_size(int64_t N, int64_t K);
void pack_weight(const float* weight, int64_t row_stride, int64_t N, int64_t K, float* packed);
int product(const regard_product& p);

}  // namespace regard::REGARD_ISA
