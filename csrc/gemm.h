// The register micro-kernel: a few rows times packed panels. Everything else is a loop around it.
//
// A panel is NR = two vectors of columns, stored row after row: panel[k][NR]. A block of M <= MR rows of C times one
// panel is held in registers: 6 x 16 for AVX2 (12 accumulators, two vectors of B, one broadcast of A), 12 x 32 for
// AVX-512. On its own, it runs at the peak of the multiply-add units.
#pragma once
#include "amx.h"

namespace regard::REGARD_ISA {

template <class T> constexpr int NR = 2 * lanes<T>;
#if defined(__AMX_BF16__)
constexpr int MR = strip_rows;
#else
constexpr int MR = vector_registers == 32 ? 12 : 6;
#endif

// What happens to the numbers that C already holds.
enum class Into { overwrite, scale, add, rescale };
template <Into into> struct Use {
  static constexpr Into value = into;
};

// The result of a row of the block: C[r][...] = (0 | C | alpha[r] * C) + sum, or alpha[0] * sum; W vectors of it.
template <class T, int W, Into into>
REGARD_INLINE void meet(T* __restrict c, Vec<T>* sum, const T* __restrict alpha, int r) {
  REGARD_UNROLL
  for (int w = 0; w < W; ++w) {
    if constexpr (into == Into::scale) sum[w] *= alpha[0];
    if constexpr (into == Into::add) sum[w] += load(c + w * lanes<T>);
    if constexpr (into == Into::rescale) sum[w] += broadcast(alpha[r]) * load(c + w * lanes<T>);
    store(c + w * lanes<T>, sum[w]);
  }
}

constexpr int any_row = -1;  // an ARow that is known only at run time

// C[r][...] = (0 | C | alpha[r] * C) + sum over k of A(r, k) * B[k][...], W vectors of columns, A(r, k) = a[r * ARow + k *
// AStep], k counting operands. The rows of B lie b_row numbers apart: NR in a packed panel; those of A a_row, where ARow is any_row.
// The accumulators meet C at the end: seeding them with C costs digits in long sums. They begin as products, not as zeros,
// and are stored one by one after their last step: a block of zeroing and one of stores cost as much as four steps.
template <class T, int M, int W, int ARow, int AStep, Into into, class A>
REGARD_INLINE void micro_kernel(int64_t depth, const A* __restrict a, const A* __restrict b, T* __restrict c,
                                int64_t c_row, const T* __restrict alpha, int64_t b_row = NR<T>, int64_t a_row = 0) {
  constexpr int L = lanes<T>;
  if constexpr (ARow != any_row) a_row = ARow;
  Vec<T> sum[M][W];
  Vec<A> right[W];
  const auto load_right = [&]() __attribute__((always_inline)) {
    REGARD_UNROLL
    for (int w = 0; w < W; ++w) right[w] = load(b + w * L);
  };
  if (depth < 2) {
    if (depth == 1) load_right();
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) {
      REGARD_UNROLL
      for (int w = 0; w < W; ++w)
        sum[r][w] = depth == 1 ? product(broadcast_operand(a + r * a_row), right[w]) : Vec<T>{};
      meet<T, W, into>(c + r * c_row, sum[r], alpha, r);
    }
    return;
  }
  load_right();
  REGARD_UNROLL
  for (int r = 0; r < M; ++r) {
    const Vec<A> x = broadcast_operand(a + r * a_row);
    REGARD_UNROLL
    for (int w = 0; w < W; ++w) sum[r][w] = product(x, right[w]);
  }
  a += AStep, b += b_row;
  _Pragma("GCC unroll 4") for (int64_t k = 2; k < depth; ++k, a += AStep, b += b_row) {
    load_right();
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) {
      const Vec<A> x = broadcast_operand(a + r * a_row);
      REGARD_UNROLL
      for (int w = 0; w < W; ++w) sum[r][w] = add_product(sum[r][w], x, right[w]);
    }
  }
  load_right();
  REGARD_UNROLL
  for (int r = 0; r < M; ++r) {
    const Vec<A> x = broadcast_operand(a + r * a_row);
    REGARD_UNROLL
    for (int w = 0; w < W; ++w) sum[r][w] = add_product(sum[r][w], x, right[w]);
    meet<T, W, into>(c + r * c_row, sum[r], alpha, r);
  }
}

