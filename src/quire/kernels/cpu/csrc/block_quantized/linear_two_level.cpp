// Linears of block-quantized weights whose scales are bytes, times factors that 256 inputs share.
//
// Layout and formula: layout.h; activations: quantize_groups.h. For a row m and an output n, group
// of 16 or 32 inputs, which are in a chunk of 32 and a block of 256, after group,
//
//   scale   = s[n, g] * factor[n, block]                                exact
//   offset  = o[n, g] * second_factor[n, block]                         exact
//   dot     = sum over the group of (value(c[n, k]) - zero) q[m, k]     exact, below 2^24
//   result += dot * round(scale * x_scale[m, chunk])                    one rounding (fma)
//   result -= offset * round(x_scale[m, chunk] * (sum of q))            one rounding (fma)
//
// all in fp32, but for integers in dot: what linear_flat.cpp does with these scales and offsets.
#include "block_quantized/task.h"

namespace quire::QUIRE_ISA {
namespace {

template <CodeKind kKind, int kGroup>
struct TwoLevel {
  static constexpr int kParts = int(kChunkInputs) / kGroup;  // of a chunk
  static constexpr int kQuads = kGroup / 4;
  static constexpr int kLargest = largest_of(kKind);
  // A row takes two registers for each of the outputs: a group's sum and the result. Where an
  // instruction multiplies bytes, or 16 bits hold a group's sum, a sixth row is worth the registers
  // that are kept in memory.
  static constexpr int kMaxRows =
      sizeof(DotElement) == 1 || fits_shorts<kLargest, kQuads>() ? 6 : kIntLanes == 16 ? 5 : 4;
  using Header = ChunkHeader<kParts>;
  using Element = ElementOf<kLargest>;  // of x
  static constexpr bool kExpands = true;

  template <typename Tile>
  static void expand(const Weights&, const BlockQuantizedLayout& layout, const CodeTable& table,
                     const uint8_t* stretch, uint8_t* to) {
    for (int lane = 0; lane < kUnitOutputs; lane += kIntLanes) {
      const DotFloats factor = widen_fp16(stretch + lane * 2);
      const uint8_t* chunk = stretch + layout.codes + lane * 4;
      uint8_t* tile = to + lane * 4;
      for (int group = 0; group < kBlockInputs / kGroup; ++group) {
        const DotFloats scale = scale_of(stretch, layout, group, lane) * factor;
        DotFloats offset{};
        if (Tile::kSeconds == Seconds::kOffsets)
          offset = offset_of(stretch, layout.seconds, group, lane) *
                   widen_fp16(stretch + kHalvesBytes + lane * 2);
        Tile::store_numbers(tile, group % kParts, scale, -offset);
        if (group % kParts != kParts - 1) continue;
        Tile::store_codes(tile, Chunk<kKind>(chunk, table), DotInts{});
        chunk += Chunk<kKind>::kBytes;
        tile += Tile::kBytes;
      }
    }
  }

  // U: registers at once.
  template <int R, int U>
  static void multiply(const UnitProduct& call, Prefetch prefetch) {
    constexpr int64_t kFetches = kBlockInputs / kChunkInputs;  // of a block
    prefetch.spread(call.num_stretches * kFetches * (kUnitOutputs / lanes_at_once<U>));
    for (int lane = 0; lane < kUnitOutputs; lane += lanes_at_once<U>) {
      DotFloats results[R][U] = {};
      const uint8_t *stretch = call.unit, *x = call.x;
      for (int64_t i = 0; i < call.num_stretches; ++i, stretch += call.layout.bytes) {
        add_block<R, U>(call, stretch, lane, x, prefetch, results);
        x += kBlockInputs / kChunkInputs * kChunkRowBytes<kParts, Element>;
      }
      store_results<R, U>(results, call.results + lane);
    }
  }

