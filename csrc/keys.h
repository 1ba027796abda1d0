// The keys and values of one key/value head in packed form. Panels are packed when first visited.
#pragma once
#include "pairs.h"
#include "schedule.h"

namespace regard::REGARD_ISA {

// Keys that hold NaN or an infinity, in their key or in their value, are *bad*. Where a mask may hide them they are
// packed as zeros and remembered: a row that sees one becomes NaN, any other row is untouched.
template <class T, class A = T> struct PackedKeys {
  A* transposed;                       // keys, NR side by side: [panel][depth][NR]
  A* values;                           // [E / NR][pitch][NR]
  uint8_t* ready;                      // one for each panel
  uint32_t* bad;                       // one bit for each key of a panel
  int64_t panels, pitch, depth, D, E;  // pitch and depth: operands of all keys, and of a key
  bool checks, any_bad;
  T longest;  // the largest sum of squares of a key that was packed, if requested; infinity if it is not known
  bool measures;
  bool direct;  // values are read where they lie: few rows use them, so that packing would not pay; until one is bad

  struct Places {
    size_t transposed, values, ready, bad;
  };

  static int64_t panels_of(const regard_dot& p) { return (p.K + NR<T> - 1) / NR<T>; }
  // One panel more than needed: powers of two would put all column panels of a key into one cache set.
  static int64_t pitch_of(const regard_dot& p) { return (panels_of(p) + 1) * NR<T> / terms<A>; }

  static Places place(const regard_dot& p, Layout& layout) {
    const int64_t panels = panels_of(p);
    return {layout.add(panels * NR<T>, row_operands<A>(p.D), sizeof(A)),
            layout.add(pitch_of(p), round_up(p.E, NR<T>), sizeof(A)), layout.add(panels, 1, 1),
            layout.add(panels, 1, 4)};
  }

  // Whether values can be read where they lie.
  static bool values_fit(const regard_dot& p) {
    return terms<A> == 1 && p.kv_dtype == (sizeof(T) == 8 ? REGARD_FLOAT64 : REGARD_FLOAT32) && p.v.stride[3] == 1 &&
           p.E % NR<T> == 0;
  }

  PackedKeys(const regard_dot& p, char* memory, const Places& at, bool measures, bool direct)
      : transposed((A*)(memory + at.transposed)), values((A*)(memory + at.values)),
        ready((uint8_t*)(memory + at.ready)), bad((uint32_t*)(memory + at.bad)), panels(panels_of(p)),
        pitch(pitch_of(p)), depth(row_operands<A>(p.D)), D(p.D), E(p.E), checks(p.intervals.start || p.tiles.pointer),
        any_bad(false), longest(infinity), measures(measures), direct(direct) {}

  void forget() {
    __builtin_memset(ready, 0, size_t(panels));
    any_bad = false;
    longest = measures ? T(0) : T(infinity);
  }

  template <class Score>
  void need(const Score& score, const Matrix& k, const Matrix& v, T factor, int64_t from, int64_t to) {
    const int64_t first = from / NR<T>, last = (to + NR<T> - 1) / NR<T>;
    for (int64_t panel = first; direct && checks && panel < last; ++panel)
      if (!ready[panel] && panel_is_bad<T>(v, panel * NR<T>)) {
        direct = false;  // from now on values are packed, also those of panels that have only keys so far
        __builtin_memset(ready, 0, size_t(panels));
      }
    for (int64_t panel = first; panel < last; ++panel)
      if (!ready[panel]) {
        pack(k, v, factor, panel);
        score.ready_keys(transposed + panel * NR<T> * depth);
      }
  }

  const A* transposed_at(int64_t key) const { return transposed + key * depth; }

  // The values from a key on, the first of an operand, as the right side of a product.
  struct Values {
    const A* first;
    int64_t panel, row;
  };
  Values values_at(int64_t key, const Matrix& v) const {
    if (direct) return {at<A>(v, key, 0), NR<T>, v.row_stride};
    return {values + key / terms<A> * NR<T>, pitch * NR<T>, NR<T>};
  }

 private:
  __attribute__((noinline)) void pack(const Matrix& k, const Matrix& v, T factor, int64_t panel) {
    const int64_t key = panel * NR<T>;
    fetch_rows(k, key + NR<T>, NR<T>);
    fetch_rows(v, key + NR<T>, NR<T>);
    A* const transposed_panel = transposed + key * depth;
    A* const value_rows = values + key / terms<A> * NR<T>;
    bool non_finite = pack_transposed(k, key, factor, transposed_panel);
    if (!direct) non_finite |= pack_panels(v, key, NR<T>, value_rows, pitch * NR<T>);
    ready[panel] = 1;
    bad[panel] = 0;
    if (measures) longest = non_finite ? T(infinity) : greatest(longest, longest_square(transposed_panel, factor));
    if (!non_finite || !checks) return;
    for (int64_t lane = 0; lane < NR<T> && key + lane < k.rows; ++lane) {
      if (!row_is_bad<T>(k, key + lane) && !row_is_bad<T>(v, key + lane)) continue;
      for (int64_t d = 0; d < D; ++d) clear_term(transposed_panel + d / terms<A> * NR<T> + lane, d);
      for (int64_t e = 0; e < E; e += NR<T>)
        for (int c = 0; c < NR<T>; ++c) clear_term(value_rows + e * pitch + lane / terms<A> * NR<T> + c, lane);
      bad[panel] |= uint32_t(1) << lane;
      any_bad = true;
    }
  }

  // Of the keys times the factor, which packed numbers have already and pairs have not.
  T longest_square(const A* panel, T factor) const {
    Vec<T> left{}, right{};
    for (int64_t d = 0; d < depth; ++d) {
      const Vec<A> x = load(panel + d * NR<T>), y = load(panel + d * NR<T> + lanes<T>);
      left = add_product(left, x, x);
      right = add_product(right, y, y);
    }
    const T square = reduce_max<T>(max(left, right));
    return terms<A> == 1 ? square : square * factor * factor;
  }
};

// Whether a row sees a bad key among the columns [lo, hi) of a step.
template <class T, class A>
bool attends_bad_key(const PackedKeys<T, A>& keys, const Row<T>& row, const uint64_t* word, int64_t j0, int64_t lo,
                     int64_t hi) {
  for (int64_t c = lo; c < hi; c += NR<T>) {
    const uint32_t bad = keys.bad[(j0 + c) / NR<T>];
    for (int lane = 0; bad && lane < NR<T>; ++lane)
      if ((bad >> lane & 1) && may_attend(row, word, j0, c + lane)) return true;
  }
  return false;
}

}  // namespace regard::REGARD_ISA
