// What the rows of the weights are like, without the weights: one walk over the logits.
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

// Sums are kept relative to the largest logit so far, lane by lane: of w = 2^(s - peak), of w * (s - peak), and of
// w * |p - j|.
template <class T> struct Sums {
  Vec<T> mass, logit, distance;
  T peak;
};

template <class T, class Score> struct Statistics : Strips<T, Statistics<T, Score>, Score> {
  using Base = Strips<T, Statistics<T, Score>, Score>;
  using Base::layout, Base::p, Base::strips;
  const regard_dot_statistics& result;
  const int64_t top;

  struct Places { size_t sums, top_logits, top_keys; } at;

  Statistics(const regard_dot& p, const regard_dot_statistics& result) : Base(p), result(result), top(result.top) {
    at.sums = layout.add(strips * MR, 1, sizeof(Sums<T>));
    at.top_logits = layout.add(strips * MR, top, sizeof(T));
    at.top_keys = layout.add(strips * MR, top, sizeof(int64_t));
  }

  struct Room {
    Sums<T>* sums;
    T* top_logits;  // of each row, largest first
    int64_t* top_keys;
  };
  Room room(char* memory) const {
    return {(Sums<T>*)(memory + at.sums), (T*)(memory + at.top_logits), (int64_t*)(memory + at.top_keys)};
  }

  void begin(Room& room, int64_t s) const {
    for (int64_t r = s * MR; r < (s + 1) * MR; ++r) {
      room.sums[r] = Sums<T>{Vec<T>{}, Vec<T>{}, Vec<T>{}, T(-infinity)};
      for (int64_t t = 0; t < top; ++t) {
        room.top_logits[r * top + t] = -infinity;
        room.top_keys[r * top + t] = -1;
      }
    }
  }

  void take(Room& room, const Walk<T>& w, int64_t s, int m, int64_t j0, int64_t lo, int64_t hi) const {
    for (int r = 0; r < m; ++r) {
      const T* logits = w.scores + r * chunk;
      const Row<T>& row = w.rows[s * MR + r];
      const T largest = add(room.sums[s * MR + r], logits, T(p.offset[row.b] + row.i - j0), lo, hi);
      if (top && largest > room.top_logits[(s * MR + r) * top + top - 1]) keep_largest(room, s * MR + r, logits, j0, lo, hi);
    }
  }

  // `place` is where the query stands, counted from column 0. Returns the largest logit of these columns.
  static T add(Sums<T>& sums, const T* logits, T place, int64_t lo, int64_t hi) {
    using V = Vec<T>;
    V peaks = load(logits + lo);
    for (int64_t c = lo + lanes<T>; c < hi; c += lanes<T>) peaks = max(peaks, load(logits + c));
    const T largest = reduce_max<T>(peaks), before = sums.peak, peak = greatest(before, largest);
    const V top = broadcast(greatest(peak, no_peak<T>));
    // Far below the peak a weight is exactly 0, and times a finite number it stays so.
    const V far = broadcast(T(-2000));
    const V shift = max(far, before - top), shrink = exp2(shift);
    V mass{}, logit{}, distance{}, key = __builtin_convertvector(lane_numbers<IntVec<T>>(), V) + (T(lo) - place);
    for (int64_t c = lo; c < hi; c += lanes<T>) {
      const V x = max(far, load(logits + c) - top), weight = exp2(x);
      mass += weight;
      logit += weight * x;
      distance += weight * absolute(key);
      key += T(lanes<T>);
    }
    sums.logit = (sums.logit + sums.mass * shift) * shrink + logit;
    sums.mass = sums.mass * shrink + mass;
    sums.distance = sums.distance * shrink + distance;
    sums.peak = peak;
    return largest;
  }

  // Few logits pass the smallest one kept, so that a test is all that most of them cost.
  void keep_largest(Room& room, int64_t r, const T* logits, int64_t j0, int64_t lo, int64_t hi) const {
    T* kept = room.top_logits + r * top;
    int64_t* keys = room.top_keys + r * top;
    for (int64_t c = lo; c < hi; c += lanes<T>) {
      if (!any_lane(load(logits + c) > broadcast(kept[top - 1]))) continue;
      for (int64_t lane = c; lane < c + lanes<T>; ++lane) {
        if (!(logits[lane] > kept[top - 1])) continue;
        int64_t t = top - 1;
        for (; t > 0 && logits[lane] > kept[t - 1]; --t) {
          kept[t] = kept[t - 1];
          keys[t] = keys[t - 1];
        }
        kept[t] = logits[lane];
        keys[t] = j0 + lane;
      }
    }
  }

  void finish(Room& room, const Walk<T>& w, int64_t s, int m) const {
    for (int64_t r = s * MR; r < s * MR + m; ++r) {
      const Row<T>& row = w.rows[r];
      const Sums<T>& sums = room.sums[r];
      const double seen = double(reduce_add<T>(sums.mass)), away = double(reduce_add<T>(sums.distance));
      double mass = seen, logit = double(reduce_add<T>(sums.logit)), peak = double(greatest(sums.peak, no_peak<T>));
      if (p.sink) {
        const double sink = double(((const T*)p.sink)[row.h]) * log2_e, top = greatest(peak, sink);
        const double shrink = power(peak - top), own = power(sink - top);
        logit = (logit + mass * greatest(peak - top, -2000.0)) * shrink + own * (sink - top);
        mass = mass * shrink + own;
        peak = top;
      }
      const double logs = mass > 0 ? log2(broadcast(mass))[0] : 0;
      T lse = T((peak + logs) * ln_2), entropy = T(greatest(0.0, logs - logit / mass) * ln_2);
      T distance = T(away / seen), largest = sums.peak * T(ln_2);
      if (!(seen > 0)) distance = 0;
      if (mass == 0) lse = -infinity, entropy = 0;
      if (w.poisoned[r] || mass != mass) lse = entropy = distance = largest = T(__builtin_nanf(""));
      put_number(result.lse, row, lse);
      put_number(result.entropy, row, entropy);
      put_number(result.max_logit, row, largest);
      put_number(result.distance, row, distance);
      const int64_t first = ((row.b * p.H + row.h) * p.Q + row.i) * top;
      for (int64_t t = 0; t < top; ++t) {
        const T x = room.top_logits[r * top + t];
        result.top_keys[first + t] = room.top_keys[r * top + t];
        ((T*)result.top_weights)[first + t] = x == T(-infinity) || lse != lse ? T(0) : T(power(double(x) - (peak + logs)));
      }
    }
  }

  static double power(double x) { return exp2(broadcast(x))[0]; }

  static void put_number(const regard_tensor& t, const Row<T>& row, T number) {
    *const_cast<T*>(real_row<T>(t, row.b, row.h, row.i)) = number;
  }
};

}  // namespace

int dot_statistics(const regard_dot& p, const regard_dot_statistics& result) {
  return with_score(p, [&](auto kind) {
    using Kind = decltype(kind);
    return Statistics<typename Kind::Real, typename Kind::Score>(p, result).run();
  });
}

}  // namespace regard::REGARD_ISA
