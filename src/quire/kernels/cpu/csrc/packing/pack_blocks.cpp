// Packs block-quantized weights from the blocks of a GGUF file.
//
// A row is a run of blocks of 32 or 256 inputs, as ggml-common.h of llama.cpp describes them. Each
// is taken apart into codes and numbers, which stay as they are, and stored as
// block_quantized/layout.h says. Compiled once, for all instruction sets.
#include <cstring>

#include "packing/pack.h"
#include "packing/quantized_span.h"

namespace quire {
namespace {

uint16_t half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return bits;
}

uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Eight bytes at a time: g++ 12 takes loops over bytes apart where they might be the same memory.
constexpr uint64_t kEachByte = 0x0101010101010101;

uint64_t eight(const uint8_t* from) {
  uint64_t bytes;
  std::memcpy(&bytes, from, 8);
  return bytes;
}

void store_eight(uint8_t* to, uint64_t bytes) { std::memcpy(to, &bytes, 8); }

// Sixteen bytes whose low halves are inputs 0 .. 15, the high ones 16 .. 31.
void split_halves(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; i += 8) {
    const uint64_t pairs = eight(bytes + i), low = kEachByte * 15;
    store_eight(codes + i, pairs & low);
    store_eight(codes + 16 + i, pairs >> 4 & low);
  }
}

// Blocks of 32 inputs. take(block, span, i): the block is the span's group i.
struct Q4_0 {
  static constexpr int64_t kInputs = 32, kBytes = 18;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half(block);
    split_halves(block + 2, span.codes + i * 32);
  }
};

struct Q4_1 {
  static constexpr int64_t kInputs = 32, kBytes = 20;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half(block);
    span.second_halves[i] = negated(half(block + 2));  // the least weight is added there
    split_halves(block + 4, span.codes + i * 32);
  }
};

// bits: the fifth bit of each of 32 inputs.
void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    // Byte j keeps bit j, which the sum carries to the byte's bit 7.
    const uint64_t own = bits[i] * kEachByte & 0x8040201008040201;
    const uint64_t highest = (own + 0x00406070787c7e7f) & kEachByte << 7;
    store_eight(codes + i * 8, eight(codes + i * 8) | highest >> 3);
  }
}

struct Q5_0 {
  static constexpr int64_t kInputs = 32, kBytes = 22;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half(block);
    split_halves(block + 6, span.codes + i * 32);
    add_fifth_bits(block + 2, span.codes + i * 32);
  }
};

struct Q5_1 {
  static constexpr int64_t kInputs = 32, kBytes = 24;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half(block);
    span.second_halves[i] = negated(half(block + 2));
    split_halves(block + 8, span.codes + i * 32);
    add_fifth_bits(block + 4, span.codes + i * 32);
  }
};

struct Q8_0 {
  static constexpr int64_t kInputs = 32, kBytes = 34;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half(block);
    for (int k = 0; k < 32; ++k) span.codes[i * 32 + k] = block[2 + k] ^ 128;  // signed, plus 128
  }
};

struct MXFP4 {
  static constexpr int64_t kInputs = 32, kBytes = 17;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t i) {
    span.halves[i] = half_of_power(block[0]);
    split_halves(block + 1, span.codes + i * 32);
  }
  // 2^(exponent - 128) as bf16: entries of the table are twice the numbers.
  static uint16_t half_of_power(uint8_t exponent) {
    return exponent < 2 ? uint16_t(0x20 << exponent) : uint16_t((exponent - 1) << 7);
  }
};

// Blocks of 256 inputs.

// Eight scales and eight offsets of six bits, in twelve bytes.
void take_scales(const uint8_t* packed, QuantizedSpan& span) {
  for (int g = 0; g < 4; ++g) {
    span.scales[g] = int8_t(packed[g] & 63);
    span.offsets[g] = packed[g + 4] & 63;
    span.scales[g + 4] = int8_t((packed[g + 8] & 15) | packed[g] >> 6 << 4);
    span.offsets[g + 4] = uint8_t(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
  }
}

// Four codes of two bits in each byte: its bits 2j and 2j + 1 are of 32 inputs of their own.
void split_quarters(const uint8_t* bytes, uint8_t* codes) {
  for (int n = 0; n < 2; ++n)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 32; ++i) codes[n * 128 + j * 32 + i] = bytes[n * 32 + i] >> j * 2 & 3;
}

struct Q2_K {
  static constexpr int64_t kInputs = 256, kBytes = 84;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    for (int g = 0; g < 16; ++g) {
      span.scales[g] = int8_t(block[g] & 15);
      span.offsets[g] = block[g] >> 4;
    }
    split_quarters(block + 16, span.codes);
    std::memcpy(span.factors, block + 80, 4);
  }
};

