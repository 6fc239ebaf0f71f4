// Products of bytes of x with bytes of weights by the matrix unit of Intel's AMX.
//
// An instruction multiplies 16 rows of x by 16 outputs over 64 inputs, and adds to exact 32-bit
// integers, so the sums are those of dot.h. A tile of weights is 16 quads of 16 outputs as
// linear_int8.h stores them, and a tile of x is 16 rows of bytes as quantize_rows.h stores them:
// neither is copied. (Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 1, ch. 18.)
#pragma once
#include "linear/dot.h"

namespace quire::QUIRE_ISA {

#if defined(__AMX_INT8__)

constexpr int kAmxRows = 16;               // of x, in a tile
constexpr int64_t kAmxQuads = 16;          // of inputs, in a tile
constexpr int kMaxAmxRows = 2 * kAmxRows;  // of x, in the two tiles that share weights

// This thread's tiles, with the sizes for a block of up to kMaxAmxRows rows. Tiles 0 and 1 have the
// sums of its first 16 rows, 2 and 3 those of the others; 4 and 5 have the inputs of these rows, and
// 6 and 7 the weights of 16 outputs each. A tile without rows is not configured and must not be
// used. The destructor clears the tiles, since the system saves their 8 KiB whenever the thread
// gives way to another one.
class AmxTiles {
 public:
  explicit AmxTiles(int64_t num_rows) : num_rows_(num_rows) {
    const int low = int(num_rows < kAmxRows ? num_rows : kAmxRows), high = int(num_rows) - low;
    alignas(64) Config config{};
    config.palette = 1;
    const int rows[8] = {low, low, high, high, low, high, int(kAmxQuads), int(kAmxQuads)};
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = uint8_t(rows[tile]);
      config.row_bytes[tile] = rows[tile] > 0 ? 64 : 0;
    }
    _tile_loadconfig(&config);
  }
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() { _tile_release(); }

  // sums [rows, 32] = rows of x, which lie ld bytes apart, times `num_quads` quads of a panel. The
  // quads must be a multiple of kAmxQuads.
  void multiply(const uint8_t* weights, int64_t num_quads, const int8_t* x, int64_t ld,
                int32_t* sums) const {
    constexpr int64_t kRowBytes = kPanelOutputs * int64_t(sizeof(int32_t));
    constexpr int64_t kHalf = kPanelOutputs / 2;
    const bool has_high = num_rows_ > kAmxRows;
    _tile_zero(0);
    _tile_zero(1);
    if (has_high) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t quad = 0; quad < num_quads; quad += kAmxQuads) {
      _tile_loadd(6, weights + quad * kQuadBytes, kQuadBytes);
      _tile_loadd(7, weights + quad * kQuadBytes + kQuadBytes / 2, kQuadBytes);
      _tile_loadd(4, x + quad * 4, ld);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (has_high) {
        _tile_loadd(5, x + kAmxRows * ld + quad * 4, ld);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kRowBytes);
    _tile_stored(1, sums + kHalf, kRowBytes);
    if (has_high) {
      _tile_stored(2, sums + kAmxRows * kPanelOutputs, kRowBytes);
      _tile_stored(3, sums + kAmxRows * kPanelOutputs + kHalf, kRowBytes);
    }
  }

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  int64_t num_rows_;
};

#endif

}  // namespace quire::QUIRE_ISA
