// Packs weights of 8 bits (e4m3) as they are.
//
// Layout and formula: linear_float8.h. Compiled once, for all instruction sets.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear/linear_float8.h"
#include "packing/halves.h"
#include "packing/pack.h"

namespace quire {
namespace {

// The place of the code of input 0; float8_offset has the offsets of other inputs.
uint8_t* output_codes(const Weights& linear, int64_t position) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights)) +
         position / kPanelOutputs * float8_panel_bytes(linear) + position % kPanelOutputs * 4;
}

float& output_scale(const Weights& linear, int64_t position, int64_t group) {
  const int64_t line = position / kPanelOutputs * float8_groups(linear) + group;
  return const_cast<float*>(linear.scales)[line * kPanelOutputs + position % kPanelOutputs];
}

float from_float8(uint8_t code) {
  const float x = float_of(uint32_t(code & 0x7f) << 20) * 0x1p120f;
  return code & 0x80 ? -x : x;
}

}  // namespace

int64_t packed_bytes_float8(const Weights& linear) {
  return num_panels(linear) * float8_panel_bytes(linear);
}

int64_t num_scales_float8(const Weights& linear) {
  return float8_groups(linear) * padded_outputs(linear);
}

void clear_padding_float8(const Weights& linear) {
  const int64_t last = padded_outputs(linear) - kPanelOutputs;
  std::memset(output_codes(linear, last), 0, float8_panel_bytes(linear));
}

// A unit's outputs at a time and inputs outside, so that whole cache lines are written one by one.
void pack_codes_float8(const Weights& linear, const CodeRows& rows, int64_t first,
                       int64_t num_rows) {
  const int64_t K = linear.num_inputs, num_groups = float8_groups(linear);
  const int64_t group_inputs = float8_group_inputs(linear);
  const auto* scales = static_cast<const float*>(rows.scales);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t group = 0; group < num_groups; ++group)
      output_scale(linear, packed_position(linear, first + row), group) =
          scales[row * num_groups + group];
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t count = std::min(num_rows - start, kUnitOutputs);
    uint8_t* outputs[kUnitOutputs];
    for (int64_t r = 0; r < count; ++r)
      outputs[r] = output_codes(linear, packed_position(linear, first + start + r));
    for (int64_t k = 0; k < K; ++k)
      for (int64_t r = 0; r < count; ++r) {
        const uint8_t code = rows.codes[(start + r) * K + k];
        outputs[r][float8_offset(k)] = code;
        if ((code & 0x7f) == 0x7f)
          output_scale(linear, packed_position(linear, first + start + r), k / group_inputs) = NAN;
      }
  }
}

void unpack_rows_float8(const Weights& linear, const int64_t* outputs, int64_t num_rows, void* rows,
                        int64_t ld) {
  const int64_t group_inputs = float8_group_inputs(linear);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = packed_position(linear, outputs[row]);
    const uint8_t* codes = output_codes(linear, position);
    for (int64_t k = 0; k < linear.num_inputs; ++k) {
      const float number =
          from_float8(codes[float8_offset(k)]) * output_scale(linear, position, k / group_inputs);
      if (linear.code_format->row_dtype == kBF16)
        static_cast<uint16_t*>(rows)[row * ld + k] = to_bf16(number);
      else
        static_cast<float*>(rows)[row * ld + k] = number;
    }
  }
}

}  // namespace quire
