// x W' + b with a packed weight: the projections around attention, for inference.
//
// A thread has a run of panels of the weight, or of rows of x where there are many; blocks of rows of x stay in the
// second-level cache while the panels are read. Weights in other formats are converted to float32 in registers if there is
// one strip of rows, and panel by panel in the cache if there are several. Small integers are multiplied as integers where
// the CPU can: see integer_products.h.
#include "packed_linear.h"

#include "activation.h"
#include "memory.h"

#include "integer_products.h"
#include "pack.h"
#include "packed_weight.h"
#include "runtime.h"
#include "schedule.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t block_bytes = int64_t(320) << 10;
constexpr int64_t longest_sum = 256;

struct Panel {
  const char* data;
  float factor;
  const float* bias;
  const float* residual;
  int64_t residual_row;

  // A sum of row r, half v, with bias and residual.
  REGARD_INLINE VecF added_to(VecF sum, int r, int v) const {
    if (bias) sum += load(bias + v * lanes<float>);
    if (residual) sum += load(residual + r * residual_row + v * lanes<float>);
    return sum;
  }
};

// M rows times a panel. The rows are a packed strip, or lie a_row numbers apart.
template <class Reader, int M, bool strip>
REGARD_INLINE void multiply_panel(int64_t depth, const float* a, int64_t a_row, const Panel& panel, float* c,
                                  int64_t c_row) {
  constexpr int L = lanes<float>, unit = Reader::unit;
  constexpr int phases = M <= 2 ? 4 : M <= 4 ? 2 : 1;  // with few rows, several sums keep the multiply-add units busy
  static_assert(longest_sum % Reader::span == 0);
  Reader reader(panel.data, panel.factor);
  // Sums are split into parts that are added in memory, because long sums lose digits.
  for (int64_t k0 = 0; k0 == 0 || k0 < depth; k0 += longest_sum) {
    VecF sums[phases][M][2];
    REGARD_UNROLL
    for (int p = 0; p < phases; ++p) {
      REGARD_UNROLL
      for (int r = 0; r < M; ++r) sums[p][r][0] = sums[p][r][1] = VecF{};
    }
    const int64_t end = least(depth, k0 + longest_sum);
    for (int64_t k1 = k0; k1 < end; k1 += Reader::span) {
      reader.open(k1);
      const auto step = [&](int phase, int64_t u, int i) __attribute__((always_inline)) {
        const VecF left = reader.get(u, i, 0), right = reader.get(u, i, 1);
        const float* x = a + (k1 + u + i) * (strip ? MR : 1);
        REGARD_UNROLL
        for (int r = 0; r < M; ++r) {
          const VecF each = broadcast(x[strip ? r : r * a_row]);
          sums[phase][r][0] += each * left;
          sums[phase][r][1] += each * right;
        }
      };
      const int64_t count = least(end - k1, Reader::span);
      int64_t u = 0;
      for (; u + unit <= count; u += unit) {
        REGARD_UNROLL
        for (int i = 0; i < unit; ++i) step(i % phases, u, i);
      }
      for (int i = 0; u + i < count; ++i) step(0, u, i);
    }
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) {
      REGARD_UNROLL
      for (int v = 0; v < 2; ++v) {
        VecF sum = sums[0][r][v];
        REGARD_UNROLL
        for (int p = 1; p < phases; ++p) sum += sums[p][r][v];
        float* to = c + r * c_row + v * L;
        if (k0) sum += load(to);
        store(to, end == depth ? panel.added_to(sum, r, v) : sum);
      }
    }
  }
}

template <class Reader> void unpack_panel(int64_t depth, const char* from, float factor, float* to) {
  Reader reader(from, factor);
  for (int64_t k1 = 0; k1 < depth; k1 += Reader::span) {
    reader.open(k1);
    const auto step = [&](int64_t u, int i) __attribute__((always_inline)) {
      store(to + (k1 + u + i) * panel_rows, reader.get(u, i, 0));
      store(to + (k1 + u + i) * panel_rows + lanes<float>, reader.get(u, i, 1));
    };
    const int64_t count = least(depth - k1, Reader::span);
    int64_t u = 0;
    for (; u + Reader::unit <= count; u += Reader::unit) {
      REGARD_UNROLL
      for (int i = 0; i < Reader::unit; ++i) step(u, i);
    }
    for (int i = 0; u + i < count; ++i) step(u, i);
  }
}

