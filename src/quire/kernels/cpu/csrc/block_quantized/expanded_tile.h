// Tiles of a panel whose codes are bytes and whose scales are fp32, for many rows.
//
// For many rows, a panel's codes are unpacked and its scales widened once, not once for each few
// rows: a tile of inputs at a time, into memory of the thread that fits the L1 cache. Numbers, and
// the order in which they are added, are the same as in the form's products.
//
// A tile is one chunk of 32 inputs after another. A part is half of a chunk where groups are of 16
// inputs, else all of it:
//
//   scales   [kParts][32]      fp32
//   seconds  [kParts][32]      fp32, only if there are some: negative offsets, or kByteBias - zero
//   codes    [8 quads][32][4]  bytes: codes, or entries of the table, as ByteDot::stored; where
//                              groups have zeros that are not among the seconds, codes + kByteBias
//                              - zero (with i8mm, zipped: paired_tile.h)
//
// With kExpandsPairs, codes have 16 bits instead, as DotWeights unpacks them:
//
//   codes    [8 quads][2][32][2]  two inputs of an output side by side: even ones, then odd ones
#pragma once
#include <utility>

#include "block_quantized/chunk.h"
#include "block_quantized/quantize_groups.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

inline DotInts to_ints(DotFloats x) { return __builtin_convertvector(x, DotInts); }

enum class Seconds { kNone, kOffsets, kZeros };

// Whether tiles hold codes of up to kLargest in 16 bits, for products of pairs.
template <int kLargest>
constexpr bool kExpandsPairs = kHasByteSums && !kTakesBytes<kLargest>;

// A whole number of stretches of every form. Pairs take twice the memory.
constexpr int64_t kMaxTileInputs = 512;

// Where kHasByteSums, zeros are seconds, so codes stay small enough for sums of 16 bits. Elsewhere
// kByteBias - zero is added to the codes, and kLargestByte is 255.
template <int kPartsOfChunk, Seconds kSecondNumbers, int kLargestByte>
struct ExpandedTile {
  static constexpr int kParts = kPartsOfChunk;
  static constexpr Seconds kSeconds = kSecondNumbers;
  static constexpr bool kHasPairs = kExpandsPairs<kLargestByte>;
  static constexpr int64_t kMaxInputs = kMaxTileInputs / (kHasPairs ? 2 : 1);
  // Bytes of formats with offsets need none (can_expand).
  static constexpr bool kHasCorrections = !kHasByteSums || kSeconds != Seconds::kOffsets;
  using Dot = ByteDot<kLargestByte>;
  using Element = ElementOf<kLargestByte>;  // of x
  static constexpr int kNumbersBytes = kParts * int(kPanelOutputs) * int(sizeof(float));
  static constexpr int kCodes = kNumbersBytes * (kSeconds != Seconds::kNone ? 2 : 1);
  static constexpr int kTileQuadBytes = kQuadBytes * (kHasPairs ? 2 : 1);
  static constexpr int kBytes = kCodes + int(kChunkInputs) / 4 * kTileQuadBytes;  // of a chunk

  static constexpr int scale_at(int part) { return part * int(kPanelOutputs * sizeof(float)); }
  static constexpr int second_at(int part) { return kNumbersBytes + scale_at(part); }

  // chunk: of the first of these outputs, as below.
  static void store_numbers(uint8_t* chunk, int part, DotFloats scale, DotFloats second) {
    std::memcpy(chunk + scale_at(part), &scale, sizeof scale);
    if constexpr (kSeconds != Seconds::kNone)
      std::memcpy(chunk + second_at(part), &second, sizeof second);
  }

  // added: the number that is added to each byte. No byte overflows.
  template <CodeKind kKind>
  static void store_codes(uint8_t* chunk, const Chunk<kKind>& codes, DotInts added) {
    const auto bytes_of = [&](int q) {
      const DotInts bytes = codes.bytes(q);
      if constexpr (kHasPairs) return bytes;
      if constexpr (kHasByteSums) return Dot::stored(bytes);
      return (DotInts)((DotBytes)bytes + (DotBytes)added);
    };
#pragma GCC unroll 4
    for (int q = 0; q < kChunkInputs / 4; q += 2) {
      uint8_t* const quad = chunk + kCodes + q * kTileQuadBytes;
      const DotInts first = bytes_of(q), second = bytes_of(q + 1);
      if constexpr (kHasMatrixProducts) {
        store_quad(quad, first_halves(first, second));
        store_quad(quad + kTileQuadBytes, last_halves(first, second));
      } else {
        store_quad(quad, first);
        store_quad(quad + kTileQuadBytes, second);
      }
    }
  }

 private:
  static void store_quad(uint8_t* quad, DotInts bytes) {
    if constexpr (kHasPairs) {
      const DotInts even = bytes & 0x00ff00ff, odd = (DotInts)((DotShorts)bytes >> 8);
      std::memcpy(quad, &even, sizeof even);
      std::memcpy(quad + kQuadBytes, &odd, sizeof odd);
    } else {
      std::memcpy(quad, &bytes, sizeof bytes);
    }
  }
};

