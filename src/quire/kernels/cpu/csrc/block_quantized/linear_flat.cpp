// Linears of block-quantized weights whose groups have 16-bit scales of their own.
//
// Layout and formula: layout.h; activations: quantize_groups.h. For a row m and an output n, chunk
// of 32 inputs, which are in the group g, after chunk,
//
//   dot     = sum over the chunk of (value(c[n, k]) - zero) q[m, k]     exact, below 2^24
//   result += dot * round(scale[n, g] * x_scale[m, chunk])              one rounding (fma)
//   result -= offset[n, g] * round(x_scale[m, chunk] * (sum of q))      one rounding (fma)
//
// all in fp32, but for integers in dot.
#include "block_quantized/task.h"

namespace quire::QUIRE_ISA {
namespace {

template <CodeKind kKind>
struct Flat {
  static constexpr int kLargest = largest_of(kKind);
  // A row takes two registers for each of the outputs: the chunk's sum and the result.
  static constexpr int kMaxRows = kHas32Registers || fits_shorts<kLargest, 8>() ? 6 : 4;
  static constexpr int kParts = 1;  // of a chunk
  using Header = ChunkHeader<kParts>;
  using Element = ElementOf<kLargest>;  // of x
  static constexpr bool kExpands =
      kKind != CodeKind::k8 || kExpandsPairs<kLargest> || kHoldsQuads;

  template <typename Tile>
  static void expand(const Weights& linear, const BlockQuantizedLayout& layout,
                     const CodeTable& table, const uint8_t* stretch, uint8_t* to) {
    const CodeFormat& code_format = *linear.code_format;
    for (int lane = 0; lane < kUnitOutputs; lane += kIntLanes) {
      const uint8_t* chunk = stretch + layout.codes + lane * 4;
      uint8_t* tile = to + lane * 4;
      for (int g = 0; g < 2; ++g) {
        const uint8_t* numbers = stretch + g * kHalvesBytes + lane * 2;
        const DotFloats scale = widen(numbers, code_format);
        DotFloats second{};
        DotInts added{};
        if (Tile::kSeconds == Seconds::kOffsets)
          second = -widen(numbers + layout.seconds, code_format);
        else if (Tile::kSeconds == Seconds::kZeros)
          second = above_zeros(numbers + layout.seconds, code_format);
        else if (code_format.has_zeros != 0)
          added = (to_ints(above_zeros(numbers + layout.seconds, code_format)) & 0xff) * 0x01010101;
        for (int64_t k = 0; k < linear.group_size; k += kChunkInputs) {
          Tile::store_numbers(tile, 0, scale, second);
          Tile::store_codes(tile, Chunk<kKind>(chunk, table), added);
          chunk += Chunk<kKind>::kBytes;
          tile += Tile::kBytes;
        }
      }
    }
  }

  // U: registers at once.
  template <int R, int U>
  static void multiply(const UnitProduct& call, Prefetch prefetch) {
    const int64_t num_chunks = call.layout.inputs / kChunkInputs;  // of a stretch
    const int64_t of_group = num_chunks / 2;
    prefetch.spread(call.num_stretches * num_chunks * (kUnitOutputs / lanes_at_once<U>));
    for (int lane = 0; lane < kUnitOutputs; lane += lanes_at_once<U>) {
      DotFloats results[R][U] = {};
      const CodeFormat code_format = *call.linear.code_format;  // stays in registers
      const uint8_t *stretch = call.unit, *x = call.x;
      for (int64_t i = 0; i < call.num_stretches; ++i, stretch += call.layout.bytes) {
        const uint8_t* chunks = stretch + call.layout.codes + lane * 4;
        const uint8_t* numbers = stretch + lane * 2;
        for (int64_t c = 0; c < num_chunks; ++c) {
          prefetch.step();
          add_chunk<R, U>(call, code_format, numbers + (c < of_group ? 0 : kHalvesBytes), chunks, x,
                          results);
          chunks += Chunk<kKind>::kBytes;
          x += kChunkRowBytes<kParts, Element>;
        }
      }
      store_results<R, U>(results, call.results + lane);
    }
  }

