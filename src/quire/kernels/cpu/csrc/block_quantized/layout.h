// The layout of kBlockQuantized: codes and scales as in a checkpoint, none of them rounded anew.
//
// A weight is a code c of 4, 5, 6 or 8 bits, never negative. Groups of G inputs of an output share
// a scale, and may have a number more:
//
//   w[n, k] = scale[n, g] * (value(c[n, k]) - zero)                    zero: CodeFormat::zero
//           = scale[n, g] * (value(c[n, k]) - zeros[n, g])             CodeFormat::has_zeros
//           = scale[n, g] * (value(c[n, k]) - zero) - offset[n, g]     CodeFormat::has_offsets
//
// value(c) is c, or entry c of a table of 16 (CodeFormat::table). Zeros are whole numbers, at most
// 128 where codes have fewer than 8 bits. Scales, zeros and offsets are either 16-bit floats of
// their own ("flat": CodeFormat::block is 0; fp16, or bf16 with CodeFormat::has_bf16), or of 8 bits
// and multiplied by fp16 factors that 256 inputs share ("two-level": CodeFormat::block is 256):
//
//   scale[n, g] = factor[n, k / 256] * s[n, g]            s in -128 .. 127
//   offset[n, g] = second_factor[n, k / 256] * o[n, g]    o in 0 .. 255
//
// K is padded to whole stretches, with codes and scales of zero. A panel of 32 outputs is two units
// of 16, and a unit one run of bytes, stretch after stretch:
//
//   flat:  two groups                           two-level:  256 inputs
//     scales            [2][16]  16 bits          factors         [16]  fp16
//     zeros or offsets  [2][16]  16 bits, or      second factors  [16]  fp16; zeros if unused
//                                nothing          s  [256/G][16]        bytes
//     codes             [2G/32 chunks]            o  [256/2G][16][2]    bytes, or nothing
//                                                 codes  [8 chunks]
//
// A chunk is 32 inputs, or 8 quads of 4, of the unit's outputs:
//
//   8 bits:      [8 quads][16][4]   bytes, less kCodeBias
//   4 to 6 bits: [4][16][4]         bytes: the low halves are the low four bits of quad 2i, the
//                                   high halves those of quad 2i + 1; then the bits above them
//     5 bits:    [16][4]            bytes: bit q belongs to quad q
//     6 bits:    [2][16][4]         bytes: bits 2j and 2j + 1 of the i-th belong to quad 4i + j
//
// The activations of W wide inputs are much larger than others. They are multiplied separately,
// without rounding. Their weights are also stored in Weights::scales:
//
//   [N/32 panels][W][32]  fp32
#pragma once
#include "linear/linear.h"

namespace quire {

static constexpr int kCodeBias = 128 - kByteBias;
static constexpr int64_t kBlockInputs = 256;
static constexpr int64_t kChunkInputs = 32;
static constexpr int64_t kVectorBytes = 4 * kUnitOutputs;  // four inputs of a unit, a byte each
static constexpr int64_t kHalvesBytes = 2 * kUnitOutputs;  // a number of 16 bits for each output

// The offsets of the parts of a stretch, in bytes.
struct BlockQuantizedLayout {
  int64_t inputs;       // of a stretch
  int64_t num_groups;   // of a stretch
  int64_t scales;       // of 16 bits, or s
  int64_t seconds;      // zeros or offsets of 16 bits, or o
  int64_t codes;
  int64_t chunk_bytes;
  int64_t bytes;        // of a stretch

  explicit BlockQuantizedLayout(const Weights& linear) {
    const CodeFormat& code_format = *linear.code_format;
    const bool has_second = code_format.has_zeros != 0 || code_format.has_offsets != 0;
    const bool is_flat = code_format.block == 0;
    inputs = is_flat ? 2 * linear.group_size : kBlockInputs;
    num_groups = inputs / linear.group_size;
    const int64_t numbers_bytes = num_groups * (is_flat ? kHalvesBytes : kUnitOutputs);
    scales = is_flat ? 0 : 2 * kHalvesBytes;
    seconds = scales + numbers_bytes;
    codes = seconds + (has_second ? numbers_bytes : 0);
    chunk_bytes = code_format.width * kVectorBytes;
    bytes = codes + inputs / kChunkInputs * chunk_bytes;
  }
};

static inline int64_t quantized_stretches(const Weights& linear) {
  return divide_up(linear.num_inputs, BlockQuantizedLayout(linear).inputs);
}

static inline int64_t quantized_unit_bytes(const Weights& linear) {
  return quantized_stretches(linear) * BlockQuantizedLayout(linear).bytes;
}

// The weights of wide inputs of a panel, [num_wide, 32].
static inline float* wide_weights(const Weights& linear, int64_t panel) {
  return const_cast<float*>(linear.scales) + panel * linear.num_wide * kPanelOutputs;
}

}  // namespace quire
