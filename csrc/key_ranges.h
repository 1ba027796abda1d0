// Runs of keys: whose weights are summed.
#pragma once
#include "simd.h"

namespace regard::REGARD_ISA {

// Run n is start[n] .. stop[n], or the single key start[n] where stop is null. They ascend and do not overlap.
struct KeyRanges {
  const int64_t *start, *stop;
  int64_t count;

  int64_t end(int64_t n) const { return stop ? stop[n] : start[n] + 1; }

  // The first run that ends behind a key; the first that begins at it or later.
  int64_t ending_behind(int64_t key) const {
    return first([&](int64_t n) { return end(n) > key; });
  }
  int64_t beginning_from(int64_t key) const {
    return first([&](int64_t n) { return start[n] >= key; });
  }

 private:
  template <class F> int64_t first(F&& holds) const {
    int64_t lo = 0, hi = count;
    while (lo < hi) {
      const int64_t middle = lo + (hi - lo) / 2;
      if (holds(middle)) hi = middle;
      else lo = middle + 1;
    }
    return lo;
  }
};

}  // namespace regard::REGARD_ISA