// M rows of the product from `row` on, as far as a panel has them: multiply(panel, out, distance of its rows).
template <int M, class Multiply>
REGARD_INLINE void put_rows(const regard_packed_linear& p, int64_t row, int64_t panel, const char* data, float factor,
                            Multiply&& multiply) {
  const int64_t column = panel * panel_rows, left = least<int64_t>(p.N - column, panel_rows);
  float* out = p.out + row * p.out_row + column;
  const float* bias = p.bias ? p.bias + column : nullptr;
  const float* residual = p.residual ? p.residual + row * p.residual_row + column : nullptr;
  const bool whole = left == panel_rows;
  float workspace[M * panel_rows];
  const Panel where =
      whole ? Panel{data, factor, bias, residual, p.residual_row} : Panel{data, factor, nullptr, nullptr, 0};
  multiply(where, whole ? out : workspace, whole ? p.out_row : panel_rows);
  for (int r = 0; !whole && r < M; ++r)
    for (int64_t n = 0; n < left; ++n)
      out[r * p.out_row + n] =
          workspace[r * panel_rows + n] + (bias ? bias[n] : 0) + (residual ? residual[r * p.residual_row + n] : 0);
  if (p.activation)
    for (int r = 0; r < M; ++r) activate_row(p.activation, out + r * p.out_row, nullptr, left);
}

template <class Reader, int M, bool strip>
__attribute__((noinline)) void put(const regard_packed_linear& p, const float* a, int64_t a_row, int64_t row,
                                   int64_t panel, const char* data, float factor) {
  put_rows<M>(p, row, panel, data, factor,
              [&](const Panel& where, float* c, int64_t c_row)
                  __attribute__((always_inline)) { multiply_panel<Reader, M, strip>(p.K, a, a_row, where, c, c_row); });
}

#ifdef REGARD_INTEGER_PRODUCTS
template <class Reader, int M, bool unpacked>
__attribute__((noinline)) void put_integers(const regard_packed_linear& p, const RoundedRows& x, int64_t from,
                                            int64_t row, int64_t panel, const char* data, const char* words) {
  put_rows<M>(p, row, panel, data, float(p.factor),
              [&](const Panel& where, float* c, int64_t c_row) __attribute__((always_inline)) {
                VecF sums[M][2];
                multiply_integers<Reader, M, unpacked>(x.row(from), x.groups, where.data, words, where.factor, sums);
                REGARD_UNROLL
                for (int r = 0; r < M; ++r) {
                  REGARD_UNROLL
                  for (int v = 0; v < 2; ++v) store(c + r * c_row + v * lanes<float>, where.added_to(sums[r][v], r, v));
                }
              });
}
#endif