// Tiles of pairs are no larger.
constexpr int64_t kMaxTileBytes =
    kMaxTileInputs / kChunkInputs * ExpandedTile<2, Seconds::kOffsets, 15>::kBytes;
// Below, expanding costs what it saves. Where bytes are multiplied, a few rows wait for memory, and
// a tile's requests keep it busy.
template <int kLargest>
constexpr int64_t kMinExpandedRows = sizeof(ElementOf<kLargest>) == 1 ? 8 : 16;
// Whether a tile's products have all that the format has. No checkpoint has offsets and a zero. If
// zeros are added to codes of 8 bits, the codes may overflow.
inline bool can_expand(const CodeFormat& code_format) {
  if (kHasByteSums) return code_format.has_offsets == 0 || byte_zero(code_format) == 0;
  return code_format.width < 8 || code_format.has_zeros == 0;
}
// A row takes two registers for each of the widths: a part's sum and the result.
constexpr int kTileWidths = kHas32Registers || kHasHalves ? 2 : 1;
template <typename Tile>
constexpr int max_expanded_rows() {
  if constexpr (Tile::kHasPairs) return 6;
  if constexpr (kHasHalves) return Tile::Dot::kQuads >= 4 ? 6 : 4;
  if constexpr (kHoldsQuads) return 5;  // beside four quads of weights
  return kHas32Registers ? 6 : 4;
}

// sums [R][widths] = part kPart of a chunk, whose codes have 16 bits.
template <typename Tile, int kPart, int R>
inline void add_pairs(const uint8_t* chunk, const uint8_t* x, int64_t ld,
                      DotInts (&sums)[R][kTileWidths]) {
  using Header = ChunkHeader<Tile::kParts>;
  constexpr int kPairs = int(kChunkInputs) / 2 / Tile::kParts;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const DotInts start =
        all_lanes(x + r * ld + offsetof(Header, corrections) + kPart * sizeof(int32_t));
#pragma GCC unroll 2
    for (int w = 0; w < kTileWidths; ++w) sums[r][w] = start;
  }
#pragma GCC unroll 16
  for (int i = kPart * kPairs; i < (kPart + 1) * kPairs; ++i) {
    const uint8_t* pair = chunk + Tile::kCodes + i * kQuadBytes;
    DotInts weights[kTileWidths];
#pragma GCC unroll 2
    for (int w = 0; w < kTileWidths; ++w)
      weights[w] = load_as<DotInts>(pair + w * sizeof(DotInts));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts inputs = all_lanes(x + r * ld + sizeof(Header) + i * 2 * sizeof(int16_t));
#pragma GCC unroll 2
      for (int w = 0; w < kTileWidths; ++w)
        sums[r][w] = dot_pairs(sums[r][w], weights[w], inputs);
    }
  }
}

// results [R][widths] += part kPart of a chunk, whose rows are x.
template <typename Tile, int kPart, int R>
inline void add_part(const uint8_t* chunk, const uint8_t* x, int64_t ld,
                     DotFloats (&results)[R][kTileWidths]) {
  using Header = ChunkHeader<Tile::kParts>;
  constexpr int kQuads = int(kChunkInputs) / 4 / Tile::kParts;
  const uint8_t* corrections = x + offsetof(Header, corrections) + kPart * sizeof(int32_t);
  RowSums<R, kTileWidths, 4> sums;
  if constexpr (Tile::kHasPairs) {
    add_pairs<Tile, kPart, R>(chunk, x, ld, sums.of);
  } else if constexpr (kHasByteSums) {
    const uint8_t* quads = chunk + Tile::kCodes + kPart * kQuads * kQuadBytes;
    sum_quads<typename Tile::Dot, kQuads, R>(
        [&](int w, int q) {
          return load_as<DotInts>(quads + q * kQuadBytes + w * sizeof(DotInts));
        },
        x + sizeof(Header) + kPart * kQuads * 4, Tile::kHasCorrections ? corrections : nullptr, ld,
        sums.of);
  } else {
    const uint8_t* codes = chunk + Tile::kCodes + kPart * kQuads * kQuadBytes;
    sums.start([&](int r) { return all_lanes(corrections + r * ld); });
    sums.template add<kQuads>(
        [&](int q, DotInts (&to)[kTileWidths]) { load_registers(codes + q * kQuadBytes, to); },
        x + sizeof(Header) + kPart * kQuads * 4 * sizeof(DotElement), ld);
    sums.finish();
  }
#pragma GCC unroll 2
  for (int w = 0; w < kTileWidths; ++w) {
    const uint8_t* numbers = chunk + w * sizeof(DotFloats);
    const auto scale = load_as<DotFloats>(numbers + Tile::scale_at(kPart));
    if constexpr (Tile::kSeconds == Seconds::kZeros) {  // as in linear_flat.cpp
      const auto above = load_as<DotFloats>(numbers + Tile::second_at(kPart));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const uint8_t* row = x + r * ld;
        const DotFloats dot = fma(above, all_lanes_float(row + offsetof(Header, sums)),
                                  to_floats(sums.of[r][w]));
        results[r][w] =
            fma(dot, scale * all_lanes_float(row + offsetof(Header, scale)), results[r][w]);
      }
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      results[r][w] =
          fma(to_floats(sums.of[r][w]),
              scale * all_lanes_float(x + r * ld + offsetof(Header, scale)), results[r][w]);
    if constexpr (Tile::kSeconds != Seconds::kOffsets) continue;
    const auto offset = load_as<DotFloats>(numbers + Tile::second_at(kPart));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint8_t* sum = x + r * ld + offsetof(Header, sums) + kPart * sizeof(float);
      results[r][w] = fma(offset, all_lanes_float(sum), results[r][w]);
    }
  }
}

