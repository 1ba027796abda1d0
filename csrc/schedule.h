// Which keys a block of query rows visits, in which order, and how the work is shared among threads.
#pragma once
#include "memory.h"
#include "logits.h"

namespace regard::REGARD_ISA {

// Keys [j0, j1), at most one chunk; j0 is a multiple of a panel. `bits` are the 64 words of a tile, one for each row of
// the row tile, or null.
struct Step {
  int64_t j0, j1;
  const uint64_t* bits;
};

// The rows that share one key/value head are numbered through the heads of its group: row = (h - first head) * Q + i.
// A block is a piece of them. With a tile table it is one row tile, so that its rows share one list of runs.
struct Blocks {
  int64_t group, Q, rows_per_block, per_head, per_group;
  bool tiled;

  Blocks(const regard_dot& p, int64_t largest, int64_t wanted_blocks) {
    group = p.H / p.G;
    Q = p.Q;
    tiled = p.tiles.pointer != nullptr;
    if (tiled) {
      rows_per_block = REGARD_TILE;
      per_head = (Q + REGARD_TILE - 1) / REGARD_TILE;
      per_group = per_head * group;
      return;
    }
    const int64_t rows = group * Q, total = rows * p.B * p.G;
    int64_t size = least(largest, greatest<int64_t>(MR, round_up(total / greatest<int64_t>(1, wanted_blocks), MR)));
    const int64_t count = (rows + size - 1) / size;
    rows_per_block = least(size, round_up((rows + count - 1) / count, MR));
    per_head = 0;
    per_group = (rows + rows_per_block - 1) / rows_per_block;
  }