  template <int R, int U>
  static void add_block(const UnitProduct& call, const uint8_t* stretch, int lane, const uint8_t* x,
                        Prefetch& prefetch, DotFloats (&results)[R][U]) {
    const uint8_t* chunk = stretch + call.layout.codes + lane * 4;
    Factors<U> factors;
    factors.has_offsets = call.linear.code_format->has_offsets != 0;
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const uint8_t* own = stretch + unit_offset(u, call.unit_bytes) + (lane + lane_offset(u)) * 2;
      factors.scales[u] = widen_fp16(own);
      factors.offsets[u] = widen_fp16(own + kHalvesBytes);
    }
    for (int i = 0; i < kBlockInputs / kChunkInputs; ++i) {
      prefetch.step();
      const auto codes = chunks_of<kKind, U>(chunk, call.unit_bytes, call.table);
      add_group<R, U, 0>(call, codes.units, stretch, factors, lane, i, x, results);
      if constexpr (kParts == 2)
        add_group<R, U, 1>(call, codes.units, stretch, factors, lane, i, x, results);
      chunk += Chunk<kKind>::kBytes;
      x += kChunkRowBytes<kParts, Element>;
    }
  }

  // A block's factors of U registers' outputs.
  template <int U>
  struct Factors {
    DotFloats scales[U], offsets[U];
    bool has_offsets;
  };

  // results [R][U] += group kIndex of a block's i-th chunk, whose rows are x.
  template <int R, int U, int kIndex>
  static void add_group(const UnitProduct& call, const Chunk<kKind> (&codes)[U],
                        const uint8_t* stretch, const Factors<U>& factors, int lane, int i,
                        const uint8_t* x, DotFloats (&results)[R][U]) {
    const int group = i * kParts + kIndex;
    const uint8_t* correction = x + offsetof(Header, corrections) + kIndex * sizeof(int32_t);
    RowSums<R, U> sums;
    sum_chunk<kIndex * kQuads, (kIndex + 1) * kQuads>(codes, x + sizeof(Header), correction,
                                                      call.ld, sums);
    const uint8_t* x_scale = x + offsetof(Header, scale);
    const uint8_t* x_sum = x + offsetof(Header, sums) + kIndex * sizeof(float);
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const uint8_t* numbers = stretch + unit_offset(u, call.unit_bytes);
      const int first = lane + lane_offset(u);
      const DotFloats scale = scale_of(numbers, call.layout, group, first) * factors.scales[u];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        results[r][u] =
            fma(to_floats(sums.of[r][u]), scale * all_lanes_float(x_scale + r * call.ld),
                results[r][u]);
    }
    if (!factors.has_offsets) return;
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const uint8_t* numbers = stretch + unit_offset(u, call.unit_bytes);
      const int first = lane + lane_offset(u);
      const DotFloats below =
          -(offset_of(numbers, call.layout.seconds, group, first) * factors.offsets[u]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        results[r][u] = fma(below, all_lanes_float(x_sum + r * call.ld), results[r][u]);
    }
  }

  // Both less the block's factor.
  static DotFloats scale_of(const uint8_t* numbers, const BlockQuantizedLayout& layout, int group,
                            int lane) {
    return to_floats(widen_signed_bytes(numbers + layout.scales + group * kUnitOutputs + lane));
  }

  static DotFloats offset_of(const uint8_t* numbers, int64_t seconds, int group, int lane) {
    const uint8_t* pairs = numbers + seconds + group / 2 * 2 * kUnitOutputs + lane * 2;
    const DotInts both = widen_byte_pairs(pairs);
    const DotInts own = group % 2 == 0 ? both & 0xffff : both >> 16;
    return to_floats(own);
  }
};

}  // namespace

void linear_two_level(Pool& pool, const LinearCall& call) {
  const CodeFormat& code_format = *call.any().code_format;
  if (code_format.width == 6)
    return multiply_block_quantized<TwoLevel<CodeKind::k6, 16>>(pool, call);
  if (code_format.width == 5)
    return multiply_block_quantized<TwoLevel<CodeKind::k5, 32>>(pool, call);
  if (code_format.table != nullptr)
    return multiply_block_quantized<TwoLevel<CodeKind::kTable, 32>>(pool, call);
  if (call.any().group_size == 16)
    return multiply_block_quantized<TwoLevel<CodeKind::k4, 16>>(pool, call);
  return multiply_block_quantized<TwoLevel<CodeKind::k4, 32>>(pool, call);
}

}  // namespace quire::QUIRE_ISA
