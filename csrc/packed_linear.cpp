// x W' + b with a packed weight: the projections around attention, for inference.
//
// W (N, K) lies in panels of NR of its rows, packed[n / NR][k][NR]. A thread has a run of panels, or of rows of x where
// there are many; blocks of rows of x stay in the second-level cache while the panels pass by.
#include "memory.h"
#include "pack.h"
#include "packed_linear.h"
#include "runtime.h"
#include "schedule.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t block_bytes = int64_t(320) << 10;
constexpr int64_t longest_sum = 256;

// M rows times P panels: with few rows, several panels keep the multiply-add units busy. The rows are a packed strip, or
// lie a_row numbers apart.
template <int M, int P, bool strip>
REGARD_INLINE void multiply_panels(int64_t depth, const float* a, int64_t a_row, const float* b, int64_t b_panel,
                                   float* c, int64_t c_row, const float* bias) {
  constexpr int L = lanes<float>, NRf = NR<float>;
  // Sums begin anew every so often, and are added up in memory: long ones lose digits.
  for (int64_t k0 = 0; k0 == 0 || k0 < depth; k0 += longest_sum) {
    Vec<float> sums[P][M][2];
    REGARD_UNROLL
    for (int p = 0; p < P; ++p) {
      REGARD_UNROLL
      for (int r = 0; r < M; ++r) sums[p][r][0] = sums[p][r][1] = Vec<float>{};
    }
    const int64_t end = least(depth - k0, longest_sum);
    _Pragma("GCC unroll 4") for (int64_t k = 0; k < end; ++k, a += strip ? MR : 1, b += NRf) {
      REGARD_UNROLL
      for (int p = 0; p < P; ++p) {
        const Vec<float> left = load(b + p * b_panel), right = load(b + p * b_panel + L);
        REGARD_UNROLL
        for (int r = 0; r < M; ++r) {
          const Vec<float> x = broadcast(a[strip ? r : r * a_row]);
          sums[p][r][0] += x * left;
          sums[p][r][1] += x * right;
        }
      }
    }
    REGARD_UNROLL
    for (int p = 0; p < P; ++p) {
      REGARD_UNROLL
      for (int r = 0; r < M; ++r) {
        float* to = c + r * c_row + p * NRf;
        const float* before = k0 ? to : bias ? bias + p * NRf : nullptr;
        store(to, before ? sums[p][r][0] + load(before) : sums[p][r][0]);
        store(to + L, before ? sums[p][r][1] + load(before + L) : sums[p][r][1]);
      }
    }
  }
}

struct PackedLinear {
  const regard_packed_linear& p;
  const int64_t panels;

  explicit PackedLinear(const regard_packed_linear& p) : p(p), panels((p.N + NR<float> - 1) / NR<float>) {}

  int run() const {
    const bool by_rows = p.M >= 64 * int64_t(p.threads);
    auto body = [&](int thread, int threads) {
      if (!by_rows) return run_part(0, p.M, panels * thread / threads, panels * (thread + 1) / threads);
      const int64_t strips = (p.M + MR - 1) / MR;
      return run_part(strips * thread / threads * MR, least(p.M, strips * (thread + 1) / threads * MR), 0, panels);
    };
    return parallel(int(least<int64_t>(p.threads, by_rows ? p.M : panels)), body);
  }

  int run_part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    if (first >= last || from >= to) return REGARD_OK;
    if (last - first < 3) {
      with_rows(int(last - first), [&](auto m) __attribute__((always_inline)) {
        constexpr int M = decltype(m)::value;
        if constexpr (M < 3) few_rows<M>(first, from, to);
      });
      return REGARD_OK;
    }
    // As equal strips as there can be: 8 rows are 4 and 4, not 6 and 2.
    const int64_t strips = (last - first + MR - 1) / MR, rows = (last - first + strips - 1) / strips;
    const int64_t size = strip_size<float>(p.K);
    const int64_t block = greatest<int64_t>(1, least(strips, block_bytes / (size * int64_t(sizeof(float)))));
    Layout layout;
    layout.add(block, size, sizeof(float));
    if (!layout.ok) return REGARD_TOO_LARGE;
    float* packed = (float*)thread_scratch(layout.bytes);
    if (!packed) return REGARD_NO_MEMORY;
    for (int64_t s0 = 0; s0 < strips; s0 += block) {
      const int64_t s1 = least(strips, s0 + block);
      const auto count = [&](int64_t s) { return int(greatest<int64_t>(0, least(rows, last - first - s * rows))); };
      for (int64_t s = s0; s < s1; ++s) {
        RowPointers x{{}, p.K, 1, REGARD_FLOAT32};
        for (int r = 0; r < count(s); ++r) x.row[r] = p.x + (first + s * rows + r) * p.x_row;
        pack_strip<float>(x, packed + (s - s0) * size);
      }
      for (int64_t panel = from; panel < to; ++panel)
        for (int64_t s = s0; s < s1; ++s) {
          if (!count(s)) continue;
          with_rows(count(s), [&](auto m) __attribute__((always_inline)) {
            put<decltype(m)::value, 1, true>(packed + (s - s0) * size, 1, first + s * rows, panel);
          });
        }
    }
    trim_thread_scratch();
    return REGARD_OK;
  }

  // Rows where they lie; as many panels at a time as there are registers for.
  template <int M> void few_rows(int64_t first, int64_t from, int64_t to) const {
    constexpr int P = M == 1 ? 4 : 3;
    const float* x = p.x + first * p.x_row;
    int64_t panel = from;
    for (; panel + P <= to && (panel + P) * NR<float> <= p.N; panel += P) put<M, P, false>(x, p.x_row, first, panel);
    for (; panel < to; ++panel) put<M, 1, false>(x, p.x_row, first, panel);
  }

  template <int M, int P, bool strip>
  __attribute__((noinline)) void put(const float* a, int64_t a_row, int64_t row, int64_t panel) const {
    const int64_t column = panel * NR<float>, left = p.N - column, stride = NR<float> * p.K;
    const float* b = p.packed + panel * stride;
    float* out = p.out + row * p.out_row + column;
    const float* bias = p.bias ? p.bias + column : nullptr;
    if (left >= P * NR<float>) return multiply_panels<M, P, strip>(p.K, a, a_row, b, stride, out, p.out_row, bias);
    // The last panel is not whole.
    float workspace[MR * NR<float>], end[NR<float>] = {};
    for (int64_t n = 0; bias && n < left; ++n) end[n] = bias[n];
    multiply_panels<M, 1, strip>(p.K, a, a_row, b, stride, workspace, NR<float>, end);
    for (int r = 0; r < M; ++r)
      for (int64_t n = 0; n < left; ++n) out[r * p.out_row + n] = workspace[r * NR<float> + n];
  }
};

}  // namespace

int64_t packed_size(int64_t N, int64_t K) { return round_up(N, NR<float>) * K; }

int packed_linear(const regard_packed_linear& p) { return PackedLinear(p).run(); }

}  // namespace regard::REGARD_ISA
