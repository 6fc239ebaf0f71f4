// Packs and unpacks block-quantized weights.
//
// Layout and formula: block_quantized/layout.h. Compiled once, for all instruction sets.
#include <algorithm>
#include <cstring>

#include "packing/quantized_span.h"
#include "packing/halves.h"
#include "packing/pack.h"

namespace quire {
namespace {

uint8_t* unit_at(const Weights& linear, int64_t position) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights)) +
         position / kUnitOutputs * quantized_unit_bytes(linear);
}

uint32_t four(const uint8_t* codes) {
  uint32_t word;
  std::memcpy(&word, codes, 4);
  return word;
}

void store_four(uint8_t* to, uint32_t word) { std::memcpy(to, &word, 4); }

// 32 codes of an output; to: its four bytes of the chunk's first vector.
void store_chunk(const uint8_t* codes, int32_t width, uint8_t* to) {
  if (width == 8) {
    for (int q = 0; q < 8; ++q)
      store_four(to + q * kVectorBytes, four(codes + q * 4) ^ kCodeBias * 0x01010101u);
    return;
  }
  uint32_t low[8], high[8];
  for (int q = 0; q < 8; ++q) {
    low[q] = four(codes + q * 4) & 0x0f0f0f0f;
    high[q] = four(codes + q * 4) >> 4 & 0x0f0f0f0f;
  }
  for (int i = 0; i < 4; ++i) store_four(to + i * kVectorBytes, low[i * 2] | low[i * 2 + 1] << 4);
  uint8_t* above = to + 4 * kVectorBytes;
  if (width == 5) {
    uint32_t bits = 0;
    for (int q = 0; q < 8; ++q) bits |= (high[q] & 0x01010101) << q;
    store_four(above, bits);
  } else if (width == 6) {
    for (int i = 0; i < 2; ++i) {
      uint32_t bits = 0;
      for (int j = 0; j < 4; ++j) bits |= (high[i * 4 + j] & 0x03030303) << 2 * j;
      store_four(above + i * kVectorBytes, bits);
    }
  }
}

// The four codes of quad q, of the output whose first four bytes of the chunk are given.
uint32_t load_quad(const uint8_t* chunk, int32_t width, int64_t q) {
  if (width == 8) return four(chunk + q * kVectorBytes) ^ kCodeBias * 0x01010101u;
  const uint32_t low = four(chunk + q / 2 * kVectorBytes) >> q % 2 * 4 & 0x0f0f0f0f;
  const uint8_t* above = chunk + 4 * kVectorBytes;
  if (width == 5) return low | (four(above) >> q & 0x01010101) << 4;
  if (width == 6)
    return low | (four(above + q / 4 * kVectorBytes) >> q % 4 * 2 & 0x03030303) << 4;
  return low;
}

void store_half(uint8_t* to, uint16_t half) { std::memcpy(to, &half, 2); }

uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  return half;
}

// One stretch of one output: its groups from `group` of the span on.
class StretchWriter {
 public:
  StretchWriter(const CodeFormat& code_format, const BlockQuantizedLayout& layout,
                uint8_t* stretch, int64_t lane)
      : layout_(layout), code_format_(code_format), stretch_(stretch), lane_(lane) {}

  void store(const QuantizedSpan& span, int64_t group, int64_t first_input) const {
    const bool has_second = code_format_.has_zeros != 0 || code_format_.has_offsets != 0;
    if (code_format_.block == 0)
      store_flat(span, group, has_second);
    else
      store_two_level(span, has_second);
    uint8_t* chunk = stretch_ + layout_.codes + lane_ * 4;
    for (int64_t i = 0; i < layout_.inputs; i += kChunkInputs, chunk += layout_.chunk_bytes)
      store_chunk(span.codes + first_input + i, code_format_.width, chunk);
  }

 private:
  void store_flat(const QuantizedSpan& span, int64_t group, bool has_second) const {
    for (int64_t g = 0; g < 2; ++g) {
      uint8_t* number = stretch_ + g * kHalvesBytes + lane_ * 2;
      store_half(number, span.halves[group + g]);
      if (has_second) store_half(number + layout_.seconds, span.second_halves[group + g]);
    }
  }