// Calls f with the constant that equals m, 1 <= m <= MR.
template <int M> struct Rows {
  static constexpr int value = M;
};
template <class F, int M = MR> REGARD_INLINE void with_rows(int m, F&& f) {
  if constexpr (M == 1) {
    f(Rows<1>{});
  } else {
    if (m == M) f(Rows<M>{});
    else with_rows<F, M - 1>(m, static_cast<F&&>(f));
  }
}

// M rows times `panels` panels that lie `b_panel` numbers apart; C is a row-major block.
template <class T, int M, int ARow, int AStep, Into into, class A>
__attribute__((noinline)) void multiply_rows(int64_t panels, int64_t depth, const A* a, const A* b, int64_t b_panel,
                                             T* c, int64_t c_row, const T* alpha, int64_t b_row, int64_t a_row) {
  for (int64_t p = 0; p < panels; ++p) {
    // All registers belong to the inner loop: keep the compiler from carrying the broadcasts of alpha around it.
    if constexpr (into == Into::rescale) asm("" : "+r"(alpha));
    micro_kernel<T, M, 2, ARow, AStep, into>(depth, a, b + p * b_panel, c + p * NR<T>, c_row, alpha, b_row, a_row);
  }
}

// The same with the number of rows known only at run time.
template <class T, int ARow, int AStep, Into into, class A>
REGARD_INLINE void multiply(int rows, int64_t panels, int64_t depth, const A* a, const A* b, int64_t b_panel, T* c,
                            int64_t c_row, const T* alpha = nullptr, int64_t b_row = NR<T>, int64_t a_row = 0) {
  with_rows(rows, [&](auto m) __attribute__((always_inline)) {
    multiply_rows<T, decltype(m)::value, ARow, AStep, into>(panels, depth, a, b, b_panel, c, c_row, alpha, b_row,
                                                            a_row);
  });
}

// The columns of C to compute: those of `count` panels, perhaps without the first half of the first or the last half of the last.
struct Panels {
  int64_t count;
  bool late, early;
};

// Those of a matrix with this many columns.
template <class T> REGARD_INLINE Panels panels_of_columns(int64_t columns) {
  const int64_t rest = columns % NR<T>;
  return {(columns + NR<T> - 1) / NR<T>, false, rest > 0 && rest <= lanes<T>};
}

// A half of one panel; the other half of C, which lies `other` numbers from it, becomes zero, so that no NaN of an
// earlier use spreads from it before it is overwritten.
template <class T, int M, int ARow, int AStep, Into into, class A>
__attribute__((noinline)) void multiply_half(int64_t depth, const A* a, const A* b, T* c, int64_t c_row, int64_t other,
                                             const T* alpha, int64_t a_row) {
  micro_kernel<T, M, 1, ARow, AStep, into>(depth, a, b, c, c_row, alpha, NR<T>, a_row);
  for (int r = 0; r < M; ++r) store(c + r * c_row + other, Vec<T>{});
}

// The same for panels of which some halves may be left out; halves are those of packed panels.
template <class T, int ARow, int AStep, Into into = Into::overwrite, class A>
REGARD_INLINE void multiply_wanted(int rows, Panels panels, int64_t depth, const A* a, const A* b, int64_t b_panel,
                                   T* c, int64_t c_row, int64_t a_row = 0, const T* alpha = nullptr,
                                   int64_t b_row = NR<T>) {
  with_rows(rows, [&](auto m) __attribute__((always_inline)) {
    constexpr int M = decltype(m)::value, L = lanes<T>;
    if (panels.late) {
      multiply_half<T, M, ARow, AStep, into>(depth, a, b + L, c + L, c_row, -L, alpha, a_row);
      --panels.count, b += b_panel, c += NR<T>;
    }
    panels.count -= panels.early;
    multiply_rows<T, M, ARow, AStep, into>(panels.count, depth, a, b, b_panel, c, c_row, alpha, b_row, a_row);
    if (panels.early)
      multiply_half<T, M, ARow, AStep, into>(depth, a, b + panels.count * b_panel, c + panels.count * NR<T>, c_row, L,
                                             alpha, a_row);
  });
}

}  // namespace regard::REGARD_ISA
