// The scores that the kernels compute: how queries and keys are packed, and how a strip of queries is combined with panels
// of keys. The products are compiled once, in score.cpp: they are most of the code.
#pragma once
#include "additive.h"
#include "logits.h"
#include "memory.h"
#include "pairs.h"

namespace regard::REGARD_ISA {

// q . k; the scale is multiplied into the keys.
template <class T> struct DotScore {
  using Operand = T;                          // what queries and keys are packed as
  static constexpr bool is_product = true;    // gradients are products with the packed queries and keys
  static constexpr int64_t longest_sum = 96;  // in float: the more terms follow one another, the more is rounded
  const int64_t D, part;                      // products are added up in parts of so many terms
  explicit DotScore(const regard_dot& p) : D(p.D), part(sizeof(T) == 8 ? D : part_of(D)) {}
  static int64_t part_of(int64_t D) {
    const int64_t parts = greatest<int64_t>(1, (D + longest_sum - 1) / longest_sum);
    return (D + parts - 1) / parts;
  }

  // Whether rows of queries are operands as they lie in memory.
  static bool reads_in_place(const regard_dot& p) {
    return p.dtype == (sizeof(T) == 8 ? REGARD_FLOAT64 : REGARD_FLOAT32);
  }

  int prepare(const regard_dot&) { return REGARD_OK; }
  T key_factor(T scale) const { return scale; }
  void ready_queries(int64_t, T*) const {}
  void ready_keys(T*) const {}
  void ready_rows(T*, int64_t, int64_t, T) const {}

  void fill(int64_t, int rows, Panels panels, const T* strip, const T* transposed, T* scores, int64_t stride) const;
  // The same, added to what is there.
  void add(int rows, Panels panels, const T* strip, const T* transposed, T* scores, int64_t stride) const;
  // The same for queries that were not packed: rows that lie row_stride apart.
  void fill_direct(int rows, Panels panels, const T* queries, int64_t row_stride, const T* transposed, T* scores,
                   int64_t stride) const;

  int64_t sums() const { return 0; }
  void finish_row(int64_t, T*) const {}
  void store_sums(const regard_tensor&, int64_t, int64_t, const T*, T) const {}
};

#if defined(REGARD_PAIR_PRODUCTS)
// q . k of bfloat16 numbers by the CPU's own products; the sums are multiplied by the scale, unless the caller does it.
struct PairScore {
  using Operand = Pair;
  static constexpr bool is_product = true;
  const int64_t depth;
  const float scale;
  bool scales = true;
  explicit PairScore(const regard_dot& p) : depth(row_operands<Pair>(p.D)), scale(Scales<float>(p).key) {}

  static bool reads_in_place(const regard_dot& p) { return !has_amx && p.D % 2 == 0 && p.q.stride[2] % 2 == 0; }

  int prepare(const regard_dot&) { return REGARD_OK; }
  float key_factor(float factor) const { return factor; }
  void ready_queries(int64_t, Pair*) const {}
  void ready_keys(Pair*) const {}
  void ready_rows(Pair*, int64_t, int64_t, float) const {}

  void fill(int64_t, int rows, Panels panels, const Pair* strip, const Pair* transposed, float* scores,
            int64_t stride) const;
  void fill_direct(int rows, Panels panels, const Pair* queries, int64_t row_stride, const Pair* transposed,
                   float* scores, int64_t stride) const;