struct Q3_K {
  static constexpr int64_t kInputs = 256, kBytes = 110;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    const uint8_t* scales = block + 96;
    for (int g = 0; g < 16; ++g) {
      const int low = scales[g % 8] >> g / 8 * 4 & 15, high = scales[8 + g % 4] >> g / 4 * 2 & 3;
      span.scales[g] = int8_t((low | high << 4) - 32);
    }
    split_quarters(block + 32, span.codes);
    for (int n = 0; n < 8; ++n)
      for (int i = 0; i < 32; ++i) span.codes[n * 32 + i] |= uint8_t((block[i] >> n & 1) << 2);
    span.factors[0] = half(block + 108);
  }
};

struct Q4_K {
  static constexpr int64_t kInputs = 256, kBytes = 144;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    std::memcpy(span.factors, block, 4);
    take_scales(block + 4, span);
    const uint8_t* bytes = block + 16;
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 32; ++i) {
        span.codes[j * 64 + i] = bytes[j * 32 + i] & 15;
        span.codes[j * 64 + 32 + i] = bytes[j * 32 + i] >> 4;
      }
  }
};

struct Q5_K {
  static constexpr int64_t kInputs = 256, kBytes = 176;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    std::memcpy(span.factors, block, 4);
    take_scales(block + 4, span);
    const uint8_t *fifth = block + 16, *bytes = block + 48;
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 32; ++i) {
        const uint8_t byte = bytes[j * 32 + i], bits = uint8_t(fifth[i] >> j * 2);
        span.codes[j * 64 + i] = uint8_t((byte & 15) | (bits & 1) << 4);
        span.codes[j * 64 + 32 + i] = uint8_t(byte >> 4 | (bits >> 1 & 1) << 4);
      }
  }
};

struct Q6_K {
  static constexpr int64_t kInputs = 256, kBytes = 210;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    const uint8_t *low = block, *high = block + 128;
    std::memcpy(span.scales, block + 192, 16);
    span.factors[0] = half(block + 208);
    for (int n = 0; n < 2; ++n, low += 64, high += 32) {
      uint8_t* codes = span.codes + n * 128;
      for (int i = 0; i < 32; ++i) {
        codes[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
        codes[i + 32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
        codes[i + 64] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
        codes[i + 96] = uint8_t(low[i + 32] >> 4 | (high[i] >> 6) << 4);
      }
    }
  }
};

struct IQ4_XS {
  static constexpr int64_t kInputs = 256, kBytes = 136;
  static void take(const uint8_t* block, QuantizedSpan& span, int64_t) {
    span.factors[0] = half(block);
    const uint16_t high = half(block + 2);
    for (int g = 0; g < 8; ++g) {
      const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
      span.scales[g] = int8_t((low | (high >> g * 2 & 3) << 4) - 32);
      split_halves(block + 8 + g * 16, span.codes + g * 32);
    }
  }
};

// K: a multiple of the blocks' inputs.
template <typename Block>
void pack_as(const Weights& linear, const uint8_t* rows, int64_t row_bytes, int64_t first,
             int64_t num_rows) {
  const int64_t num_blocks = linear.num_inputs / Block::kInputs;
  constexpr int64_t kPerSpan = kBlockInputs / Block::kInputs;
  pack_spans(linear, first, num_rows, [&](int64_t row, int64_t k, QuantizedSpan& span) {
    const uint8_t* blocks = rows + row * row_bytes + k / Block::kInputs * Block::kBytes;
    const int64_t left = num_blocks - k / Block::kInputs;
    for (int64_t i = 0; i < kPerSpan && i < left; ++i)
      Block::take(blocks + i * Block::kBytes, span, i);
  });
}

}  // namespace

bool pack_blocks(const Weights& linear, int32_t type, const uint8_t* rows, int64_t row_bytes,
                 int64_t first, int64_t num_rows) {
  switch (type) {
    case 2: pack_as<Q4_0>(linear, rows, row_bytes, first, num_rows); return true;
    case 3: pack_as<Q4_1>(linear, rows, row_bytes, first, num_rows); return true;
    case 6: pack_as<Q5_0>(linear, rows, row_bytes, first, num_rows); return true;
    case 7: pack_as<Q5_1>(linear, rows, row_bytes, first, num_rows); return true;
    case 8: pack_as<Q8_0>(linear, rows, row_bytes, first, num_rows); return true;
    case 10: pack_as<Q2_K>(linear, rows, row_bytes, first, num_rows); return true;
    case 11: pack_as<Q3_K>(linear, rows, row_bytes, first, num_rows); return true;
    case 12: pack_as<Q4_K>(linear, rows, row_bytes, first, num_rows); return true;
    case 13: pack_as<Q5_K>(linear, rows, row_bytes, first, num_rows); return true;
    case 14: pack_as<Q6_K>(linear, rows, row_bytes, first, num_rows); return true;
    case 20: pack_as<Q4_0>(linear, rows, row_bytes, first, num_rows); return true;  // IQ4_NL
    case 23: pack_as<IQ4_XS>(linear, rows, row_bytes, first, num_rows); return true;
    case 39: pack_as<MXFP4>(linear, rows, row_bytes, first, num_rows); return true;
    default: return false;
  }
}

}  // namespace quire
