// The register micro-kernel: a few rows times packed panels, everything else is a loop around it.
//
// A panel is NR = two vectors of columns, stored row after row: panel[k][NR]. A block of M <= MR rows of C times one
// panel is held in registers: 6 x 16 for AVX2 (12 accumulators, two vectors of B, one broadcast of A), 12 x 32 for
// AVX-512. Alone it runs at the peak of the multiply-add units.
#pragma once
#include "simd.h"

namespace regard::REGARD_ISA {

template <class T> constexpr int NR = 2 * lanes<T>;
constexpr int MR = vector_registers == 32 ? 12 : 6;

// What becomes of the numbers that are in C already.
enum class Into { overwrite, add, rescale };

// C[r][0..NR) = (0 | C | alpha[r] * C) + sum over k of A(r, k) * B[k][0..NR),   A(r, k) = a[r * ARow + k * AStep]. The rows
// of B lie b_row numbers apart: NR in a packed panel.
// The accumulators always start at zero and meet C at the end: seeding them with C costs digits in long sums.
template <class T, int M, int ARow, int AStep, Into into>
REGARD_INLINE void micro_kernel(int64_t depth, const T* __restrict a, const T* __restrict b, T* __restrict c,
                                int64_t c_row, const T* __restrict alpha, int64_t b_row = NR<T>) {
  using V = Vec<T>;
  constexpr int L = lanes<T>;
  V left[M], right[M];
  REGARD_UNROLL
  for (int r = 0; r < M; ++r) left[r] = right[r] = V{};

  _Pragma("GCC unroll 4")
  for (int64_t k = 0; k < depth; ++k, a += AStep, b += b_row) {
    const V b0 = load(b), b1 = load(b + L);
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) {
      const V x = broadcast(a[r * ARow]);
      left[r] += x * b0;
      right[r] += x * b1;
    }
  }

  REGARD_UNROLL
  for (int r = 0; r < M; ++r, c += c_row) {
    if constexpr (into == Into::add) {
      left[r] += load(c);
      right[r] += load(c + L);
    } else if constexpr (into == Into::rescale) {
      const V x = broadcast(alpha[r]);
      left[r] += x * load(c);
      right[r] += x * load(c + L);
    }
    store(c, left[r]);
    store(c + L, right[r]);
  }
}

// Calls f with the constant that equals m, 1 <= m <= MR.
template <int M> struct Rows { static constexpr int value = M; };
template <class F, int M = MR> REGARD_INLINE void with_rows(int m, F&& f) {
  if constexpr (M == 1) {
    f(Rows<1>{});
  } else {
    if (m == M) f(Rows<M>{});
    else with_rows<F, M - 1>(m, static_cast<F&&>(f));
  }
}

// M rows times `panels` panels that lie `b_panel` numbers apart; C is a row-major block.
template <class T, int M, int ARow, int AStep, Into into>
__attribute__((noinline)) void multiply_rows(int64_t panels, int64_t depth, const T* a, const T* b, int64_t b_panel, T* c,
                                             int64_t c_row, const T* alpha, int64_t b_row) {
  for (int64_t p = 0; p < panels; ++p) {
    // All registers belong to the inner loop: keep the compiler from carrying the broadcasts of alpha around it.
    if constexpr (into == Into::rescale) asm("" : "+r"(alpha));
    micro_kernel<T, M, ARow, AStep, into>(depth, a, b + p * b_panel, c + p * NR<T>, c_row, alpha, b_row);
  }
}

// The same with the number of rows known only at run time.
template <class T, int ARow, int AStep, Into into>
REGARD_INLINE void multiply(int rows, int64_t panels, int64_t depth, const T* a, const T* b, int64_t b_panel, T* c,
                            int64_t c_row, const T* alpha = nullptr, int64_t b_row = NR<T>) {
  with_rows(rows, [&](auto m) __attribute__((always_inline)) {
    multiply_rows<T, decltype(m)::value, ARow, AStep, into>(panels, depth, a, b, b_panel, c, c_row, alpha, b_row);
  });
}

}  // namespace regard::REGARD_ISA
