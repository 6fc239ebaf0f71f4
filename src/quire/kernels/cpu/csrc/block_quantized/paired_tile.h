// Products of expanded tiles with pairs of rows, by ARM64's products of matrices of bytes (i8mm).
//
// An instruction multiplies two outputs' eight inputs by two rows' (row_sums_neon.h). Codes are
// zipped where they are expanded, and rows where they meet a tile: chunk after chunk, numbers of
// both rows side by side, then eight inputs of one row, eight of the other. Sums and results of a
// pair are fours of two outputs and both rows, so numbers of outputs are zipped with themselves.
// The numbers, and the order in which they are added, are the same as in expanded_tile.h.
#pragma once
#include "block_quantized/expanded_tile.h"

namespace quire::QUIRE_ISA {

constexpr int kMaxPairs = 3;  // twelve sums and as many results in registers

template <int kParts>
constexpr int kPairBytes = 2 * kChunkRowBytes<kParts, int8_t>;  // of a chunk

// to [num_chunks, kPairBytes] = chunks of two rows.
template <int kParts>
inline void zip_rows(const uint8_t* first, const uint8_t* second, int64_t num_chunks, uint8_t* to) {
  constexpr int kBytes = kChunkRowBytes<kParts, int8_t>, kHeader = sizeof(ChunkHeader<kParts>);
  for (int64_t i = 0; i < num_chunks; ++i, first += kBytes, second += kBytes, to += 2 * kBytes)
#pragma GCC unroll 4
    for (int at = 0; at < kBytes; at += 16) {
      const auto a = load_as<int32x4_t>(first + at), b = load_as<int32x4_t>(second + at);
      const auto c = (int64x2_t)a, d = (int64x2_t)b;
      const int32x4_t zipped[2] = {
          at < kHeader ? vzip1q_s32(a, b) : (int32x4_t)vzip1q_s64(c, d),
          at < kHeader ? vzip2q_s32(a, b) : (int32x4_t)vzip2q_s64(c, d)};
      std::memcpy(to + 2 * at, zipped, sizeof zipped);
    }
}

// A number of both rows, twice. at: its place in a row's header.
inline DotInts of_rows(const uint8_t* pair, size_t at) {
  return (DotInts)vdupq_n_s64(load_as<int64_t>(pair + 2 * at));
}

// The numbers of outputs 0 and 1, or 2 and 3, each twice.
inline DotFloats of_outputs(DotFloats numbers, int half) {
  const auto x = (DotInts)numbers;
  return (DotFloats)(half == 0 ? first_halves(x, x) : last_halves(x, x));
}

// results [pairs][halves][widths] += part kPart of a chunk, whose pairs of rows lie `ld` apart.
template <typename Tile, int kPart, int P>
inline void add_part_of_pairs(const uint8_t* chunk, const uint8_t* pairs, int64_t ld,
                              DotFloats (&results)[P][2][2]) {
  // First, the products.
  using Header = ChunkHeader<Tile::kParts>;
  constexpr int kEights = int(kChunkInputs) / 8 / Tile::kParts;
  DotInts sums[P][2][2];
#pragma GCC unroll 16
  for (int i = 0; i < 4 * P; ++i)
    sums[i / 4][i / 2 % 2][i % 2] =
        of_rows(pairs + i / 4 * ld, offsetof(Header, corrections) + kPart * sizeof(int32_t));
#pragma GCC unroll 4
  for (int e = kPart * kEights; e < (kPart + 1) * kEights; ++e) {
    const uint8_t* codes = chunk + Tile::kCodes + 2 * e * kQuadBytes;
    DotInts weights[2][2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      weights[i / 2][i % 2] =
          load_as<DotInts>(codes + i / 2 * kQuadBytes + i % 2 * sizeof(DotInts));
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const auto x = load_as<int8x16_t>(pairs + p * ld + 2 * sizeof(Header) + 16 * e);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sums[p][i / 2][i % 2] =
            multiply_matrices(sums[p][i / 2][i % 2], weights[i / 2][i % 2], x);
    }
  }
  // Then, times the scales, and the offsets.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, w = i % 2;
    const uint8_t* numbers = chunk + w * sizeof(DotFloats);
    const DotFloats scale = of_outputs(load_as<DotFloats>(numbers + Tile::scale_at(kPart)), half);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const auto x_scale = (DotFloats)of_rows(pairs + p * ld, offsetof(Header, scale));
      results[p][half][w] =
          fma(to_floats(sums[p][half][w]), scale * x_scale, results[p][half][w]);
    }
    if constexpr (Tile::kSeconds != Seconds::kOffsets) continue;
    const auto offset = of_outputs(load_as<DotFloats>(numbers + Tile::second_at(kPart)), half);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const DotInts sum = of_rows(pairs + p * ld, offsetof(Header, sums) + kPart * sizeof(float));
      results[p][half][w] = fma(offset, (DotFloats)sum, results[p][half][w]);
    }
  }
}