  void store_two_level(const QuantizedSpan& span, bool has_second) const {
    for (int i = 0; i < 2; ++i)
      store_half(stretch_ + i * kHalvesBytes + lane_ * 2, span.factors[i]);
    for (int64_t g = 0; g < layout_.num_groups; ++g) {
      stretch_[layout_.scales + g * kUnitOutputs + lane_] = uint8_t(span.scales[g]);
      if (has_second)
        stretch_[layout_.seconds + g / 2 * 2 * kUnitOutputs + lane_ * 2 + g % 2] = span.offsets[g];
    }
  }

  const BlockQuantizedLayout& layout_;
  const CodeFormat& code_format_;
  uint8_t* stretch_;
  int64_t lane_;
};

// Numbers of one output, from its unit.
class OutputReader {
 public:
  OutputReader(const Weights& linear, int64_t position)
      : layout_(linear), linear_(linear), code_format_(*linear.code_format),
        unit_(unit_at(linear, position)), lane_(position % kUnitOutputs) {}

  // f(k, weight) for all inputs.
  template <typename F>
  void read(F&& f) const {
    const int64_t K = linear_.num_inputs, G = linear_.group_size;
    for (int64_t start = 0; start < K; start += G) {
      const uint8_t* stretch = unit_ + start / layout_.inputs * layout_.bytes;
      const int64_t within = start % layout_.inputs;
      const Group group = read_group(stretch, within / G);
      for (int64_t i = 0; i < G && start + i < K; i += 4) {
        const int64_t k = within + i;
        const uint8_t* chunk =
            stretch + layout_.codes + k / kChunkInputs * layout_.chunk_bytes + lane_ * 4;
        const uint32_t quad = load_quad(chunk, code_format_.width, k % kChunkInputs / 4);
        for (int64_t j = 0; j < 4 && start + i + j < K; ++j)
          f(start + i + j, group.weight(value(quad >> j * 8 & 0xff)));
      }
    }
  }

  // The weight of one input.
  float weight_at(int64_t k) const {
    const uint8_t* stretch = unit_ + k / layout_.inputs * layout_.bytes;
    const int64_t within = k % layout_.inputs;
    const uint8_t* chunk =
        stretch + layout_.codes + within / kChunkInputs * layout_.chunk_bytes + lane_ * 4;
    const uint32_t quad = load_quad(chunk, code_format_.width, k % kChunkInputs / 4);
    return read_group(stretch, within / linear_.group_size).weight(value(quad >> k % 4 * 8 & 0xff));
  }

 private:
  struct Group {
    float scale, zero, offset;
    float weight(float value) const { return scale * (value - zero) - offset; }
  };

  float value(uint32_t code) const {
    return code_format_.table != nullptr ? float(code_format_.table[code]) : float(code);
  }

  float widened(const uint8_t* number) const {
    return code_format_.has_bf16 != 0 ? from_bf16(half_at(number)) : from_fp16(half_at(number));
  }

  Group read_group(const uint8_t* stretch, int64_t g) const {
    Group group{0.0f, float(code_format_.zero), 0.0f};
    if (code_format_.block == 0) {
      const uint8_t* number = stretch + g * kHalvesBytes + lane_ * 2;
      group.scale = widened(number);
      if (code_format_.has_zeros != 0) group.zero = widened(number + layout_.seconds);
      if (code_format_.has_offsets != 0) group.offset = widened(number + layout_.seconds);
      return group;
    }
    const auto s = int8_t(stretch[layout_.scales + g * kUnitOutputs + lane_]);
    group.scale = from_fp16(half_at(stretch + lane_ * 2)) * float(s);
    if (code_format_.has_offsets != 0) {
      const uint8_t o = stretch[layout_.seconds + g / 2 * 2 * kUnitOutputs + lane_ * 2 + g % 2];
      group.offset = from_fp16(half_at(stretch + kHalvesBytes + lane_ * 2)) * float(o);
    }
    return group;
  }

