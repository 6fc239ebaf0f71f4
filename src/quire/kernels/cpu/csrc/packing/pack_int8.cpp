// Packs weights that are int8 already.
//
// Layout and formula: linear_int8.h. Compiled once, for all instruction sets.
#include <algorithm>
#include <cstring>
#include <vector>

#include "packing/int8_bytes.h"
#include "packing/halves.h"
#include "packing/pack.h"

namespace quire {
namespace {

uint8_t* bytes_of(const Weights& linear) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights));
}

}  // namespace

int64_t packed_bytes_int8(const Weights& linear) {
  return num_panels(linear) * int8_panel_bytes(linear);
}

int64_t num_scales_int8(const Weights& linear) { return padded_outputs(linear); }

void pack_int8(const Weights& linear, const int8_t* rows, const float* scales, int64_t first,
               int64_t num_rows) {
  const int64_t K = linear.num_inputs, num_quads = int8_quads(linear);
  std::vector<uint8_t> bytes(kUnitOutputs * num_quads * 4, kByteBias);
  uint8_t* outputs[kUnitOutputs];
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t count = std::min(num_rows - start, kUnitOutputs);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = packed_position(linear, first + start + r);
      const_cast<float*>(linear.scales)[position] = scales[start + r];
      outputs[r] = int8_output_bytes(linear, position);
      uint8_t* to = bytes.data() + r * num_quads * 4;
      for (int64_t k = 0; k < K; ++k) to[k] = uint8_t(rows[(start + r) * K + k] + kByteBias);
    }
    store_int8_quads(bytes.data(), num_quads, count, outputs);
  }
}

void unpack_rows_int8(const Weights& linear, const int64_t* outputs, int64_t num_rows, void* rows,
                      int64_t ld) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = packed_position(linear, outputs[row]);
    const uint8_t* bytes = int8_output_bytes(linear, position);
    const float scale = linear.scales[position];
    for (int64_t k = 0; k < linear.num_inputs; ++k) {
      const float level = float(int8_t(bytes[k / 4 * 4 * kPanelOutputs + k % 4] - kByteBias));
      if (linear.code_format->row_dtype == kBF16)
        static_cast<uint16_t*>(rows)[row * ld + k] = to_bf16(level * scale);
      else
        static_cast<float*>(rows)[row * ld + k] = level * scale;
    }
  }
}

void clear_padding_int8(const Weights& linear) {
  const int64_t last = num_panels(linear) - 1;
  const int64_t panel_bytes = int8_panel_bytes(linear);
  std::memset(bytes_of(linear) + last * panel_bytes, kByteBias, panel_bytes);
  auto* scales = const_cast<float*>(linear.scales);
  for (int64_t n = 0; n < kPanelOutputs; ++n) scales[last * kPanelOutputs + n] = 0.0f;
}

}  // namespace quire