// results [2 P, 32] += P pairs of rows times a tile's chunks; starts from zero if `is_first`.
template <typename Tile, int P>
void multiply_pairs(const uint8_t* tile, int64_t num_chunks, const uint8_t* pairs, bool is_first,
                    const NextTile& next, float* results) {
  constexpr int kPasses = int(kPanelOutputs) / (2 * kIntLanes);
  const int64_t ld = num_chunks * kPairBytes<Tile::kParts>;
  const int64_t lines_per_pass = divide_up(next.num_lines, kPasses);
  int64_t line = 0;
  for (int lane = 0; lane < kPanelOutputs; lane += 2 * kIntLanes) {
    for (int64_t i = 0; i < lines_per_pass && line < next.num_lines; ++i, ++line)
      for (const uint8_t* unit : next.units) __builtin_prefetch(unit + line * kLineBytes, 0, 2);
    float* const result = results + lane;
    DotFloats totals[P][2][2] = {};
    if (!is_first)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * P; ++i) {
        const float* at = result + i / 2 * 2 * kPanelOutputs + i % 2 * kIntLanes;
        const auto a = load_as<DotInts>(at), b = load_as<DotInts>(at + kPanelOutputs);
        totals[i / 2][0][i % 2] = (DotFloats)first_halves(a, b);
        totals[i / 2][1][i % 2] = (DotFloats)last_halves(a, b);
      }
    const uint8_t *chunk = tile + lane * 4, *pair = pairs;
    for (int64_t i = 0; i < num_chunks; ++i) {
      add_part_of_pairs<Tile, 0, P>(chunk, pair, ld, totals);
      if constexpr (Tile::kParts == 2) add_part_of_pairs<Tile, 1, P>(chunk, pair, ld, totals);
      chunk += Tile::kBytes;
      pair += kPairBytes<Tile::kParts>;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * P; ++i) {
      float* at = result + i / 2 * 2 * kPanelOutputs + i % 2 * kIntLanes;
      const auto low = (float32x4_t)totals[i / 2][0][i % 2];
      const auto high = (float32x4_t)totals[i / 2][1][i % 2];
      vst1q_f32(at, vuzp1q_f32(low, high));
      vst1q_f32(at + kPanelOutputs, vuzp2q_f32(low, high));
    }
  }
}

// As multiply_tile. results: a whole number of pairs; the last row may be its own neighbour.
template <typename Tile>
void multiply_paired_tile(const uint8_t* tile, int64_t num_chunks, const uint8_t* x, int64_t ld,
                          int64_t num_rows, bool is_first, const NextTile& next, float* results) {
  static constexpr decltype(&multiply_pairs<Tile, 1>) kFunctions[] = {
      &multiply_pairs<Tile, 1>, &multiply_pairs<Tile, 2>, &multiply_pairs<Tile, 3>};
  constexpr int64_t kMaxChunks = Tile::kMaxInputs / kChunkInputs;
  alignas(64) uint8_t zipped[kMaxPairs * kMaxChunks * kPairBytes<Tile::kParts>];
  const int64_t num_pairs = divide_up(num_rows, 2), num_blocks = divide_up(num_pairs, kMaxPairs);
  for (int64_t i = 0; i < num_blocks; ++i) {
    const Range block = Range{0, num_pairs}.part(i, num_blocks);
    uint8_t* to = zipped;
    for (int64_t p = block.first; p < block.end; ++p) {
      const uint8_t* row = x + 2 * p * ld;
      const bool is_alone = 2 * p + 1 == num_rows;
      zip_rows<Tile::kParts>(row, is_alone ? row : row + ld, num_chunks, to);
      to += num_chunks * kPairBytes<Tile::kParts>;
    }
    kFunctions[block.size() - 1](tile, num_chunks, zipped, is_first, next.part(i, num_blocks),
                                 results + 2 * block.first * kPanelOutputs);
  }
}

}  // namespace quire::QUIRE_ISA
