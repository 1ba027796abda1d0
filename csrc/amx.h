// Products of pairs by the tile registers of AMX: 16 rows of 16 pairs, times 16 pairs of rows with 16 columns.
//
// Each product of two tiles takes 16 cycles, sixteen times as many multiply-adds per cycle as the vector units do. All
// tiles have one size, so the registers are configured once per call and thread; shorter rows are filled with zeros.
#pragma once
#include "operands.h"

namespace regard::REGARD_ISA {

#if defined(__AMX_BF16__)
constexpr bool has_amx = true;
constexpr int tile_rows = 16;   // also the pairs of a row, and the columns of a result
constexpr int strip_rows = 32;  // two tiles: every tile that is loaded is used twice

// The configuration of this thread, for as long as this object lives.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } layout;
    asm volatile("ldtilecfg %0" ::"m"(layout));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// The compiler knows nothing of what these read: the clobber keeps earlier stores before them.
template <int tile> REGARD_INLINE void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile> REGARD_INLINE void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile> REGARD_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int sum, int left, int right> REGARD_INLINE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

// One side of a product. Rows of the left side lie `row` pairs apart; of the right side, [pair of rows][columns], also
// those; its panels, of two tiles of columns each, lie `panel` pairs apart.
struct TileSide {
  const Pair* data;
  int64_t row, panel = 0;
};

// C (32 or 16 rows, `panels` panels of 32 columns) = [C +] A B, over `steps` tiles of pairs.
template <bool both, bool add>
inline __attribute__((noinline)) void multiply_tiles(int64_t panels, int64_t steps, TileSide a, TileSide b, float* c,
                                                     int64_t c_row) {
  const int64_t a_bytes = a.row * 4, b_bytes = b.row * 4, c_bytes = c_row * 4;
  const Pair* const lower = a.data + tile_rows * a.row;
  for (int64_t p = 0; p < panels; ++p, c += 2 * tile_rows) {
    const Pair* right = b.data + p * b.panel;
    float* const c_lower = c + tile_rows * c_row;
    if constexpr (add) {
      load_tile<0>(c, c_bytes), load_tile<1>(c + tile_rows, c_bytes);
      if constexpr (both) load_tile<2>(c_lower, c_bytes), load_tile<3>(c_lower + tile_rows, c_bytes);
    } else {
      clear_tile<0>(), clear_tile<1>();
      if constexpr (both) clear_tile<2>(), clear_tile<3>();
    }
    for (int64_t s = 0; s < steps; ++s, right += tile_rows * b.row) {
      load_tile<6>(right, b_bytes);
      load_tile<4>(a.data + s * tile_rows, a_bytes);
      multiply_tile<0, 4, 6>();
      load_tile<7>(right + tile_rows, b_bytes);
      multiply_tile<1, 4, 7>();
      if constexpr (both) {
        load_tile<5>(lower + s * tile_rows, a_bytes);
        multiply_tile<2, 5, 6>();
        multiply_tile<3, 5, 7>();
      }
    }
    store_tile<0>(c, c_bytes), store_tile<1>(c + tile_rows, c_bytes);
    if constexpr (both) store_tile<2>(c_lower, c_bytes), store_tile<3>(c_lower + tile_rows, c_bytes);
  }
}

// The same for a number of rows that is known only at run time; C is written in whole tiles.
template <bool add>
REGARD_INLINE void multiply_tiles(int rows, int64_t panels, int64_t steps, TileSide a, TileSide b, float* c,
                                  int64_t c_row) {
  if (rows > tile_rows) multiply_tiles<true, add>(panels, steps, a, b, c, c_row);
  else multiply_tiles<false, add>(panels, steps, a, b, c, c_row);
}
#else
constexpr bool has_amx = false;
struct TileRegisters {
  TileRegisters() {}
};
#endif

// How many operands a row of `n` terms takes: whole tiles where there are such.
template <class A> REGARD_INLINE int64_t row_operands(int64_t n) {
  return has_amx ? round_up(operands<A>(n), 16) : operands<A>(n);
}

}  // namespace regard::REGARD_ISA
