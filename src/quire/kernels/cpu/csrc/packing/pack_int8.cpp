// Packs int8 weights.
//
// Layout and formula: linear_int8.h. Compiled once, for all instruction sets.
#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/linear_int8.h"
#include "packing/halves.h"
#include "packing/pack.h"
#include "packing/pack_rows.h"

namespace quire {
namespace {

constexpr uint8_t kZero = 128;

uint8_t* bytes_of(const Weights& linear) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights));
}

// The bytes of one output's quads; the next quad is 4 * 32 bytes on.
uint8_t* output_bytes(const Weights& linear, int64_t position) {
  return bytes_of(linear) + position / kPanelOutputs * int8_panel_bytes(linear) +
         position % kPanelOutputs * 4;
}

// Compared by their bits, which order NaN above infinity above all numbers.
float largest_magnitude(const float* row, int64_t K) {
  int32_t largest = 0;
  for (int64_t k = 0; k < K; ++k) {
    int32_t bits;
    std::memcpy(&bits, row + k, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float result;
  std::memcpy(&result, &largest, 4);
  return result;
}

void quantize(const float* row, float factor, int64_t K, uint8_t* bytes) {
  for (int64_t k = 0; k < K; ++k) bytes[k] = uint8_t(rounded(row[k] * factor) + kZero);
}

// bytes: [count][num_quads][4]. Quads outside, so that whole cache lines are written one after
// another.
void store_quads(const uint8_t* bytes, int64_t num_quads, int64_t count, uint8_t* const* outputs) {
  for (int64_t quad = 0; quad < num_quads; ++quad)
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(outputs[r] + quad * 4 * kPanelOutputs, bytes + (r * num_quads + quad) * 4, 4);
}

}  // namespace

int64_t packed_bytes_int8(const Weights& linear) {
  return num_panels(linear) * int8_panel_bytes(linear);
}

int64_t num_scales_int8(const Weights& linear) { return padded_outputs(linear); }

void pack_rows_int8(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                    int64_t first, int64_t num_rows) {
  const int64_t K = linear.num_inputs, num_quads = int8_quads(linear);
  auto* scales = const_cast<float*>(linear.scales);
  std::vector<float> wide(K);
  std::vector<uint8_t> bytes(kUnitOutputs * num_quads * 4);
  uint8_t* outputs[kUnitOutputs];
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t count = num_rows - start < kUnitOutputs ? num_rows - start : kUnitOutputs;
    std::fill(bytes.begin(), bytes.end(), kZero);
    for (int64_t r = 0; r < count; ++r) {
      widen_row(rows, rows_dtype, (start + r) * ld, K, wide.data());
      const float largest = largest_magnitude(wide.data(), K);
      const bool is_finite = largest <= 3.4028235e38f;
      const int64_t position = packed_position(linear, first + start + r);
      scales[position] = is_finite ? largest / 127.0f : __builtin_nanf("");
      outputs[r] = output_bytes(linear, position);
      // Weights that are all but zero are zero; those of a row with a NaN or an infinity too, but
      // then the scale is NaN, and so is the output.
      if (is_finite && largest >= 1e-30f)
        quantize(wide.data(), 127.0f / largest, K, bytes.data() + r * num_quads * 4);
    }
    store_quads(bytes.data(), num_quads, count, outputs);
  }
}

void pack_int8(const Weights& linear, const int8_t* rows, const float* scales, int64_t first,
               int64_t num_rows) {
  const int64_t K = linear.num_inputs, num_quads = int8_quads(linear);
  std::vector<uint8_t> bytes(kUnitOutputs * num_quads * 4, kZero);
  uint8_t* outputs[kUnitOutputs];
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t count = std::min(num_rows - start, kUnitOutputs);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = packed_position(linear, first + start + r);
      const_cast<float*>(linear.scales)[position] = scales[start + r];
      outputs[r] = output_bytes(linear, position);
      uint8_t* to = bytes.data() + r * num_quads * 4;
      for (int64_t k = 0; k < K; ++k) to[k] = uint8_t(rows[(start + r) * K + k] + kZero);
    }
    store_quads(bytes.data(), num_quads, count, outputs);
  }
}

void unpack_rows_int8(const Weights& linear, const int64_t* outputs, int64_t num_rows, void* rows,
                      int64_t ld) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = packed_position(linear, outputs[row]);
    const uint8_t* bytes = output_bytes(linear, position);
    const float scale = linear.scales[position];
    for (int64_t k = 0; k < linear.num_inputs; ++k) {
      const float level = float(bytes[k / 4 * 4 * kPanelOutputs + k % 4]) - kZero;
      if (linear.coding->row_dtype == kBF16)
        static_cast<uint16_t*>(rows)[row * ld + k] = to_bf16(level * scale);
      else
        static_cast<float*>(rows)[row * ld + k] = level * scale;
    }
  }
}

void clear_padding_int8(const Weights& linear) {
  const int64_t last = num_panels(linear) - 1;
  std::memset(bytes_of(linear) + last * int8_panel_bytes(linear), kZero, int8_panel_bytes(linear));
  auto* scales = const_cast<float*>(linear.scales);
  for (int64_t n = 0; n < kPanelOutputs; ++n) scales[last * kPanelOutputs + n] = 0.0f;
}

}  // namespace quire
