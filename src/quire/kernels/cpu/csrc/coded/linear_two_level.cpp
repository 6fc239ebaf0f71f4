// Linears of coded weights whose scales are bytes, times factors that 256 inputs share.
//
// Layout and formula: coded.h; activations: quantize_groups.h. For a row m and an output n, block
// of 256 inputs after block,
//
//   dot      = sum over a group of (value(c[n, k]) - zero) q[m, k]         exact
//   above    = sum over the block's groups of s[n, g] * dot                exact, below 2^31
//   below    = sum over the block's groups of o[n, g] * (sum of q)         exact, below 2^24
//   result  += above * round(factor[n] * x_scale[m])                       one rounding (fma)
//   result  -= below * round(second_factor[n] * x_scale[m])                one rounding (fma)
//
// all in fp32, but for integers in dot, above and below; above is rounded once.
#include "coded/coded_task.h"

namespace quire::QUIRE_ISA {
namespace {

template <CodeKind kKind, int kGroup>
struct TwoLevel {
  // A row takes three registers for each unit: a group's sum, the block's and the result.
  static constexpr int kMaxRows = kIntLanes == 16 ? 4 : 3;
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
    const uint8_t* scales = stretch + call.layout.scales + lane;
    const uint8_t* chunk = stretch + call.layout.codes + lane * 4;
    const uint8_t* correction = x + offsetof(Header, corrections);
    const uint8_t* q = x + sizeof(Header);
    DotInts above[R][U] = {};
    for (int i = 0; i < kBlockInputs / kChunkInputs; ++i) {
      const auto codes = chunks_of<kKind, U>(chunk, call.unit_bytes, call.table);
      add_group<R, U, 0>(call, codes.units, scales, correction, q, above);
      if constexpr (kPerChunk == 2)
        add_group<R, U, 1>(call, codes.units, scales, correction, q, above);
      scales += kPerChunk * kUnitOutputs;
      correction += kPerChunk * sizeof(int32_t);
      chunk += Chunk<kKind>::kBytes;
      q += kChunkInputs * sizeof(DotElement);
    }
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      const uint8_t* numbers = stretch + u * call.unit_bytes;
      const DotFloats factor = widen_fp16(numbers + lane * 2);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        results[r][u] =
            multiply_add(to_floats(above[r][u]), factor * x_scale(x + r * call.ld), results[r][u]);
      if (call.linear.coding->has_offsets != 0)
        subtract_offsets<R, U>(call, numbers, lane, u, x, results);
    }
  }

  // above [R][U] += group kIndex of a chunk.
  template <int R, int U, int kIndex>
  static void add_group(const UnitProduct& call, const Chunk<kKind> (&codes)[U],
                        const uint8_t* scales, const uint8_t* correction, const uint8_t* q,
                        DotInts (&above)[R][U]) {
    DotInts sums[R][U];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts first = all_lanes(correction + r * call.ld + kIndex * sizeof(int32_t));
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) sums[r][u] = first;
    }
    add_quads<kIndex * kQuads, (kIndex + 1) * kQuads, R, U>(codes, q, call.ld, sums);
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      const uint8_t* own = scales + u * call.unit_bytes + kIndex * kUnitOutputs;
      const DotInts scale = widen_signed_bytes(own);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) above[r][u] += sums[r][u] * scale;
    }
  }

  template <int R, int U>
  static void subtract_offsets(const UnitProduct& call, const uint8_t* numbers, int lane, int u,
                               const uint8_t* x, DotFloats (&results)[R][U]) {
    const uint8_t* offsets = numbers + call.layout.seconds + lane * 2;
    DotInts below[R] = {};
#pragma GCC unroll 4
    for (int pair = 0; pair < Header::kGroups / 2; ++pair) {
      const DotInts o = widen_byte_pairs(offsets + pair * 2 * kUnitOutputs);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        below[r] = dot_pairs(
            below[r], o, all_lanes(x + r * call.ld + offsetof(Header, sums) + pair * 4));
    }
    const DotFloats factor = -widen_fp16(numbers + kHalvesBytes + lane * 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      results[r][u] =
          multiply_add(to_floats(below[r]), factor * x_scale(x + r * call.ld), results[r][u]);
  }

  static DotFloats x_scale(const uint8_t* x) {
    return all_lanes_float(x + offsetof(Header, scale));
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
