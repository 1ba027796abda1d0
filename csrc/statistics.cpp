// What the rows of the weights are like, without the weights: one walk over the logits.
#include "runs.h"
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

// Sums are kept relative to the largest logit so far, lane by lane: of w = 2^(s - peak), of w * (s - peak), of w * |p - j|,
// and of w over chosen keys.
template <class T> struct Sums {
  Vec<T> mass, logit, distance, chosen;
  T peak;
};

template <class T, class Score> struct Statistics : Strips<T, Statistics<T, Score>, Score> {
  using Base = Strips<T, Statistics<T, Score>, Score>;
  using Base::layout, Base::p, Base::strips;
  const regard_dot_statistics& result;
  const int64_t top;
  const Runs chosen;

  struct Places { size_t sums, top_logits, top_keys; } at;

  // A number of blocks that does not depend on the threads: their number does not change the bits of the result.
  Statistics(const regard_dot& p, const regard_dot_statistics& result)
      : Base(p, 64), result(result), top(result.top), chosen{result.chosen_start, result.chosen_stop, result.chosen_count} {
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
      room.sums[r] = Sums<T>{Vec<T>{}, Vec<T>{}, Vec<T>{}, Vec<T>{}, T(-infinity)};
      for (int64_t t = 0; t < top; ++t) {
        room.top_logits[r * top + t] = -infinity;
        room.top_keys[r * top + t] = -1;
      }
    }
  }

  void take(Room& room, const Walk<T>& w, int64_t s, int m, int64_t j0, int64_t lo, int64_t hi) const {
    const int64_t first = chosen.ending_behind(j0 + lo), last = chosen.beginning_from(j0 + hi);
    for (int r = 0; r < m; ++r) {
      const T* logits = w.scores + r * chunk;
      const Row<T>& row = w.rows[s * MR + r];
      Sums<T>& sums = room.sums[s * MR + r];
      const T largest = add(sums, logits, T(double(p.offset[row.b]) + double(row.i - j0)), lo, hi);
      if (result.mass.data)
        for (int64_t n = first; n < last; ++n)
          add_chosen(sums, logits, greatest(chosen.start[n] - j0, lo), least(chosen.end(n) - j0, hi));
      if (top && largest > room.top_logits[(s * MR + r) * top + top - 1]) keep_largest(room, s * MR + r, logits, j0, lo, hi);
    }
  }

  // `place` is where the query stands, counted from column 0. Returns the largest logit of these columns. Not inlined: it
  // takes all the registers, and amid others its sums would wait for memory in every step.
  __attribute__((noinline)) static T add(Sums<T>& sums, const T* logits, T place, int64_t lo, int64_t hi) {
    using V = Vec<T>;
    V peaks = broadcast(T(-infinity));  // panels are two vectors wide: half the steps wait for one another
    for (int64_t c = lo; c < hi; c += NR<T>) peaks = max(peaks, max(load(logits + c), load(logits + c + lanes<T>)));
    const T largest = reduce_max<T>(peaks), before = sums.peak, peak = greatest(before, largest);
    const V top = broadcast(greatest(peak, no_peak<T>));
    // Far below the peak a weight is exactly 0, and times a finite number it stays so.
    const V far = broadcast(T(-2000));
    V mass{}, logit{}, distance{}, key = __builtin_convertvector(lane_numbers<IntVec<T>>(), V) + (T(lo) - place);
    for (int64_t c = lo; c < hi; c += lanes<T>) {
      const V x = max(far, load(logits + c) - top), weight = exp2(x);
      mass += weight;
      logit += weight * x;
      distance += weight * absolute(key);
      key += T(lanes<T>);
    }
    if (peak != before) {
      const V shift = max(far, before - top), shrink = exp2(shift);
      sums.logit = (sums.logit + sums.mass * shift) * shrink;
      sums.mass *= shrink;
      sums.distance *= shrink;
      sums.chosen *= shrink;
    }
    sums.logit += logit;
    sums.mass += mass;
    sums.distance += distance;
    sums.peak = peak;
    return largest;
  }

  static void add_chosen(Sums<T>& sums, const T* logits, int64_t from, int64_t to) {
    const Vec<T> top = broadcast(greatest(sums.peak, no_peak<T>)), number = __builtin_convertvector(lane_numbers<IntVec<T>>(), Vec<T>);
    for (int64_t c = from / lanes<T> * lanes<T>; c < to; c += lanes<T>)
      sums.chosen += select((number >= T(from - c)) & (number < T(to - c)), exp2(load(logits + c) - top), Vec<T>{});
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
      double part = double(reduce_add<T>(sums.chosen)), mass = seen, logit = double(reduce_add<T>(sums.logit)), peak = double(greatest(sums.peak, no_peak<T>));
      if (p.sink) {
        const double sink = double(((const T*)p.sink)[row.h]) * log2_e, top = greatest(peak, sink);
        const double shrink = power(peak - top), own = power(sink - top);
        logit = (logit + mass * greatest(peak - top, -2000.0)) * shrink + own * (sink - top);
        mass = mass * shrink + own;
        part *= shrink;
        peak = top;
      }
      const double logs = mass > 0 ? log2(broadcast(mass))[0] : 0;
      T lse = T((peak + logs) * ln_2), entropy = T(greatest(0.0, logs - logit / mass) * ln_2);
      T distance = T(away / seen), chosen_mass = T(part / mass), largest = sums.peak * T(ln_2);
      if (!(seen > 0)) distance = 0;
      if (mass == 0) lse = -infinity, entropy = chosen_mass = 0;
      if (w.poisoned[r] || mass != mass) lse = entropy = distance = chosen_mass = largest = T(__builtin_nanf(""));
      put_number(result.lse, row, lse);
      put_number(result.entropy, row, entropy);
      put_number(result.max_logit, row, largest);
      put_number(result.distance, row, distance);
      if (result.mass.data) put_number(result.mass, row, chosen_mass);
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