  int64_t first_row(int64_t block) const {
    return tiled ? block / per_head * Q + block % per_head * REGARD_TILE : block * rows_per_block;
  }
  int64_t row_count(int64_t block) const {
    const int64_t end = tiled ? Q : group * Q, at = tiled ? block % per_head * REGARD_TILE : block * rows_per_block;
    return least(rows_per_block, end - at);
  }
};

// The keys that the rows of one strip see: all rows within [inner_lo, inner_hi), some within [lo, hi).
struct Span {
  int64_t lo, hi, inner_lo, inner_hi;
};

template <class T> Span span_of(const Row<T>* rows, int count, int64_t keys) {
  Span s{keys, 0, 0, keys};
  for (int r = 0; r < count; ++r) {
    if (rows[r].start < rows[r].stop) {
      s.lo = least(s.lo, rows[r].start);
      s.hi = greatest(s.hi, rows[r].stop);
    }
    s.inner_lo = greatest(s.inner_lo, rows[r].start);
    s.inner_hi = least(s.inner_hi, rows[r].stop);
  }
  if (s.lo >= s.hi) s.lo = s.hi = 0;
  return s;
}

// The columns of a step that a strip has to compute, in whole panels, and whether some of them are hidden from some row.
struct Columns {
  int64_t lo, hi;
  bool hidden;
};

template <class T> Columns columns_of(const Span& span, const Step& step, const uint64_t* words, int count) {
  int64_t lo = greatest(span.lo, step.j0) - step.j0, hi = least(span.hi, step.j1) - step.j0;
  bool all = true;
  if (words) {
    uint64_t any = 0, each = ~uint64_t(0);
    for (int r = 0; r < count; ++r) any |= words[r], each &= words[r];
    if (!any) return {0, 0, false};
    lo = greatest<int64_t>(lo, __builtin_ctzll(any));
    hi = least<int64_t>(hi, 64 - __builtin_clzll(any));
    all = each == ~uint64_t(0);
  }
  if (lo >= hi) return {0, 0, false};
  lo = lo / NR<T> * NR<T>;
  hi = round_up(hi, NR<T>);
  return {lo, hi, !all || step.j0 + lo < span.inner_lo || step.j0 + hi > span.inner_hi};
}

// Of the columns [lo, hi) that a strip computed, in whole panels, those that one of its rows may see: a product over keys
// takes any number of them.
struct VisibleColumns {
  int64_t lo, hi;
  int64_t count() const { return hi - lo; }
  bool meets(int64_t from, int64_t to) const { return lo < to && from < hi; }
};

inline VisibleColumns visible_columns(const Span& span, int64_t j0, int64_t lo, int64_t hi) {
  return {greatest(lo, span.lo - j0), least(hi, span.hi - j0)};
}

// The panels of [lo, hi), without halves of which nothing is seen. What is left out is hidden from all rows.
template <class T> Panels panels_of(const VisibleColumns& seen, int64_t lo, int64_t hi) {
  return {(hi - lo) / NR<T>, seen.lo >= lo + lanes<T>, seen.hi <= hi - lanes<T>};
}

// Calls f(step) for every piece of keys in [from, to) that row tile `tile` of head (b, h) may visit.
template <class F>
void for_each_tile_step(const regard_dot& p, int64_t b, int64_t h, int64_t tile, int64_t from, int64_t to,
                        int64_t chunk, F&& f) {
  const regard_tiles& t = p.tiles;
  const int64_t at = b * t.stride[0] + h * t.stride[1] + tile;
  int64_t run = t.pointer[at], last = t.pointer[at + 1];
  // Runs ascend: skip those that end before `from` by halving.
  for (int64_t n = last - run; n > 0;) {
    const int64_t half = n / 2;
    if (int64_t(t.stop[run + half]) * REGARD_TILE <= from) run += half + 1, n -= half + 1;
    else n = half;
  }
  for (; run < last; ++run) {
    const int64_t start = greatest<int64_t>(from, int64_t(t.start[run]) * REGARD_TILE);
    const int64_t stop = least<int64_t>(least(to, p.K), int64_t(t.stop[run]) * REGARD_TILE);
    if (int64_t(t.start[run]) * REGARD_TILE >= to) break;
    const bool full = t.bits_index[run] < 0;
    const int64_t size = full ? chunk : int64_t(REGARD_TILE);
    for (int64_t j = start; j < stop; j += size) {
      const uint64_t* bits = nullptr;
      if (!full) bits = t.bits + REGARD_TILE * (t.bits_index[run] + j / REGARD_TILE - t.start[run]);
      f(Step{j, least(stop, j + size), bits});
    }
  }
}

// The same for rows that see intervals; [lo, hi) is what any of them sees. The chunks are about equal in size.
template <class T, class F> void for_each_interval_step(int64_t lo, int64_t hi, int64_t chunk, F&& f) {
  lo = lo / NR<T> * NR<T>;
  if (lo >= hi) return;
  const int64_t steps = (hi - lo + chunk - 1) / chunk;
  const int64_t size = round_up((hi - lo + steps - 1) / steps, NR<T>);
  for (int64_t j = lo; j < hi; j += size) f(Step{j, least(hi, j + size), nullptr});
}

// The first unit of piece `piece` of `pieces` of equal cost, in a sequence of units whose costs add up to total[units].
inline int64_t share(const double* total, int64_t units, int64_t piece, int64_t pieces) {
  const double goal = total[units] * double(piece) / double(pieces);
  int64_t lo = 0, hi = units;
  while (lo < hi) {
    const int64_t middle = lo + (hi - lo) / 2;
    // A unit belongs to the piece in which its middle lies.
    if (0.5 * (total[middle] + total[middle + 1]) < goal) lo = middle + 1;
    else hi = middle;
  }
  return lo;
}

// How many keys the rows of a block see, summed over strips, plus a little for what every strip costs.
template <class T> double block_cost(const regard_dot& p, const Blocks& blocks, int64_t b, int64_t g, int64_t block) {
  const int64_t first = blocks.first_row(block), count = blocks.row_count(block);
  const double strips = double((count + MR - 1) / MR);
  if (blocks.tiled) {
    int64_t keys = 0;
    for_each_tile_step(p, b, g * blocks.group + first / p.Q, first % p.Q / REGARD_TILE, 0, p.K, p.K,
                       [&](const Step& s) { keys += s.j1 - s.j0; });
    return strips * double(keys + 32);
  }
  if (!p.intervals.start) return strips * double(p.K + 32);
  double cost = 0;
  for (int64_t r = 0; r < count; r += MR) {
    int64_t lo = p.K, hi = 0;
    for (int64_t row = first + r; row < first + least(count, r + MR); ++row) {
      const int64_t at = b * p.intervals.stride[0] + (g * blocks.group + row / p.Q) * p.intervals.stride[1] +
                         row % p.Q * p.intervals.stride[2];
      if (p.intervals.start[at] >= p.intervals.stop[at]) continue;
      lo = least<int64_t>(lo, p.intervals.start[at]);
      hi = greatest<int64_t>(hi, p.intervals.stop[at]);
    }
    cost += double(greatest<int64_t>(0, least(hi, p.K) - greatest<int64_t>(0, lo)) + 32);
  }
  return cost;
}

}  // namespace regard::REGARD_ISA
