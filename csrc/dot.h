#pragma once
#include "kernels.h"
#include "gemm.h"

namespace regard::REGARD_ISA {

REGARD_KERNELS(REGARD_DECLARE_KERNEL)
int dot_decode(const regard_dot& p, const regard_dot_result& result);

// Up to this many query rows for each key/value head, packing the keys costs more than reading them in every row; and a
// few more where there would be too few blocks of rows for the threads.
inline bool decode_is_better(const regard_dot& p, const regard_dot_result& result) {
  const int64_t rows = p.H / p.G * p.Q;
  if (p.K == 0 || p.tiles.pointer || result.out_table.data || p.k.stride[3] != 1 || p.v.stride[3] != 1) return false;
  return rows <= 4 || (rows <= 16 && p.B * p.G * ((rows + MR - 1) / MR) < p.threads);
}

// Whether the products of a problem are those of bfloat16 numbers.
inline bool takes_pairs(const regard_dot& p) {
  return p.dtype == REGARD_BFLOAT16 && p.kv_dtype == REGARD_BFLOAT16 && !p.weight.data;
}

}  // namespace regard::REGARD_ISA