// The packed bytes of the next tile, which are requested while one is multiplied: expanding them
// would wait for memory.
struct NextTile {
  const uint8_t* units[2];
  int64_t num_lines;  // of each unit

  NextTile part(int64_t i, int64_t count) const {
    const Range lines = Range{0, num_lines}.part(i, count);
    return {{units[0] + lines.first * kLineBytes, units[1] + lines.first * kLineBytes},
            lines.size()};
  }
};

// Chunks between two requests, which would slow the innermost loop where it is short.
constexpr int64_t kRunChunks = kHasHalves ? 1 : 4;

// results [R, 32] += R rows times a tile's chunks; starts from zero if `is_first`.
template <typename Tile, int R>
void multiply_rows(const uint8_t* tile, int64_t num_chunks, const uint8_t* x, int64_t ld,
                   bool is_first, const NextTile& next, float* results) {
  constexpr int kPasses = int(kPanelOutputs) / (kTileWidths * kIntLanes);
  const int64_t num_runs = kPasses * divide_up(num_chunks, kRunChunks);
  const int64_t lines_per_run = divide_up(next.num_lines, num_runs);
  int64_t line = 0;
  for (int lane = 0; lane < kPanelOutputs; lane += kTileWidths * kIntLanes) {
    float* const result = results + lane;
    DotFloats totals[R][kTileWidths] = {};
    if (!is_first)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int w = 0; w < kTileWidths; ++w)
          totals[r][w] = load_as<DotFloats>(result + r * kPanelOutputs + w * kIntLanes);
    const uint8_t *chunk = tile + lane * 4, *row = x;
    for (int64_t first = 0; first < num_chunks; first += kRunChunks) {
      const int64_t left = num_chunks - first, count = left < kRunChunks ? left : kRunChunks;
      for (int64_t i = 0; i < lines_per_run && line < next.num_lines; ++i, ++line)
        for (const uint8_t* unit : next.units) __builtin_prefetch(unit + line * kLineBytes, 0, 2);
      for (int64_t i = 0; i < count; ++i) {
        add_part<Tile, 0, R>(chunk, row, ld, totals);
        if constexpr (Tile::kParts == 2) add_part<Tile, 1, R>(chunk, row, ld, totals);
        chunk += Tile::kBytes;
        row += kChunkRowBytes<Tile::kParts, typename Tile::Element>;
      }
    }
    // One by one: of arrays that are copied whole, g++ 12 keeps a second copy up to date.
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int w = 0; w < kTileWidths; ++w)
        std::memcpy(result + r * kPanelOutputs + w * kIntLanes, &totals[r][w], sizeof(DotFloats));
  }
}

// Of all rows.
template <typename Tile, int... kRs>
inline void multiply_blocks(const uint8_t* tile, int64_t num_chunks, const uint8_t* x, int64_t ld,
                            int64_t num_rows, bool is_first, const NextTile& next, float* results,
                            std::integer_sequence<int, kRs...>) {
  static constexpr decltype(&multiply_rows<Tile, 1>) kFunctions[] = {
      &multiply_rows<Tile, kRs + 1>...};
  const int64_t num_blocks = divide_up(num_rows, max_expanded_rows<Tile>());
  for (int64_t i = 0; i < num_blocks; ++i) {
    const Range block = Range{0, num_rows}.part(i, num_blocks);
    kFunctions[block.size() - 1](tile, num_chunks, x + block.first * ld, ld, is_first,
                                 next.part(i, num_blocks), results + block.first * kPanelOutputs);
  }
}

// results [num_rows, 32] += rows x, which begin `ld` bytes apart, times a tile's chunks.
template <typename Tile>
inline void multiply_tile(const uint8_t* tile, int64_t num_chunks, const uint8_t* x, int64_t ld,
                          int64_t num_rows, bool is_first, const NextTile& next, float* results) {
  multiply_blocks<Tile>(tile, num_chunks, x, ld, num_rows, is_first, next, results,
                        std::make_integer_sequence<int, max_expanded_rows<Tile>()>{});
}

}  // namespace quire::QUIRE_ISA
