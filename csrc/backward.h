// The parts of the backward that concern one row, and the cost of a key tile.
#pragma once
#include "dot.h"
#include "normalization.h"
#include "score.h"
#include "softmax.h"
#include "schedule.h"

namespace regard::REGARD_ISA {

constexpr int64_t key_tile = 128;                   // a multiple of the tiles of a mask
constexpr int64_t most_rows = has_amx ? 128 : 144;  // in a block of queries, a multiple of MR
constexpr int score_stride = 128 + 16;              // not a power of two: columns of the buffer are read down its rows

// sums[r] = the product of rows `row + r` of x and y.
template <class T> __attribute__((noinline)) void dot_rows(const Matrix& x, const Matrix& y, int64_t row, int count,
                                                           T* sums) {
  constexpr int L = lanes<T>;
  const int64_t columns = x.columns, whole = x.column_stride == 1 && y.column_stride == 1 ? columns / L * L : 0;
  with_storage<T>(x.dtype, [&](auto stored) __attribute__((always_inline)) {
    using S = typename decltype(stored)::type;
    for (int r = 0; r < count; ++r) {
      const S *a = at<S>(x, row + r, 0), *b = at<S>(y, row + r, 0);
      Vec<T> sum{};
      for (int64_t c = 0; c < whole; c += L) sum += load_as(a + c) * load_as(b + c);
      for (int64_t c = whole; c < columns; c += L)
        sum += load_some(a + c * x.column_stride, x.column_stride, columns - c) *
               load_some(b + c * y.column_stride, y.column_stride, columns - c);
      sums[r] = reduce_add<T>(sum);
    }
  });
}

// A log-sum-exp in base two: the nearest integer, and 2^(integer - log-sum-exp). To round it to one number would cost every
// weight of the row as many digits as it has before the point.
template <class T> struct LogSum {
  T lse, factor;

  LogSum() = default;
  explicit LogSum(double exact) : lse(T(exact)), factor(1) {
    if (near()) factor = T(exp2(broadcast(double(zero()) - exact))[0]);
  }
  bool near() const { return lse >= -far_peak<T> && lse <= far_peak<T>; }
  T zero() const { return (lse + rounder<T>)-rounder<T>; }

  // Calls use(weight), where weight(logit) is 2^(logit - log-sum-exp). Far from zero it is made no more than 1: where the
  // digits of both are equal, the difference may still be nonzero. NaN stays NaN.
  template <class F> REGARD_INLINE void with_weights(F&& use) const {
    if (near()) {
      const Vec<T> least = broadcast(zero() + least_exponent<T>), round = broadcast(rounder<T> - zero());
      const Vec<T> f = broadcast(factor);
      use([&](Vec<T> logit) __attribute__((always_inline)) { return exp2_above(logit, least, round) * f; });
    } else {
      const Vec<T> l = broadcast(lse);
      use([&](Vec<T> logit) __attribute__((always_inline)) { return exp2(min(Vec<T>{}, logit - l)); });
    }
  }
};

// Logits become weights, gradients of weights become gradients of logits.
template <class T> REGARD_INLINE void weights_and_gradients(T* s, T* d, int64_t lo, int64_t hi, const LogSum<T>& lse,
                                                            T delta) {
  const Vec<T> e = broadcast(delta);
  lse.with_weights([&](auto weight_of) __attribute__((always_inline)) {
    for (int64_t c = lo; c < hi; c += lanes<T>) {
      const Vec<T> weight = weight_of(load(s + c));
      store(s + c, weight);
      store(d + c, weight * (load(d + c) - e));
    }
  });
}

// A row of panels that lie `panel` operands apart becomes zero; `row` says which term of its operands it is.
template <class T, class A> void clear_row(A* first, int64_t panel, int64_t columns, int64_t row) {
  for (int64_t c = 0; c < columns; c += NR<T>)
    for (int n = 0; n < NR<T>; ++n) clear_term(first + c / NR<T> * panel + n, row);
}

#if defined(REGARD_PAIR_PRODUCTS)
// Weights and gradients of m rows are rounded to bfloat16, as products over rows take them: in place, (row, row + 1) at the place
// of every other row. Gradients also as products over keys do: `pairs` of neighbours, row after row.
// Tiles take the rows of a strip that are not in use as well: they become zero.
inline __attribute__((noinline)) void pair_rows(float* s, float* d, Pair* pairs, int m, int64_t width) {
  constexpr int L = lanes<float>;
  using Place = SimdOf<Pair>::Unaligned;
  for (int r = m; has_amx && r < MR; ++r)
    for (int64_t c = 0; c < width; c += L)
      store(s + r * score_stride + c, VecF{}), store(d + r * score_stride + c, VecF{});
  if (has_amx) m = MR;
  for (int r = 0; r < m; r += 2, s += 2 * score_stride, d += 2 * score_stride, pairs += score_stride) {
    const auto second = [&](const float* x, int64_t c)
                            __attribute__((always_inline)) { return r + 1 < m ? load(x + score_stride + c) : VecF{}; };
    for (int64_t c = 0; c < width; c += 2 * L) {
      const VecF a = load(d + c), b = load(d + c + L), x = second(d, c), y = second(d, c + L);
      *(Place*)(pairs + c / 2) = to_pairs(a, b);
      *(Place*)(pairs + score_stride / 2 + c / 2) = to_pairs(x, y);
      *(Place*)(d + c) = zip_pairs(a, x);
      *(Place*)(d + c + L) = zip_pairs(b, y);
      *(Place*)(s + c) = zip_pairs(load(s + c), second(s, c));
      *(Place*)(s + c + L) = zip_pairs(load(s + c + L), second(s, c + L));
    }
  }
}
#endif

// The same where scores are capped or biased, weights dropped, or gradients of a bias wanted.
template <class T> struct RowGradients {
  const regard_dot& p;
  const regard_dot_gradient& gradient;
  const Scales<T>& scales;
  const T bias_factor;
  const bool plain;
  const ElementwiseWeights<T> elementwise;
  const bool fresh_bias;  // no two logits share a number of d_bias, and none is left out: they are written, not added

  RowGradients(const regard_dot& p, const regard_dot_gradient& gradient, const Scales<T>& scales)
      : p(p), gradient(gradient), scales(scales), bias_factor(T(1 / p.temperature)),
        plain(!scales.changes_logits && !p.dropout_threshold && !gradient.d_out_table.data), elementwise(p),
        fresh_bias(!p.intervals.start && !p.tiles.pointer && (gradient.d_bias.stride[0] || p.B == 1) &&
                   (gradient.d_bias.stride[1] || p.H == 1) && (gradient.d_bias.stride[2] || p.Q == 1)) {}

  // Initialise it, before anything is added.
  void clear_bias() const {
    const regard_tensor& t = gradient.d_bias;
    if (!t.data || fresh_bias) return;
    const size_t numbers =
        size_t(t.stride[0] ? p.B : 1) * size_t(t.stride[1] ? p.H : 1) * size_t(t.stride[2] ? p.Q : 1) * size_t(p.K);
    __builtin_memset(t.data, 0, numbers * sizeof(T));
  }

  // Logits become weights, gradients of weights become gradients of logits.
  REGARD_INLINE void weigh(const Row<T>& row, int64_t j0, T* s, T* d, int64_t lo, int64_t hi, const LogSum<T>& lse,
                           T delta) const {
    if (p.normalization != REGARD_SOFTMAX) weigh_elements(row, j0, s, d, lo, hi, lse.lse);
    else weights_and_gradients(s, d, lo, hi, lse, delta);
  }

  // The same for a normalisation of single logits; `marker` is 0, or NaN for a row that is to become NaN.
  __attribute__((noinline)) void weigh_elements(const Row<T>& row, int64_t j0, T* s, T* d, int64_t lo, int64_t hi,
                                                T marker) const {
    elementwise.with_weights(marker, [&](auto weigh) __attribute__((always_inline)) {
      for (int64_t c = lo; c < hi; c += lanes<T>) {
        const WeightAndSlope<T> x = weigh(load(s + c));
        Vec<T> weight = x.weight, grad = load(d + c);
        if (p.dropout_threshold) {
          const auto kept = dropout_keeps<T>(row.dropout_key, uint32_t(j0 + c), p.dropout_threshold);
          weight = select(kept, weight * T(p.dropout_scale), Vec<T>{});
          grad = select(kept, grad * T(p.dropout_scale), Vec<T>{});
        }
        store(s + c, weight);
        store(d + c, grad * x.slope);
      }
    });
  }

  // `slope` receives the derivative of the cap, where there is one.
  void weigh_logits(const Row<T>& row, int64_t j0, T* s, T* d, int64_t lo, int64_t hi, const LogSum<T>& lse, T delta,
                    T* slope) const {
    if (scales.cap != 0) {
      for (int64_t c = lo; c < hi; c += lanes<T>) {
        const Vec<T> t = tanh(load(s + c));
        store(s + c, t * scales.cap);
        store(slope + c, T(1) - t * t);
      }
    }
    add_biases(p, scales, row, j0, s, lo, hi);
    if (gradient.d_out_table.data)
      add_table(real_row<T>(gradient.d_out_table, row.b, row.h, row.i), row.first, p.radius, T(1), j0, d, lo, hi);
    if (!p.dropout_threshold || p.normalization != REGARD_SOFTMAX) return weigh(row, j0, s, d, lo, hi, lse, delta);

    const Vec<T> e = broadcast(delta);
    const T scale = T(p.dropout_scale);
    lse.with_weights([&](auto weight_of) __attribute__((always_inline)) {
      for (int64_t c = lo; c < hi; c += lanes<T>) {
        const auto kept = dropout_keeps<T>(row.dropout_key, uint32_t(j0 + c), p.dropout_threshold);
        const Vec<T> weight = weight_of(load(s + c));
        store(s + c, select(kept, weight * scale, Vec<T>{}));
        store(d + c, weight * (select(kept, load(d + c) * scale, Vec<T>{}) - e));
      }
    });
  }

  // Adds the gradients of a row's logits to those of the biases, then multiplies them by the slope of the cap.
  void add(const Row<T>& row, int64_t j0, T* d, int64_t lo, int64_t hi, const T* slope, T* diagonal, T* table) const {
    if (diagonal) {
      T* to = diagonal + (p.Q - 1 - row.i) + j0;
      for_vectors<T>(lo, hi, p.K - j0, [&](int64_t c, int n) __attribute__((always_inline)) {
        store_some(to + c, 1, n, load_some(to + c, 1, n) + load(d + c));
      });
    }
    if (table) sum_by_distance<T>(table, row.first, p.radius, j0, d, lo, hi);
    if (gradient.d_bias.data) {
      T* to = const_cast<T*>(real_row<T>(gradient.d_bias, row.b, row.h, row.i)) + j0;
      for_vectors<T>(lo, hi, p.K - j0, [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec<T> x = load(d + c) * bias_factor;
        store_some(to + c, 1, n, fresh_bias ? x : x + load_some(to + c, 1, n));
      });
    }
    if (scales.cap != 0)
      for (int64_t c = lo; c < hi; c += lanes<T>) store(d + c, load(d + c) * load(slope + c));
  }
};

// total[n + 1] - total[n] is about how many (strip, key) pairs are visited in unit n = (head - first) * tiles + tile.
template <class T> void key_tile_costs(const regard_dot& p, int64_t first, int64_t last, int64_t tiles, double* total) {
  const int64_t group = p.H / p.G, strips = (p.Q + MR - 1) / MR;
  for (int64_t n = 0; n <= (last - first) * tiles; ++n) total[n] = 0;
  const auto add = [&](double* cost, int64_t lo, int64_t hi, double weight) {
    for (int64_t tile = lo / key_tile; tile * key_tile < hi; ++tile)
      cost[tile] += weight * double(least(hi, (tile + 1) * key_tile) - greatest(lo, tile * key_tile));
  };
  for (int64_t head = first; head < last; ++head) {
    const int64_t b = head / p.G, g = head % p.G;
    double* cost = total + 1 + (head - first) * tiles;
    for (int64_t tile = 0; tile < tiles; ++tile) cost[tile] += double(key_tile) * 8;
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
      if (p.tiles.pointer) {
        for (int64_t t = 0; t * REGARD_TILE < p.Q; ++t)
          for_each_tile_step(p, b, h, t, 0, p.K, p.K,
                             [&](const Step& s) { add(cost, s.j0, s.j1, double(REGARD_TILE) / MR); });
      } else if (!p.intervals.start) {
        add(cost, 0, p.K, double(strips));
      } else {
        for (int64_t s = 0; s < strips; ++s) {
          int64_t lo = p.K, hi = 0;
          for (int64_t i = s * MR; i < least(p.Q, (s + 1) * MR); ++i) {
            const int64_t at = b * p.intervals.stride[0] + h * p.intervals.stride[1] + i * p.intervals.stride[2];
            if (p.intervals.start[at] >= p.intervals.stop[at]) continue;
            lo = least<int64_t>(lo, p.intervals.start[at]);
            hi = greatest<int64_t>(hi, p.intervals.stop[at]);
          }
          add(cost, greatest<int64_t>(0, lo), least(p.K, hi), 1);
        }
      }
    }
  }
  for (int64_t n = 0; n < (last - first) * tiles; ++n) total[n + 1] += total[n];
}

}  // namespace regard::REGARD_ISA
