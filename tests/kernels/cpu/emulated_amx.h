// The intrinsics of AMX that the kernels use, in plain C++.
//
// tools/emulated_vnni.py includes this file before each source, and so tests the kernels of AMX on a
// processor without it. Formulas: Intel 64 and IA-32 Architectures Software Developer's Manual,
// vol. 2, TDPBSUD and LDTILECFG.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct EmulatedTiles {
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t bytes[8][16][64];
};
static thread_local EmulatedTiles emulated_tiles;

static inline void emulated_loadconfig(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  EmulatedTiles& tiles = emulated_tiles;
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.row_bytes, bytes + 16, sizeof tiles.row_bytes);
  std::memcpy(tiles.rows, bytes + 48, sizeof tiles.rows);
}

static inline void emulated_release() { std::memset(&emulated_tiles, 0, sizeof emulated_tiles); }

static inline void emulated_zero(int tile) {
  std::memset(emulated_tiles.bytes[tile], 0, sizeof emulated_tiles.bytes[tile]);
}

static inline void emulated_load(int tile, const void* from, int64_t stride) {
  EmulatedTiles& tiles = emulated_tiles;
  for (int r = 0; r < tiles.rows[tile]; ++r)
    std::memcpy(tiles.bytes[tile][r], static_cast<const uint8_t*>(from) + r * stride,
                tiles.row_bytes[tile]);
}

static inline void emulated_store(int tile, void* to, int64_t stride) {
  const EmulatedTiles& tiles = emulated_tiles;
  for (int r = 0; r < tiles.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.bytes[tile][r],
                tiles.row_bytes[tile]);
}

// sums [m, n] += four signed bytes of a [m, k] times four unsigned ones of b [k, n], for all k.
static inline void emulated_dpbsud(int sums, int a, int b) {
  EmulatedTiles& tiles = emulated_tiles;
  for (int m = 0; m < tiles.rows[sums]; ++m)
    for (int n = 0; n < tiles.row_bytes[sums] / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, tiles.bytes[sums][m] + 4 * n, sizeof sum);
      for (int k = 0; k < tiles.row_bytes[a] / 4; ++k)
        for (int i = 0; i < 4; ++i)
          sum += int8_t(tiles.bytes[a][m][4 * k + i]) * int32_t(tiles.bytes[b][k][4 * n + i]);
      std::memcpy(tiles.bytes[sums][m] + 4 * n, &sum, sizeof sum);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define __AMX_INT8__ 1
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbsud emulated_dpbsud