  int64_t sums() const { return 0; }
  void finish_row(int64_t, float*) const {}
  void store_sums(const regard_tensor&, int64_t, int64_t, const float*, float) const {}
};
#endif

// weight . tanh(q + k). All rows of a strip have the same weight: it is shared by the heads, or no heads share keys.
template <class T> struct AdditiveScore {
  using Operand = T;
  static constexpr bool is_product = false;
  const int64_t D, width;  // the width in whole panels
  const T scale;           // of the logits in base two
  const regard_tensor& given;
  const int64_t per_head;  // 1 if every head has a weight of its own
  AdditiveMode mode = AdditiveMode::direct;
  Buffer memory;

  explicit AdditiveScore(const regard_dot& p)
      : D(p.D), width(round_up(p.D, NR<T>)), scale(T(log2_e / p.temperature)), given(p.weight),
        per_head(p.weight.stride[1] != 0 && p.H > 1) {}

  static bool reads_in_place(const regard_dot&) { return false; }
  const AdditiveWeight<T>& weight(int64_t h) const { return ((const AdditiveWeight<T>*)memory.data)[h * per_head]; }

  int prepare(const regard_dot& p) {
    const int64_t heads = per_head ? p.H : 1;
    Layout layout;
    layout.add(heads, 1, sizeof(AdditiveWeight<T>));
    const size_t numbers = layout.add(heads, 3 * D, sizeof(T)),
                 ranges = layout.add(p.threads, 2, sizeof(AdditiveRange<T>));
    if (!layout.ok) return REGARD_TOO_LARGE;
    if (!memory.reserve(layout.bytes)) return REGARD_NO_MEMORY;

    AdditiveRange<T>* extents = (AdditiveRange<T>*)((char*)memory.data + ranges);
    for (int64_t t = 0; t < 2 * p.threads; ++t) extents[t] = {};
    auto scan = [&](int thread, int threads) {
      for (int64_t n = thread; n < p.B * (p.H + p.G); n += threads) {
        const int64_t b = n / (p.H + p.G), head = n % (p.H + p.G);
        if (head < p.H) extents[2 * thread].include(matrix_of(p.q, p.dtype, b, head, p.Q, D));
        else extents[2 * thread + 1].include(matrix_of(p.k, p.dtype, b, head - p.H, p.K, D));
      }
      return int(REGARD_OK);
    };
    if (const int status = parallel(p.threads, scan)) return status;
    for (int64_t t = 1; t < p.threads; ++t) extents[0].include(extents[2 * t]), extents[1].include(extents[2 * t + 1]);

    const bool small = AdditiveWeight<T>::small(extents[0], extents[1]);
    mode = small ? AdditiveMode::small : AdditiveMode::paired;
    for (int64_t h = 0; h < heads; ++h) {
      const T* source = (const T*)given.data + h * given.stride[1];
      T* storage = (T*)((char*)memory.data + numbers) + h * 3 * D;
      const AdditiveWeight<T> weight(source, given.stride[3], D, storage);
      ((AdditiveWeight<T>*)memory.data)[h] = weight;
      if (!small) mode = greatest(mode, weight.mode(extents[0], extents[1]));
    }
    return REGARD_OK;
  }

  // Whether queries and keys are packed as they are.
  bool plain() const { return mode == AdditiveMode::small || mode == AdditiveMode::direct; }

  T key_factor(T) const { return 1; }

  void ready_queries(int64_t h, T* strip) const {
    if (plain()) return;
    exponentials(strip, D * MR, T(1));
    const T* inverse = weight(h).inverse;
    for (int64_t d = 0; d < D; ++d)
      for (int r = 0; r < MR; ++r) strip[d * MR + r] *= inverse[d];
  }
  void ready_keys(T* transposed) const {
    if (!plain()) exponentials(transposed, D * NR<T>, T(1));
  }
  // Rows as panels [width / NR][row][NR], which the gradients read: with the factor 1/2 for queries, 1 for keys.
  void ready_rows(T* panels, int64_t rows, int64_t panel, T factor) const {
    if (plain()) return;
    for (int64_t d = 0; d < width; d += NR<T>, panels += panel) exponentials(panels, rows * NR<T>, factor);
  }
  static void exponentials(T* x, int64_t n, T factor) {
    for (int64_t i = 0; i < n; i += lanes<T>) {
      const Vec<T> v = load_some(x + i, 1, n - i);
      store_some(x + i, 1, n - i, exp(v + v) * factor);
    }
  }

  void fill(int64_t h, int rows, Panels wanted, const T* strip, const T* transposed, T* scores, int64_t stride) const;

  // Numbers gathered besides the gradients of queries and keys: the gradient of -weight.
  int64_t sums() const { return width; }

  void add_gradients(int rows, int64_t keys, AdditiveRows<T> q, AdditiveRows<T> k, const T* ds, int64_t ds_row, T* dq,
                     T* dk, T* sums) const;
  void finish_row(int64_t h, T* row) const {
    const T* w = weight(h).weight;
    for (int64_t d = 0; d < D; ++d) row[d] *= w[d];
  }
  void store_sums(const regard_tensor& d_weight, int64_t b, int64_t h, const T* sums, T factor) const {
    if (!d_weight.data) return;
    T* to = (T*)d_weight.data + b * d_weight.stride[0] + h * d_weight.stride[1];
    for (int64_t d = 0; d < D; ++d) to[d * d_weight.stride[3]] = -sums[d] * factor;
  }
};

// Calls f with the types that a problem is computed in.
template <class T, class S> struct Kind {
  using Real = T;
  using Score = S;
};
template <class F> int with_score(const regard_dot& p, F&& f) {
#if defined(REGARD_PAIR_PRODUCTS)
  (void)p;  // other problems are those of the instruction set that this one extends
  return f(Kind<float, PairScore>{});
#else
  const bool wide = p.dtype == REGARD_FLOAT64;
  if (p.weight.data) return wide ? f(Kind<double, AdditiveScore<double> >{}) : f(Kind<float, AdditiveScore<float> >{});
  return wide ? f(Kind<double, DotScore<double> >{}) : f(Kind<float, DotScore<float> >{});
#endif
}

}  // namespace regard::REGARD_ISA
