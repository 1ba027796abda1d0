// Online softmax over a strip of rows, in base two.
#pragma once
#include <limits>

#include "gemm.h"

namespace regard::REGARD_ISA {

// Replaces the peak of a row without visible keys so far: its logits minus this are still -infinity, and no NaN. No logit
// is lower, however far down a row lies.
template <class T> constexpr T no_peak = std::numeric_limits<T>::lowest();

// Beyond this an integer peak costs digits.
template <class T> constexpr T far_peak = T(1 << 20);

// Logits no larger than this in size are *tame*: 2^(logit - bound) does not vanish, so that their largest need not be known.
template <class T> constexpr T max_safe_logit = 30;

// Arrays with one number for each row of a strip are read and written in whole vectors.
template <class T> constexpr int strip_lanes = (MR + lanes<T> - 1) / lanes<T> * lanes<T>;

// How logits are read from a row of scores, and how weights take their place.
template <class T> struct InPlace {
  REGARD_INLINE Vec<T> logits(const T* x) const { return load(x); }
  REGARD_INLINE void put(T* row, int64_t c, Vec<T> a, Vec<T> b) const {
    store(row + c, a);
    store(row + c + lanes<T>, b);
  }
};

// x[c] = weight(x[c]) for c in [lo, hi); returns their sums lane by lane.
template <class T, class Scores, class F>
REGARD_INLINE Vec<T> map_and_sum(const Scores& scores, T* x, int64_t lo, int64_t hi, F&& weight) {
  Vec<T> left{}, right{};
  for (int64_t c = lo; c < hi; c += 2 * lanes<T>) {
    const Vec<T> a = weight(scores.logits(x + c)), b = weight(scores.logits(x + c + lanes<T>));
    scores.put(x, c, a, b);
    left += a;
    right += b;
  }
  return left + right;
}

// x[c] = 2^(x[c] - peak), for a peak of any size; adds the weights to sums.
template <class T, class Scores>
__attribute__((noinline, cold)) void exp2_and_sum_any_peak(const Scores& scores, T* x, int64_t lo, int64_t hi, T peak,
                                                           Vec<T>& sums) {
  const Vec<T> top = broadcast(greatest(peak, no_peak<T>));
  sums += map_and_sum(scores, x, lo, hi, [&](Vec<T> x) __attribute__((always_inline)) { return exp2(x - top); });
}

// s[r][lo..hi) are logits and become 2^(logit - peak[r]) for the new peak; sums[r] gathers them lane by lane and alpha[r]
// says by how much everything gathered before has shrunk. A peak is the largest logit so far, rounded to an integer, which
// saves the subtraction; or -infinity. All MR rows are worked on, whether in use or not: a constant number of rows is worth
// more than the rows saved. Of the long strips of AMX, only the m rows in use.
template <class T, int stride, class Scores>
__attribute__((noinline)) void softmax_strip(const Scores& scores, T* s, int64_t lo, int64_t hi, int m, T* peak,
                                             Vec<T>* sums, T* alpha) {
  using V = Vec<T>;
  constexpr int L = lanes<T>;
  T zero[strip_lanes<T>];
  const int used = has_amx ? m : MR;
  REGARD_UNROLL
  for (int group = 0; group < MR; group += L) {
    if (group >= used) break;
    V x[L];
    REGARD_UNROLL
    for (int r = 0; r < L; ++r) x[r] = broadcast(T(-infinity));
    for (int64_t c = lo; c < hi; c += 2 * L) {
      REGARD_UNROLL
      for (int r = 0; r < L; ++r)
        if (group + r < MR) {
          const T* row = s + (group + r) * stride + c;
          x[r] = max(x[r], max(scores.logits(row), scores.logits(row + L)));
        }
    }
    const V old = load(peak + group), now = (max(old, max_of_each<T>(x)) + rounder<T>)-rounder<T>;
    const auto none = now == T(-infinity);
    store(peak + group, now);
    store(zero + group, select(none, V{}, now));
    store(alpha + group, exp2(old - max(now, broadcast(no_peak<T>))));
  }
  REGARD_UNROLL
  for (int r = 0; r < MR; ++r) {
    if (r >= used) break;
    sums[r] *= alpha[r];
    // Each row decides separately: unused rows have arbitrary contents, which must not change the digits of others.
    if (!(zero[r] >= -far_peak<T> && zero[r] <= far_peak<T>)) {
      exp2_and_sum_any_peak<T>(scores, s + r * stride, lo, hi, peak[r], sums[r]);
      continue;
    }
    const V least = broadcast(zero[r] + least_exponent<T>), round = broadcast(rounder<T> - zero[r]);
    sums[r] += map_and_sum(scores, s + r * stride, lo, hi,
                           [&](V x) __attribute__((always_inline)) { return exp2_above(x, least, round); });
  }
}

// The same for m rows of tame logits, without searching for the largest: the peak is an integer that none of them exceeds.
// Returns whether no row lies far below it; if one does, s is overwritten and nothing else has changed.
template <class T, int stride, class Scores>
__attribute__((noinline)) bool softmax_below(const Scores& scores, T bound, T* s, int64_t lo, int64_t hi, int m,
                                             bool hidden, T* peak, Vec<T>* sums, T* alpha) {
  using V = Vec<T>;
  constexpr T little = T(1) / (1 << 24);
  const V top = broadcast(bound), least = broadcast(bound + least_exponent<T>), round = broadcast(rounder<T> - bound);
  for (int group = 0; group < MR; group += lanes<T>) store(alpha + group, exp2(load(peak + group) - top));
  V total[MR];
  for (int r = 0; r < m; ++r) {
    T* row = s + r * stride;
    total[r] = sums[r] * alpha[r];
    if (hidden)
      total[r] += map_and_sum(scores, row, lo, hi,
                              [&](V x) __attribute__((always_inline)) { return exp2_above(x, least, round); });
    else
      total[r] +=
          map_and_sum(scores, row, lo, hi, [&](V x) __attribute__((always_inline)) { return exp2_within(x, round); });
    if (!any_lane(total[r] > little) && any_lane(total[r] > 0)) return false;
  }
  for (int r = 0; r < m; ++r) sums[r] = total[r];
  for (int r = 0; r < strip_lanes<T>; ++r) peak[r] = bound;
  return true;
}

// The log-sum-exp, as a natural logarithm, of rows whose weights add up to `total` in units of 2^peak.
template <class T> void store_lse(Vec<T> total, Vec<T> peak, T* lse) {
  alignas(vector_bytes) double logs[lanes<T>];
  log2_exactly(total, logs);
  alignas(vector_bytes) T sums[lanes<T>], peaks[lanes<T>];
  store(sums, total), store(peaks, peak);
  for (int i = 0; i < lanes<T>; ++i) {
    const T sum = T((double(peaks[i]) + logs[i]) * ln_2);
    lse[i] = sums[i] == 0 ? T(-infinity) : sums[i] > 0 ? sum : sums[i];
  }
}

// Dropped weights become zero. The factor 1 / (1 - probability) is left to the end.
template <class T>
void apply_dropout(uint32_t row_key, uint32_t threshold, int64_t j0, T* s, int64_t lo, int64_t hi) {
  for (int64_t c = lo; c < hi; c += lanes<T>)
    store(s + c, select(dropout_keeps<T>(row_key, uint32_t(j0 + c), threshold), load(s + c), Vec<T>{}));
}

}  // namespace regard::REGARD_ISA