  // numbers: the group's scales; its seconds are as far on as the stretch's are.
  template <int R, int U>
  static void add_chunk(const UnitProduct& call, const CodeFormat& code_format,
                        const uint8_t* numbers, const uint8_t* chunk, const uint8_t* x,
                        DotFloats (&results)[R][U]) {
    // First, the products.
    const int64_t ld = call.ld, unit_bytes = call.unit_bytes;
    RowSums<R, U> sums;
    const auto codes = chunks_of<kKind, U>(chunk, unit_bytes, call.table);
    sum_chunk<0, 8>(codes.units, x + sizeof(Header), x + offsetof(Header, corrections), ld, sums);
    // Then, times the scales.
    const Numbers<U> scales(numbers, unit_bytes, code_format);
    const uint8_t* seconds = numbers + call.layout.seconds;
    if (code_format.has_zeros != 0) {  // dot = sum + (kByteBias - zero) * (sum of q): exact too
      const Numbers<U> zeros(seconds, unit_bytes, code_format);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) {
          const DotFloats above = DotFloats{} + float(kByteBias) - zeros.of[u];
          const DotFloats dot = fma(above, x_sum(x + r * ld), to_floats(sums.of[r][u]));
          results[r][u] = fma(dot, scales.of[u] * x_scale(x + r * ld), results[r][u]);
        }
      return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u)
        results[r][u] =
            fma(to_floats(sums.of[r][u]), scales.of[u] * x_scale(x + r * ld), results[r][u]);
    if (code_format.has_offsets == 0) return;
    const Numbers<U> offsets(seconds, unit_bytes, code_format);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u)
        results[r][u] = fma(-offsets.of[u], x_sum(x + r * ld), results[r][u]);
  }

  // The numbers of U registers' outputs.
  template <int U>
  struct Numbers {
    DotFloats of[U];

    Numbers(const uint8_t* numbers, int64_t unit_bytes, const CodeFormat& code_format) {
      const auto at = [&](int u) {
        return numbers + unit_offset(u, unit_bytes) + lane_offset(u) * 2;
      };
      if (code_format.has_bf16 != 0) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) of[u] = widen_bf16(at(u));
      } else {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) of[u] = widen_fp16(at(u));
      }
    }
  };

  static DotFloats widen(const uint8_t* numbers, const CodeFormat& code_format) {
    return code_format.has_bf16 != 0 ? widen_bf16(numbers) : widen_fp16(numbers);
  }
  // kByteBias - zero of each output.
  static DotFloats above_zeros(const uint8_t* zeros, const CodeFormat& code_format) {
    return DotFloats{} + float(kByteBias) - widen(zeros, code_format);
  }
  static DotFloats x_scale(const uint8_t* x) {
    return all_lanes_float(x + offsetof(Header, scale));
  }
  static DotFloats x_sum(const uint8_t* x) {
    return all_lanes_float(x + offsetof(Header, sums));
  }
};

}  // namespace

void linear_flat(Pool& pool, const LinearCall& call) {
  const CodeFormat& code_format = *call.any().code_format;
  if (code_format.table != nullptr) {
    if constexpr (kHasByteSums) {
      if (is_narrow(code_format))
        return multiply_block_quantized<Flat<CodeKind::kNarrowTable>>(pool, call);
    }
    return multiply_block_quantized<Flat<CodeKind::kTable>>(pool, call);
  }
  if (code_format.width == 4) return multiply_block_quantized<Flat<CodeKind::k4>>(pool, call);
  if (code_format.width == 5) return multiply_block_quantized<Flat<CodeKind::k5>>(pool, call);
  return multiply_block_quantized<Flat<CodeKind::k8>>(pool, call);
}

}  // namespace quire::QUIRE_ISA
