// Attention, backward, from the log-sum-exp: the weights of a tile are computed again, never stored.
//
// Key tiles are the outer loop and blocks of query rows the inner one. For each pair of them, with S and G two buffers:
//   S = weights (after dropout), G = gradient of the scores;   dV += S' dO, and for products dK += G' Q, dQ += G K.
// A thread owns a run of (batch, key/value head, key tile). Where the tiles of one head go to several threads, each adds
// into a private dQ, and these are summed in thread order: the same number of threads gives the same bits.
#include "head_rows.h"

namespace regard::REGARD_ISA {
namespace {

template <class T, class Score> struct Backward {
  using A = typename Score::Operand;
  const regard_dot& p;
  const regard_dot_gradient& gradient;
  const Scales<T> scales;
  Score score;
  const int64_t group, Dp, Ep;  // heads that share a key/value head; D and E in whole panels
  const int64_t tiles;          // key tiles of a head
  const int64_t block_rows, blocks;
  const int64_t table;      // entries of a row of d_row_table
  const int64_t diagonals;  // numbers in all of d_diagonal
  const int64_t all_rows;   // of dQ: products write whole tiles
  const int64_t per_head;   // numbers in dQ, d_row_table and the sums of the score of one head
  const int64_t part;       // numbers in one thread's share of them for one key/value head
  RowGradients<T> row_gradients;

  struct Places {
    typename HeadRows<T, A>::Places rows;
    size_t reach, keys, values, key_panels, d_keys, d_values, scores, grads, grad_pairs, extra, d_queries;
  } at;
  Layout layout;
  Buffer costs, parts, diagonal_sums;
  int threads_used = 1;

  Backward(const regard_dot& p, const regard_dot_gradient& gradient)
      : p(p), gradient(gradient), scales(p), score(p), group(p.H / p.G), Dp(round_up(p.D, NR<T>)),
        Ep(round_up(p.E, NR<T>)), tiles(greatest<int64_t>(1, (p.K + key_tile - 1) / key_tile)),
        block_rows(p.tiles.pointer ? int64_t(REGARD_TILE) : rows_of(p)), blocks((p.Q + block_rows - 1) / block_rows),
        table(gradient.d_row_table.data ? 2 * p.radius + 1 : 0),
        diagonals(gradient.d_diagonal.data ? diagonal_heads(p, gradient) * (p.Q + p.K - 1) : 0),
        all_rows(has_amx ? round_up(p.Q, MR) : p.Q), per_head(all_rows * (Dp + table) + score.sums()),
        part(group * per_head), row_gradients(p, gradient, scales) {
    at.rows = HeadRows<T, A>::place(p, layout);
    at.reach = layout.add(blocks, 1, sizeof(VisibleColumns));
    at.keys = layout.add(key_tile, row_operands<A>(p.D), sizeof(A));
    at.values = layout.add(key_tile, row_operands<A>(p.E), sizeof(A));
    at.key_panels = layout.add(key_pitch, Dp, sizeof(A));
    const int64_t kept = group > 1 ? tiles : 1;
    at.d_keys = layout.add(kept * (key_tile + MR), Dp, sizeof(T));
    at.d_values = layout.add(kept * (key_tile + MR), Ep, sizeof(T));
    at.scores = layout.add(block_rows + MR, score_stride, sizeof(T));
    at.grads = layout.add(block_rows + MR, score_stride, sizeof(T));
    at.grad_pairs = layout.add(terms<A> > 1 ? block_rows + MR : 0, score_stride / 2, sizeof(A));
    at.extra = layout.add(score_stride, 1, sizeof(T));
    at.d_queries = layout.add(per_head + MR * (Dp + table), 1, sizeof(T));
  }

  // Blocks of rows and a key tile share the second-level cache with the gradients of that tile. A short sequence is one block:
  // its gradients are then added up once.
  static int64_t rows_of(const regard_dot& p) {
    if (p.Q <= most_rows) return round_up(greatest<int64_t>(1, p.Q), MR);
    if (has_amx) return most_rows;
    return (p.D + p.E) * int64_t(sizeof(T)) <= 640 ? 96 / MR * MR : 48 / MR * MR;
  }

  static int64_t diagonal_heads(const regard_dot& p, const regard_dot_gradient& g) {
    return (g.d_diagonal.stride[0] ? p.B : 1) * (g.d_diagonal.stride[1] ? p.H : 1);
  }

  static constexpr int64_t key_pitch = (key_tile + NR<T>) / terms<A>;  // operands of the rows of a tile

  struct Work {
    HeadRows<T, A> rows;
    VisibleColumns* reach;  // of each block, from the first key that one of its rows may see to the last
    A *keys, *values, *key_panels;
    T *d_keys, *d_values, *scores, *grads;
    A* grad_pairs;  // rows of gradients, where products take pairs
    T *extra, *d_queries, *d_table, *sums, *diagonal;
    Prefetcher prefetcher;
  };

  int run() {
    if (const int status = score.prepare(p)) return status;
    // Heads that add to the same numbers of d_bias run in successive rounds: in a round, a key tile has one thread.
    const int64_t heads = p.B * p.G;
    int64_t turn = heads;
    if (gradient.d_bias.data && gradient.d_bias.stride[0] == 0) turn = p.G;
    if (gradient.d_bias.data && gradient.d_bias.stride[1] == 0 && p.H > 1) turn = 1;

    Layout cost_layout, part_layout, diagonal_layout;
    cost_layout.add(turn * tiles + 1, 1, sizeof(double));
    part_layout.add(2 * int64_t(p.threads) * (p.threads > 1), part, sizeof(T));
    diagonal_layout.add(p.threads, diagonals, sizeof(T));
    if (!layout.ok || !cost_layout.ok || !part_layout.ok || !diagonal_layout.ok) return REGARD_TOO_LARGE;
    if (!costs.reserve(cost_layout.bytes) || !diagonal_sums.reserve(diagonal_layout.bytes)) return REGARD_NO_MEMORY;
    if (p.threads > 1 && !parts.reserve(part_layout.bytes)) return REGARD_NO_MEMORY;
    if (diagonals) __builtin_memset(diagonal_sums.data, 0, size_t(p.threads) * size_t(diagonals) * sizeof(T));

    row_gradients.clear_bias();
    for (int64_t first = 0; first < heads; first += turn) {
      const int64_t last = least(heads, first + turn);
      const int64_t units = (last - first) * tiles;
      double* total = (double*)costs.data;
      key_tile_costs<T>(p, first, last, tiles, total);
      auto body = [&](int thread, int threads) {
        if (thread == 0) threads_used = threads;
        const int64_t from = share(total, units, thread, threads), to = share(total, units, thread + 1, threads);
        return from < to ? run_units(first, from, to, thread) : REGARD_OK;
      };
      int status = parallel(int(least<int64_t>(p.threads, units)), body);
      if (status != REGARD_OK) return status;
      add_parts(first, last, total, units);
    }
    if (diagonals) store_diagonal();
    return REGARD_OK;
  }

  int run_units(int64_t first_head, int64_t from, int64_t to, int thread) const {
    char* memory = (char*)thread_scratch(layout.bytes);
    if (!memory) return REGARD_NO_MEMORY;
    const TileRegisters registers;
    Work w{HeadRows<T, A>(p, memory, at.rows),
           (VisibleColumns*)(memory + at.reach),
           (A*)(memory + at.keys),
           (A*)(memory + at.values),
           (A*)(memory + at.key_panels),
           (T*)(memory + at.d_keys),
           (T*)(memory + at.d_values),
           (T*)(memory + at.scores),
           (T*)(memory + at.grads),
           (A*)(memory + at.grad_pairs),
           (T*)(memory + at.extra),
           nullptr,
           nullptr,
           nullptr,
           nullptr,
           {}};
    for (int64_t unit = from; unit < to;) {
      const int64_t head = unit / tiles, first = unit % tiles, last = least(tiles, first + to - unit);
      T* own = (T*)(memory + at.d_queries);
      T* shared = part_of(thread, from, to, head);
      run_head(w, (first_head + head) / p.G, (first_head + head) % p.G, first, last, shared, own, thread);
      unit += last - first;
    }
    trim_thread_scratch();
    return REGARD_OK;
  }

  // Where a thread gathers the dQ of a head of which it has only some tiles (its first and its last one may be such), or
  // null if it has them all.
  T* part_of(int thread, int64_t from, int64_t to, int64_t head) const {
    if (from <= head * tiles && (head + 1) * tiles <= to) return nullptr;
    return (T*)parts.data + (2 * thread + (head == from / tiles ? 0 : 1)) * part;
  }

  void run_head(Work& w, int64_t b, int64_t g, int64_t first, int64_t last, T* shared, T* own, int thread) const {
    for (int64_t n = 0; n < group; ++n) {
      const int64_t h = g * group + n;
      w.d_queries = shared ? shared + n * per_head : own;
      w.d_table = w.d_queries + all_rows * Dp;
      w.sums = w.d_table + all_rows * table;
      __builtin_memset(w.d_queries, 0, size_t(per_head) * sizeof(T));
      if (diagonals) {
        const int64_t at = (gradient.d_diagonal.stride[0] ? b : 0) * (gradient.d_diagonal.stride[1] ? p.H : 1) +
                           (gradient.d_diagonal.stride[1] ? h : 0);
        w.diagonal = (T*)diagonal_sums.data + thread * diagonals + at * (p.Q + p.K - 1);
      }
      w.rows.load(score, p, gradient, b, h);
      prefetch_head(w.prefetcher, b, h, last - first);
      find_reach(w);
      for (int64_t tile = first; tile < last; ++tile) run_tile(w, b, g, n, tile, group > 1 ? tile - first : 0);
      if (!shared) store_queries(b, h, w.d_queries);
    }
  }

  // Prefetched while a head is computed: the inputs of the next head, and the gradients that this one writes.
  void prefetch_head(Prefetcher& prefetcher, int64_t b, int64_t h, int64_t own_tiles) const {
    const int64_t next = b * p.H + h + 1, b1 = next / p.H, h1 = next % p.H;
    prefetcher.reset(3 * own_tiles * HeadRows<T, A>::strips_of(p));
    prefetcher.add(matrix_of(gradient.d_q, p.dtype, b, h, p.Q, p.D));
    prefetcher.add(matrix_of(gradient.d_k, p.dtype, b, h / group, p.K, p.D));
    prefetcher.add(matrix_of(gradient.d_v, p.dtype, b, h / group, p.K, p.E));
    if (b1 == p.B) return;
    prefetcher.add(matrix_of(p.q, p.dtype, b1, h1, p.Q, p.D));
    prefetcher.add(matrix_of(gradient.out, p.dtype, b1, h1, p.Q, p.E));
    prefetcher.add(matrix_of(gradient.d_out, p.dtype, b1, h1, p.Q, p.E));
    prefetcher.add(matrix_of(p.k, p.dtype, b1, h1 / group, p.K, p.D));
    prefetcher.add(matrix_of(p.v, p.dtype, b1, h1 / group, p.K, p.E));
  }

  void find_reach(Work& w) const {
    for (int64_t n = 0; n < blocks; ++n) {
      w.reach[n] = {p.K, 0};
      const int64_t end = least(p.Q, (n + 1) * block_rows);
      for (int64_t s = w.rows.strip_at(n * block_rows); s <= w.rows.strip_at(end - 1); ++s)
        if (const Span& span = w.rows.spans[s]; span.lo < span.hi)
          w.reach[n] = {least(w.reach[n].lo, span.lo), greatest(w.reach[n].hi, span.hi)};
    }
  }

  void run_tile(Work& w, int64_t b, int64_t g, int64_t n, int64_t tile, int64_t slot) const {
    const int64_t j0 = tile * key_tile, j1 = least(p.K, j0 + key_tile), keys = j1 - j0;
    T* d_keys = w.d_keys + slot * (key_tile + MR) * Dp;
    T* d_values = w.d_values + slot * (key_tile + MR) * Ep;
    if (n == 0) {
      __builtin_memset(d_keys, 0, size_t((has_amx ? key_tile + MR : keys) * Dp) * sizeof(T));
      __builtin_memset(d_values, 0, size_t((has_amx ? key_tile + MR : keys) * Ep) * sizeof(T));
    }
    if (keys > 0 && p.Q > 0) {
      pack_tile(w, b, g, j0, keys);
      for (int64_t block = 0; block < blocks; ++block)
        if (w.reach[block].meets(j0, j1)) run_block(w, block * block_rows, j0, j1, d_keys, d_values);
    }
    if (n + 1 < group) return;
    const Matrix dk = matrix_of(gradient.d_k, p.dtype, b, g, p.K, p.D),
                 dv = matrix_of(gradient.d_v, p.dtype, b, g, p.K, p.E);
    store_keys(dk, dv, j0, keys, g, d_keys, d_values);
  }

  void pack_tile(Work& w, int64_t b, int64_t g, int64_t j0, int64_t keys) const {
    pack_keys(w, b, g, j0, keys);
    for (int64_t j = 0; j < keys; j += NR<T>) score.ready_keys(w.keys + j * row_operands<A>(p.D));
    score.ready_rows(w.key_panels, keys, key_pitch * NR<T>, T(1));
  }

  void pack_keys(Work& w, int64_t b, int64_t g, int64_t j0, int64_t keys) const {
    const Matrix k = matrix_of(p.k, p.dtype, b, g, p.K, p.D), v = matrix_of(p.v, p.dtype, b, g, p.K, p.E);
    bool bad = false;
    for (int64_t j = 0; j < keys; j += NR<T>) {
      bad |= pack_transposed(k, j0 + j, score.key_factor(scales.key), w.keys + j * row_operands<A>(p.D));
      bad |= pack_transposed(v, j0 + j, T(1), w.values + j * row_operands<A>(p.E));
      pack_panels(k, j0 + j, NR<T>, w.key_panels + j / terms<A> * NR<T>, key_pitch * NR<T>);
    }
    if (!bad || !(p.intervals.start || p.tiles.pointer)) return;
    // The rows that see a bad key have a NaN for log-sum-exp; for all others it must be harmless.
    for (int64_t j = 0; j < keys; ++j) {
      if (!row_is_bad<T>(row_of(k, j0 + j), p.D, k.column_stride, p.dtype) &&
          !row_is_bad<T>(row_of(v, j0 + j), p.E, v.column_stride, p.dtype))
        continue;
      const int64_t panel = j / NR<T> * NR<T>, lane = j % NR<T>;
      for (int64_t d = 0; d < p.D; ++d)
        clear_term(w.keys + panel * row_operands<A>(p.D) + d / terms<A> * NR<T> + lane, d);
      for (int64_t e = 0; e < p.E; ++e)
        clear_term(w.values + panel * row_operands<A>(p.E) + e / terms<A> * NR<T> + lane, e);
      clear_row<T>(w.key_panels + j / terms<A> * NR<T>, key_pitch * NR<T>, p.D, j);
    }
  }

  void run_block(Work& w, int64_t i0, int64_t j0, int64_t j1, T* d_keys, T* d_values) const {
    const int64_t count = least(block_rows, p.Q - i0);
    const int64_t width = round_up(j1 - j0, NR<T>);
    Step steps[key_tile / REGARD_TILE];  // a tile of bits, or a full run, is at least one tile wide
    int step_count = 0;
    if (p.tiles.pointer)
      for_each_tile_step(p, w.rows.rows[i0].b, w.rows.rows[i0].h, i0 / REGARD_TILE, j0, j1, key_tile,
                         [&](const Step& s) { steps[step_count++] = s; });
    else steps[step_count++] = Step{j0, j1, nullptr};
    if (step_count == 0) return;

    VisibleColumns seen[most_rows / MR];
    int strips = 0;
    bool any = false;
    for (int64_t r = 0; r < count; r += MR, ++strips) {
      seen[strips] = run_strip(w, i0, r, int(least<int64_t>(MR, count - r)), steps, step_count, j0, width);
      any |= seen[strips].lo < seen[strips].hi;
    }
    if (!any) return;

    for (int64_t c = 0; c < j1 - j0; c += MR) {
      w.prefetcher.prefetch_next();
      const int m = int(least<int64_t>(MR, j1 - j0 - c));
      int from = 0, to = strips;
      while (from < to && !seen[from].meets(c, c + m)) ++from;
      while (to > from && !seen[to - 1].meets(c, c + m)) --to;
      if (from < to) add_to_keys(w, i0, count, from, to, c, m, d_keys, d_values);
    }
    for (int s = 0; s < strips; ++s) {
      w.prefetcher.prefetch_next();
      if (seen[s].lo < seen[s].hi)
        add_to_queries(w, i0 + s * MR, s, int(least<int64_t>(MR, count - s * MR)), seen[s], d_keys);
    }
  }

#if defined(__AMX_BF16__)
  // Gradients of keys and values are kept as columns: then weights and gradients of logits, in pairs of rows, are the right side
  // of their products.
  static constexpr int64_t column = key_tile + 16;  // not a power of two

  void weight_gradients(int m, Panels panels, const A* grad_strip, const A* values, T* grads) const {
    const int64_t depth = row_operands<A>(p.E);
    multiply_tiles<false>(m, panels.count, depth / tile_rows, {grad_strip, depth}, {values, NR<T>, NR<T> * depth},
                          grads, score_stride);
  }

  // Of keys [c, c + m) of a tile and strips [from, to) of rows.
  void add_to_keys(const Work& w, int64_t i0, int64_t, int from, int to, int64_t c, int, T* d_keys, T* d_values) const {
    const int64_t r0 = from * MR, pitch = w.rows.pitch;
    const TileSide weights{(const A*)w.scores + r0 * score_stride + c, 2 * score_stride};
    const TileSide grads{(const A*)w.grads + r0 * score_stride + c, 2 * score_stride};
    const A *queries = w.rows.query_rows(i0 + r0), *d_out = w.rows.grad_rows(i0 + r0);
    for (int64_t e = 0; e < Ep; e += MR)
      multiply_tiles<true>(MR, 1, to - from, {d_out + e * pitch, pitch}, weights, d_values + e * column + c, column);
    for (int64_t d = 0; d < Dp; d += MR)
      multiply_tiles<true>(MR, 1, to - from, {queries + d * pitch, pitch}, grads, d_keys + d * column + c, column);
  }

  void add_to_queries(const Work& w, int64_t i, int s, int m, VisibleColumns seen, T*) const {
    const int64_t lo = seen.lo / NR<T>, steps = (seen.hi + NR<T> - 1) / NR<T> - lo;
    const TileSide grads{w.grad_pairs + s * MR * (score_stride / 2) + lo * tile_rows, score_stride / 2};
    const TileSide keys{w.key_panels + lo * tile_rows * NR<T>, NR<T>, key_pitch * NR<T>};
    multiply_tiles<true>(m, Dp / NR<T>, steps, grads, keys, w.d_queries + i * Dp, Dp);
  }

  void store_keys(const Matrix& dk, const Matrix& dv, int64_t j0, int64_t keys, int64_t, const T* d_keys,
                  const T* d_values) const {
    unpack_columns(dk, j0, keys, d_keys, column, scales.query);
    unpack_columns(dv, j0, keys, d_values, column, 1);
  }
#else
  void weight_gradients(int m, Panels panels, const A* grad_strip, const A* values, T* grads) const {
    const int64_t depth = operands<A>(p.E);
    multiply_wanted<T, 1, MR>(m, panels, depth, grad_strip, values, NR<T> * depth, grads, score_stride);
  }

  // Of keys [c, c + m) of a tile and strips [from, to) of rows.
  void add_to_keys(const Work& w, int64_t i0, int64_t count, int from, int to, int64_t c, int m, T* d_keys,
                   T* d_values) const {
    const int64_t r0 = from * MR, depth = operands<A>(least<int64_t>(count, to * MR) - r0);
    // Rows that share an operand are side by side at the place of the first.
    constexpr int step = terms<A> * score_stride;
    const A* weights = (const A*)w.scores + r0 * score_stride + c;
    multiply_wanted<T, 1, step, Into::add>(m, panels_of_columns<T>(p.E), depth, weights, w.rows.grad_rows(i0 + r0),
                                           w.rows.pitch * NR<T>, d_values + c * Ep, Ep);
    const A* grads = (const A*)w.grads + r0 * score_stride + c;
    if constexpr (Score::is_product)
      multiply_wanted<T, 1, step, Into::add>(m, panels_of_columns<T>(p.D), depth, grads, w.rows.query_rows(i0 + r0),
                                             w.rows.pitch * NR<T>, d_keys + c * Dp, Dp);
  }

  void add_to_queries(const Work& w, int64_t i, int s, int m, VisibleColumns seen, T* d_keys) const {
    const int64_t lo = seen.lo / terms<A>, keys = operands<A>(seen.hi) - lo;
    const A* key_rows = w.key_panels + lo * NR<T>;
    T* d_queries = w.d_queries + i * Dp;
    constexpr int row = score_stride / terms<A>;
    const A* grads = (terms<A> > 1 ? w.grad_pairs : (const A*)w.grads) + s * MR * row + lo;
    if constexpr (Score::is_product)
      multiply_wanted<T, row, 1, Into::add>(m, panels_of_columns<T>(p.D), keys, grads, key_rows, key_pitch * NR<T>,
                                            d_queries, Dp);
    else
      score.add_gradients(m, keys, {w.rows.query_rows(i), w.rows.pitch * NR<T>}, {key_rows, key_pitch * NR<T>}, grads,
                          score_stride, d_queries, d_keys + lo * Dp, w.sums);
  }

  void store_keys(const Matrix& dk, const Matrix& dv, int64_t j0, int64_t keys, int64_t g, T* d_keys,
                  const T* d_values) const {
    const T one = 1;
    for (int64_t j = 0; j < keys; ++j) score.finish_row(g * group, d_keys + j * Dp);
    unpack_rows<T>(dk, j0, keys, d_keys, Dp, &scales.query, 0);
    unpack_rows<T>(dv, j0, keys, d_values, Ep, &one, 0);
  }
#endif

  VisibleColumns run_strip(Work& w, int64_t i0, int64_t r0, int m, const Step* steps, int step_count, int64_t j0,
                           int64_t width) const {
    w.prefetcher.prefetch_next();
    const int64_t i = i0 + r0;
    const Row<T>* rows = w.rows.rows + i;
    const Span& span = w.rows.spans[w.rows.strip_at(i)];
    T *scores = w.scores + r0 * score_stride, *grads = w.grads + r0 * score_stride;
    Columns columns[key_tile / REGARD_TILE];
    VisibleColumns seen{width, 0};
    int64_t done = 0;
    const auto clear_up_to = [&](int64_t column) {
      for (int r = 0; r < m; ++r)
        for (int64_t c = done; c < column; c += lanes<T>)
          store(scores + r * score_stride + c, Vec<T>{}), store(grads + r * score_stride + c, Vec<T>{});
    };
    for (int n = 0; n < step_count; ++n) {
      const uint64_t* words = steps[n].bits ? steps[n].bits + rows[0].i % REGARD_TILE : nullptr;
      columns[n] = columns_of<T>(span, steps[n], words, m);
      const int64_t lo = steps[n].j0 - j0 + columns[n].lo, hi = steps[n].j0 - j0 + columns[n].hi;
      if (lo >= hi) continue;
      clear_up_to(lo);
      done = hi;
      seen.lo = least(seen.lo, lo);
      seen.hi = hi;
    }
    clear_up_to(width);
    if (done == 0) return {0, 0};
    if (p.bias.data) {
      const int64_t size = int64_t(storage_bytes(p.bias_dtype)), from = j0 + seen.lo, to = least(p.K, j0 + seen.hi);
      const int64_t row = p.bias.stride[2] * size, column = p.bias.stride[3] * size;
      fetch_rows((const char*)rows[m - 1].bias + row + from * column, row, MR, (to - from) * column);
    }

    for (int n = 0; n < step_count; ++n) {
      const int64_t lo = columns[n].lo, hi = columns[n].hi, base = steps[n].j0 - j0;
      if (lo >= hi) continue;
      const Panels panels = panels_of<T>(visible_columns(span, steps[n].j0, lo, hi), lo, hi);
      const int64_t strip = w.rows.strip_at(i);
      score.fill(rows[0].h, m, panels, w.rows.query_strip(strip), w.keys + (base + lo) * row_operands<A>(p.D),
                 scores + base + lo, score_stride);
      weight_gradients(m, panels, w.rows.grad_strip(strip), w.values + (base + lo) * row_operands<A>(p.E),
                       grads + base + lo);
      const uint64_t* words = steps[n].bits ? steps[n].bits + rows[0].i % REGARD_TILE : nullptr;
      for (int r = 0; r < m; ++r) {
        T *s = scores + r * score_stride + base, *d = grads + r * score_stride + base;
        const uint64_t* word = words ? words + r : nullptr;
        if (row_gradients.plain)
          row_gradients.weigh(rows[r], steps[n].j0, s, d, lo, hi, w.rows.lse[i + r], w.rows.delta[i + r]);
        else
          row_gradients.weigh_logits(rows[r], steps[n].j0, s, d, lo, hi, w.rows.lse[i + r], w.rows.delta[i + r],
                                     w.extra);
        if (columns[n].hidden) {
          mask_scores(rows[r], word, steps[n].j0, s, lo, hi, T(0));
          mask_scores(rows[r], word, steps[n].j0, d, lo, hi, T(0));
        }
        if (!row_gradients.plain)
          row_gradients.add(rows[r], steps[n].j0, d, lo, hi, w.extra, w.diagonal,
                            table ? w.d_table + (i + r) * table : nullptr);
      }
    }
    if constexpr (terms<A> > 1) pair_rows(scores, grads, w.grad_pairs + r0 * (score_stride / 2), m, width);
    return visible_columns(span, j0, seen.lo, seen.hi);
  }

  void store_queries(int64_t b, int64_t h, T* d_queries) const {
    score.store_sums(gradient.d_weight, b, h, d_queries + all_rows * (Dp + table), scales.query);
    const Matrix dq = matrix_of(gradient.d_q, p.dtype, b, h, p.Q, p.D);
    for (int64_t i = 0; i < p.Q; ++i) score.finish_row(h, d_queries + i * Dp);
    unpack_rows<T>(dq, 0, p.Q, d_queries, Dp, &scales.query, 0);
    for (int64_t i = 0; table && i < p.Q; ++i) {
      T* row = const_cast<T*>(real_row<T>(gradient.d_row_table, b, h, i));
      for (int64_t t = 0; t < table; ++t) row[t] = d_queries[all_rows * Dp + i * table + t] * row_gradients.bias_factor;
    }
  }

  // Heads whose tiles were split across threads: add the other parts to the first one, in thread order.
  void add_parts(int64_t first_head, int64_t last_head, const double* total, int64_t units) {
    for (int64_t head = 0; head < last_head - first_head; ++head) {
      T* sum = nullptr;
      for (int thread = 0; thread < threads_used; ++thread) {
        const int64_t from = share(total, units, thread, threads_used),
                      to = share(total, units, thread + 1, threads_used);
        if (from >= to || to <= head * tiles || (head + 1) * tiles <= from) continue;
        T* mine = part_of(thread, from, to, head);
        if (!mine) continue;
        if (!sum) {
          sum = mine;
          continue;
        }
        for (int64_t n = 0; n < part; ++n) sum[n] += mine[n];
      }
      if (!sum) continue;
      const int64_t b = (first_head + head) / p.G, g = (first_head + head) % p.G;
      for (int64_t n = 0; n < group; ++n) store_queries(b, g * group + n, sum + n * per_head);
    }
  }

  void store_diagonal() const {
    const int64_t width = p.Q + p.K - 1, heads = gradient.d_diagonal.stride[1] ? p.H : 1;
    for (int64_t n = 0; n < diagonals; ++n) {
      T sum = 0;
      for (int thread = 0; thread < p.threads; ++thread) sum += ((const T*)diagonal_sums.data)[thread * diagonals + n];
      const int64_t b = n / width / heads, h = n / width % heads;
      ((T*)gradient.d_diagonal
           .data)[b * gradient.d_diagonal.stride[0] + h * gradient.d_diagonal.stride[1] + n % width] =
          sum * row_gradients.bias_factor;
    }
  }
};

}  // namespace

int dot_backward(const regard_dot& p, const regard_dot_gradient& gradient) {
#ifdef REGARD_EXTENDS
  if (!takes_pairs(p)) return REGARD_EXTENDS::dot_backward(p, gradient);
#endif
  return with_score(p, [&](auto kind) {
    using Kind = decltype(kind);
    return Backward<typename Kind::Real, typename Kind::Score>(p, gradient).run();
  });
}

}  // namespace regard::REGARD_ISA
