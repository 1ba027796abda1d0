// Statistics of the rows of the weights in one pass over the logits, without storing weights.
#include "key_ranges.h"
#include "strips.h"

namespace regard::REGARD_ISA {
namespace {

// Sums are kept relative to a zero near the largest logit so far, lane by lane: of w = 2^(s - zero), of w * (s - zero), of
// w * |p - j|, and of w over chosen keys.
template <class T> struct Sums {
  Vec<T> mass, logit, distance, chosen;
  T zero, peak;
};

// How far a logit may exceed the zero before the zero is moved: far enough that this is rare and no sum loses digits.
template <class T> constexpr T rise = 2;

template <class T, class Score> struct Statistics : Strips<T, Statistics<T, Score>, Score> {
  using Base = Strips<T, Statistics<T, Score>, Score>;
  using Base::layout, Base::p, Base::strips;
  const regard_dot_statistics& result;
  const int64_t top;
  const KeyRanges chosen;

  struct Places {
    size_t sums, top_logits, top_keys;
  } at;

  // The number of blocks does not depend on that of the threads, so the bits of the result do not either.
  Statistics(const regard_dot& p, const regard_dot_statistics& result)
      : Base(p, 64), result(result), top(result.top),
        chosen{result.chosen_start, result.chosen_stop, result.chosen_count} {
    this->measures = false;
    at.sums = layout.add(strips * MR, 1, sizeof(Sums<T>));
    at.top_logits = layout.add(strips * MR, top, sizeof(T));
    at.top_keys = layout.add(strips * MR, top, sizeof(int64_t));
  }

  struct Workspace {
    Sums<T>* sums;
    T* top_logits;  // of each row, largest first
    int64_t* top_keys;
  };
  Workspace workspace(char* memory) const {
    return {(Sums<T>*)(memory + at.sums), (T*)(memory + at.top_logits), (int64_t*)(memory + at.top_keys)};
  }

  void start_strip(Workspace& workspace, int64_t s) const {
    for (int64_t r = s * MR; r < (s + 1) * MR; ++r) {
      workspace.sums[r] = Sums<T>{Vec<T>{}, Vec<T>{}, Vec<T>{}, Vec<T>{}, T(-infinity), T(-infinity)};
      for (int64_t t = 0; t < top; ++t) {
        workspace.top_logits[r * top + t] = -infinity;
        workspace.top_keys[r * top + t] = -1;
      }
    }
  }

  bool consume(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m, int64_t j0, int64_t lo,
               int64_t hi) const {
    const int64_t first = chosen.ending_behind(j0 + lo), last = chosen.beginning_from(j0 + hi);
    for (int r = 0; r < m; ++r) {
      const T* logits = w.scores + r * chunk;
      const Row<T>& row = w.rows[s * MR + r];
      Sums<T>& sums = workspace.sums[s * MR + r];
      const Vec<T> peaks = add(sums, logits, T(double(p.offset[row.b]) + double(row.i - j0)), lo, hi);
      if (result.mass.data)
        for (int64_t n = first; n < last; ++n)
          add_chosen(sums, logits, greatest(chosen.start[n] - j0, lo), least(chosen.end(n) - j0, hi));
      if (top && any_lane(peaks > workspace.top_logits[(s * MR + r) * top + top - 1]))
        keep_largest(workspace, s * MR + r, logits, peaks, j0, lo, hi);
    }
    return true;
  }

  // `place` is the position of the query, counted from column 0. Returns the largest logit of every lane. Not inlined,
  // because it needs all registers: inlined, its sums would be stored and loaded in every step.
  __attribute__((noinline)) static Vec<T> add(Sums<T>& sums, const T* logits, T place, int64_t lo, int64_t hi) {
    using V = Vec<T>;
    const V first = __builtin_convertvector(lane_numbers<IntVec<T>>(), V) + (T(lo) - place);
    // Far below the peak a weight is exactly 0, also when multiplied by a finite number.
    const V far = broadcast(least_exponent<T>), round = broadcast(rounder<T>);
    if (sums.zero == T(-infinity)) {
      V peaks = broadcast(T(-infinity));
      for (int64_t c = lo; c < hi; c += lanes<T>) peaks = max(peaks, load(logits + c));
      sums.zero = reduce_max<T>(peaks);
    }
    for (;;) {
      const V zero = broadcast(greatest(sums.zero, no_peak<T>));
      V mass{}, logit{}, distance{}, key = first, peaks = broadcast(T(-infinity));
      for (int64_t c = lo; c < hi; c += lanes<T>) {
        const V s = load(logits + c), x = max(far, s - zero), weight = exp2_within(x, round);
        peaks = max(peaks, s);
        mass += weight;
        logit += weight * x;
        distance += weight * absolute(key);
        key += T(lanes<T>);
      }
      const T largest = reduce_max<T>(peaks);
      if (largest > sums.zero + rise<T>) {
        move_zero(sums, largest);
        continue;
      }
      sums.logit += logit;
      sums.mass += mass;
      sums.distance += distance;
      sums.peak = greatest(sums.peak, largest);
      return peaks;
    }
  }

  __attribute__((noinline, cold)) static void move_zero(Sums<T>& sums, T zero) {
    const Vec<T> shift = max(broadcast(least_exponent<T>), broadcast(sums.zero - zero)), shrink = exp2(shift);
    sums.logit = (sums.logit + sums.mass * shift) * shrink;
    sums.mass *= shrink;
    sums.distance *= shrink;
    sums.chosen *= shrink;
    sums.zero = zero;
  }

  static void add_chosen(Sums<T>& sums, const T* logits, int64_t from, int64_t to) {
    const Vec<T> top = broadcast(greatest(sums.zero, no_peak<T>)),
                 number = __builtin_convertvector(lane_numbers<IntVec<T>>(), Vec<T>);
    for (int64_t c = from / lanes<T> * lanes<T>; c < to; c += lanes<T>)
      sums.chosen += select((number >= T(from - c)) & (number < T(to - c)), exp2(load(logits + c) - top), Vec<T>{});
  }

  // Few logits exceed the smallest kept one, so most of them cost one comparison. `peaks` are the largest logits of each
  // lane: at the start, when nothing is kept, they give a first lower bound for the logits to keep.
  void keep_largest(Workspace& workspace, int64_t r, const T* logits, Vec<T> peaks, int64_t j0, int64_t lo,
                    int64_t hi) const {
    T* kept = workspace.top_logits + r * top;
    int64_t* keys = workspace.top_keys + r * top;
    T least = -infinity;
    if (kept[top - 1] == T(-infinity) && top <= lanes<T>)
      for (int64_t t = 0; t < top; ++t) {
        least = reduce_max<T>(peaks);
        peaks = select(peaks == least, broadcast(T(-infinity)), peaks);
      }
    for (int64_t c = lo; c < hi; c += lanes<T>) {
      const Vec<T> x = load(logits + c);
      for (uint32_t above = lane_bits((x >= least) & (x > kept[top - 1])); above; above &= above - 1) {
        const int64_t lane = c + __builtin_ctz(above);
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

  void finish(Workspace& workspace, const ThreadState<T>& w, int64_t s, int m) const {
    for (int64_t r = s * MR; r < s * MR + m; ++r) {
      const Row<T>& row = w.rows[r];
      const Sums<T>& sums = workspace.sums[r];
      const double seen = double(reduce_add<T>(sums.mass)), away = double(reduce_add<T>(sums.distance));
      double part = double(reduce_add<T>(sums.chosen)), mass = seen, logit = double(reduce_add<T>(sums.logit)),
             peak = double(greatest(sums.zero, no_peak<T>));
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
        const T x = workspace.top_logits[r * top + t];
        result.top_keys[first + t] = workspace.top_keys[r * top + t];
        ((T*)result.top_weights)[first + t] =
            x == T(-infinity) || lse != lse ? T(0) : T(power(double(x) - (peak + logs)));
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
