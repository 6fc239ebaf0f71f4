// Linears of coded weights whose scales are bytes, times factors that 256 inputs share.
//
// Layout and formula: coded.h; activations: quantize_groups.h. For a row m and an output n, group
// of 16 or 32 inputs, which are in a chunk of 32 and a block of 256, after group,
//
//   scale   = s[n, g] * factor[n, block]                                exact
//   offset  = o[n, g] * second_factor[n, block]                         exact
//   dot     = sum over the group of (value(c[n, k]) - zero) q[m, k]     exact, below 2^24
//   result += dot * round(scale * x_scale[m, chunk])                    one rounding (fma)
//   result -= offset * round(x_scale[m, chunk] * (sum of q))            one rounding (fma)
//
// all in fp32, but for integers in dot: what linear_flat.cpp does with these scales and offsets.
#include "coded/coded_task.h"

namespace quire::QUIRE_ISA {
namespace {

template <CodeKind kKind, int kGroup>
struct TwoLevel {
  // A row takes two registers for each unit: a group's sum and the result.
  static constexpr int kMaxRows = kIntLanes == 16 ? 5 : 4;
  using Header = BlockHeader<kGroup>;
  static constexpr int kPerChunk = int(kChunkInputs) / kGroup, kQuads = kGroup / 4;

  // U: units at once.
  template <int R, int U>
  static void multiply(const UnitProduct& call, Prefetch prefetch) {
    prefetch.spread(call.num_stretches * (kUnitOutputs / kIntLanes));
    for (int lane = 0; lane < kUnitOutputs; lane += kIntLanes) {
      DotFloats results[R][U] = {};
      const uint8_t *stretch = call.unit, *x = call.x;
      for (int64_t i = 0; i < call.num_stretches; ++i, stretch += call.layout.bytes) {
        prefetch.step();
        add_block<R, U>(call, stretch, lane, x, results);
        x += sizeof(Header) + kBlockInputs * sizeof(DotElement);
      }
      store_results<R, U>(results, call.results + lane);
    }
  }

  template <int R, int U>
  static void add_block(const UnitProduct& call, const uint8_t* stretch, int lane, const uint8_t* x,
                        DotFloats (&results)[R][U]) {
    const uint8_t* chunk = stretch + call.layout.codes + lane * 4;
    const uint8_t* q = x + sizeof(Header);
    DotFloats factors[U];
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u)
      factors[u] = widen_fp16(stretch + u * call.unit_bytes + lane * 2);
    for (int i = 0; i < kBlockInputs / kChunkInputs; ++i) {
      const auto codes = chunks_of<kKind, U>(chunk, call.unit_bytes, call.table);
      add_group<R, U, 0>(call, codes.units, stretch, factors, lane, i, x, q, results);
      if constexpr (kPerChunk == 2)
        add_group<R, U, 1>(call, codes.units, stretch, factors, lane, i, x, q, results);
      chunk += Chunk<kKind>::kBytes;
      q += kChunkInputs * sizeof(DotElement);
    }
  }

  // results [R][U] += group kIndex of a block's i-th chunk. x: of the block; q: of the chunk.
  template <int R, int U, int kIndex>
  static void add_group(const UnitProduct& call, const Chunk<kKind> (&codes)[U],
                        const uint8_t* stretch, const DotFloats (&factors)[U], int lane, int i,
                        const uint8_t* x, const uint8_t* q, DotFloats (&results)[R][U]) {
    const int group = i * kPerChunk + kIndex;
    const uint8_t* correction = x + offsetof(Header, corrections) + group * sizeof(int32_t);
    DotInts sums[R][U];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts first = all_lanes(correction + r * call.ld);
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) sums[r][u] = first;
    }
    add_quads<kIndex * kQuads, (kIndex + 1) * kQuads, R, U>(codes, q, call.ld, sums);
    const uint8_t* x_scale = x + offsetof(Header, scales) + i * sizeof(float);
    const uint8_t* x_sum = x + offsetof(Header, sums) + group * sizeof(float);
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      const uint8_t* numbers = stretch + u * call.unit_bytes;
      const uint8_t* own = numbers + call.layout.scales + group * kUnitOutputs + lane;
      const DotFloats scale = to_floats(widen_signed_bytes(own)) * factors[u];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        results[r][u] = fma(to_floats(sums[r][u]), scale * all_lanes_float(x_scale + r * call.ld),
                            results[r][u]);
      if (call.linear.coding->has_offsets == 0) continue;
      const DotFloats below = -offset_of(numbers, call.layout.seconds, group, lane);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        results[r][u] = fma(below, all_lanes_float(x_sum + r * call.ld), results[r][u]);
    }
  }

  static DotFloats offset_of(const uint8_t* numbers, int64_t seconds, int group, int lane) {
    const uint8_t* pairs = numbers + seconds + group / 2 * 2 * kUnitOutputs + lane * 2;
    const DotInts both = widen_byte_pairs(pairs);
    const DotInts own = group % 2 == 0 ? both & 0xffff : both >> 16;
    return to_floats(own) * widen_fp16(numbers + kHalvesBytes + lane * 2);
  }
};

}  // namespace

void linear_two_level(Pool& pool, const LinearCall& call) {
  const CodeFormat& coding = *call.any().coding;
  if (coding.width == 6) return multiply_coded<TwoLevel<CodeKind::k6, 16>>(pool, call);
  if (coding.width == 5) return multiply_coded<TwoLevel<CodeKind::k5, 32>>(pool, call);
  if (coding.table != nullptr) return multiply_coded<TwoLevel<CodeKind::kTable, 32>>(pool, call);
  if (call.any().group_size == 16) return multiply_coded<TwoLevel<CodeKind::k4, 16>>(pool, call);
  return multiply_coded<TwoLevel<CodeKind::k4, 32>>(pool, call);
}

}  // namespace quire::QUIRE_ISA