template <class Reader> struct PackedLinear {
  static constexpr bool plain = __is_same(Reader, Float32Reader);
#ifdef REGARD_INTEGER_PRODUCTS
  static constexpr bool integers = is_integer<Reader>;
#else
  static constexpr bool integers = false;
#endif
  const regard_packed_linear& p;
  const int64_t panels, panel_bytes;

  explicit PackedLinear(const regard_packed_linear& p)
      : p(p), panels((p.N + panel_rows - 1) / panel_rows), panel_bytes(Reader::panel_bytes(p.K)) {}

  int run() const {
    const bool by_rows = p.M >= 64 * int64_t(p.threads);
    auto body = [&](int thread, int threads) {
      if (!by_rows) return run_some(0, p.M, panels * thread / threads, panels * (thread + 1) / threads);
      const int64_t strips = (p.M + MR - 1) / MR;
      return run_some(strips * thread / threads * MR, least(p.M, strips * (thread + 1) / threads * MR), 0, panels);
    };
    return parallel(int(least<int64_t>(p.threads, by_rows ? p.M : panels)), body);
  }

  int run_some(int64_t first, int64_t last, int64_t from, int64_t to) const {
#ifdef REGARD_INTEGER_PRODUCTS
    if constexpr (integers) return run_integers(first, last, from, to);
#endif
    return run_part(first, last, from, to);
  }

#ifdef REGARD_INTEGER_PRODUCTS
  int run_integers(int64_t first, int64_t last, int64_t from, int64_t to) const {
    if (first >= last || from >= to) return REGARD_OK;
    RoundedRows x{(p.K + REGARD_GROUP - 1) / REGARD_GROUP};
    const int64_t wanted = least(last - first, block_bytes / (x.groups * int64_t(sizeof(RoundedGroup))));
    const int64_t block = greatest<int64_t>(integer_rows, wanted);
    const bool unpacks = block > integer_rows;
    Layout layout;
    layout.add(block, x.groups, sizeof(RoundedGroup));
    const size_t words_at = layout.add(unpacks ? x.groups : 0, REGARD_GROUP, panel_rows);
    if (!layout.ok) return REGARD_TOO_LARGE;
    char* scratch = (char*)thread_scratch(layout.bytes);
    if (!scratch) return REGARD_NO_MEMORY;
    x.data = (RoundedGroup*)scratch;
    char* words = scratch + words_at;
    bool bad = false;
    for (int64_t begin = first; begin < last; begin += block) {
      const int64_t end = least(last, begin + block);
      for (int64_t m = begin; m < end; ++m)
        bad |= round_row<IntegerWords<Reader>::pairs>(p.x + m * p.x_row, p.K, x.row(m - begin));
      // Strips of nearly equal size, as in run_part.
      const int64_t strips = (end - begin + integer_rows - 1) / integer_rows,
                    rows = (end - begin + strips - 1) / strips;
      for (int64_t panel = from; panel < to; ++panel) {
        if (unpacks) unpack_words<Reader>(packed_panel(panel), x.groups, words);
        for (int64_t m = begin; m < end; m += rows)
          with_rows(int(least(rows, end - m)), [&](auto count) __attribute__((always_inline)) {
            constexpr int M = decltype(count)::value;
            if constexpr (M <= integer_rows) {
              if (unpacks) put_integers<Reader, M, true>(p, x, m - begin, m, panel, packed_panel(panel), words);
              else put_integers<Reader, M, false>(p, x, m - begin, m, panel, packed_panel(panel), words);
            }
          });
      }
    }
    trim_thread_scratch();
    return bad ? multiply_rows_with_infinities(first, last, from, to) : int(REGARD_OK);
  }

  // Rows with NaN or an infinity cannot be rounded: they are multiplied as float32 numbers.
  int multiply_rows_with_infinities(int64_t first, int64_t last, int64_t from, int64_t to) const {
    for (int64_t m = first; m < last; ++m)
      if (!is_finite(p.x + m * p.x_row, p.K))
        if (const int status = run_part(m, m + 1, from, to)) return status;
    return REGARD_OK;
  }
#endif

  int run_part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    if (first >= last || from >= to) return REGARD_OK;
    if (last - first < 3) {
      with_rows(int(last - first), [&](auto m) __attribute__((always_inline)) {
        constexpr int M = decltype(m)::value;
        if constexpr (M < 3)
          for (int64_t panel = from; panel < to; ++panel)
            put<Reader, M, false>(p, p.x + first * p.x_row, p.x_row, first, panel, packed_panel(panel),
                                  float(p.factor));
      });
      return REGARD_OK;
    }
    // Strips of nearly equal size: 8 rows are 4 and 4, not 6 and 2.
    const int64_t strips = (last - first + MR - 1) / MR, rows = (last - first + strips - 1) / strips;
    const int64_t size = strip_size<float>(p.K);
    const int64_t block = greatest<int64_t>(1, least(strips, block_bytes / (size * int64_t(sizeof(float)))));
    const bool unpacks = !plain && block > 1;
    Layout layout;
    layout.add(block, size, sizeof(float));
    const size_t unpacked_at = layout.add(unpacks ? panel_rows : 0, p.K, sizeof(float));
    if (!layout.ok) return REGARD_TOO_LARGE;
    char* scratch = (char*)thread_scratch(layout.bytes);
    if (!scratch) return REGARD_NO_MEMORY;
    float *packed = (float*)scratch, *unpacked = (float*)(scratch + unpacked_at);
    for (int64_t s0 = 0; s0 < strips; s0 += block) {
      const int64_t s1 = least(strips, s0 + block);
      const auto count = [&](int64_t s) { return int(greatest<int64_t>(0, least(rows, last - first - s * rows))); };
      for (int64_t s = s0; s < s1; ++s) {
        RowPointers x{{}, p.K, 1, REGARD_FLOAT32};
        for (int r = 0; r < count(s); ++r) x.row[r] = p.x + (first + s * rows + r) * p.x_row;
        pack_strip<float>(x, packed + (s - s0) * size);
      }
      for (int64_t panel = from; panel < to; ++panel) {
        if (unpacks) unpack_panel<Reader>(p.K, packed_panel(panel), float(p.factor), unpacked);
        for (int64_t s = s0; s < s1; ++s) {
          if (!count(s)) continue;
          const float* strip = packed + (s - s0) * size;
          with_rows(count(s), [&](auto m) __attribute__((always_inline)) {
            constexpr int M = decltype(m)::value;
            const int64_t row = first + s * rows;
            if (unpacks) put<Float32Reader, M, true>(p, strip, 1, row, panel, (const char*)unpacked, 1);
            else put<Reader, M, true>(p, strip, 1, row, panel, packed_panel(panel), float(p.factor));
          });
        }
      }
    }
    trim_thread_scratch();
    return REGARD_OK;
  }

  const char* packed_panel(int64_t panel) const { return (const char*)p.packed + panel * panel_bytes; }
};

}  // namespace

int64_t packed_bytes(int64_t N, int64_t K, int32_t format) {
  return with_format(
      format, [&](auto kind) { return (N + panel_rows - 1) / panel_rows * decltype(kind)::Reader::panel_bytes(K); });
}

int packed_linear(const regard_packed_linear& p) {
  return with_format(p.format, [&](auto kind) { return PackedLinear<typename decltype(kind)::Reader>(p).run(); });
}

}  // namespace regard::REGARD_ISA