  BlockQuantizedLayout layout_;
  const Weights& linear_;
  const CodeFormat& code_format_;
  const uint8_t* unit_;
  int64_t lane_;
};

}  // namespace

void store_spans(const Weights& linear, int64_t position, int64_t count, int64_t k,
                 const QuantizedSpan* spans) {
  const BlockQuantizedLayout layout(linear);
  const int64_t end = std::min(k + kBlockInputs, quantized_stretches(linear) * layout.inputs);
  uint8_t* unit = unit_at(linear, position);
  for (int64_t start = k; start < end; start += layout.inputs) {
    uint8_t* stretch = unit + start / layout.inputs * layout.bytes;
    const int64_t group = (start - k) / linear.group_size;
    for (int64_t i = 0; i < count; ++i)
      StretchWriter(*linear.code_format, layout, stretch, position % kUnitOutputs + i)
          .store(spans[i], group, start - k);
  }
}

int64_t packed_bytes_block_quantized(const Weights& linear) {
  return num_panels(linear) * 2 * quantized_unit_bytes(linear);
}

void clear_padding_block_quantized(const Weights& linear) {
  const int64_t last = (num_panels(linear) - 1) * kPanelOutputs;
  std::memset(unit_at(linear, last), 0, 2 * quantized_unit_bytes(linear));
}

void pack_codes_block_quantized(const Weights& linear, const CodeRows& rows, int64_t first,
                                int64_t num_rows) {
  const CodeFormat& code_format = *linear.code_format;
  const int64_t K = linear.num_inputs, G = linear.group_size;
  const int64_t num_groups = divide_up(K, G), num_blocks = divide_up(K, kBlockInputs);
  pack_spans(linear, first, num_rows, [&](int64_t row, int64_t k, QuantizedSpan& span) {
    const int64_t left = std::min(K - k, kBlockInputs), at = row * num_groups + k / G;
    const int64_t groups = divide_up(left, G);
    std::memcpy(span.codes, rows.codes + row * K + k, left);
    if (code_format.block == 0) {
      std::memcpy(span.halves, static_cast<const uint16_t*>(rows.scales) + at, groups * 2);
      const auto* seconds = static_cast<const uint16_t*>(rows.seconds);
      if (seconds != nullptr) std::memcpy(span.second_halves, seconds + at, groups * 2);
      return;
    }
    std::memcpy(span.scales, static_cast<const int8_t*>(rows.scales) + at, groups);
    if (rows.seconds != nullptr)
      std::memcpy(span.offsets, static_cast<const uint8_t*>(rows.seconds) + at, groups);
    const uint16_t* factors = rows.factors + (row * num_blocks + k / kBlockInputs) * 2;
    std::memcpy(span.factors, factors, sizeof span.factors);
  });
}

void pack_wide(const Weights& linear) {
  for (int64_t position = 0; position < padded_outputs(linear); ++position) {
    const OutputReader reader(linear, position);
    float* to = wide_weights(linear, position / kPanelOutputs) + position % kPanelOutputs;
    for (int64_t i = 0; i < linear.num_wide; ++i)
      to[i * kPanelOutputs] = reader.weight_at(linear.wide_inputs[i]);
  }
}

void unpack_rows_block_quantized(const Weights& linear, const int64_t* outputs, int64_t num_rows,
                                 void* rows, int64_t ld) {
  const int32_t* order = linear.code_format->input_order;
  for (int64_t row = 0; row < num_rows; ++row) {
    const OutputReader reader(linear, packed_position(linear, outputs[row]));
    reader.read([&](int64_t k, float weight) {
      const int64_t at = row * ld + (order != nullptr ? order[k] : k);
      if (linear.code_format->row_dtype == kBF16)
        static_cast<uint16_t*>(rows)[at] = to_bf16(weight);
      else
        static_cast<float*>(rows)[at] = weight;
    });
  }
}

}  // namespace quire
