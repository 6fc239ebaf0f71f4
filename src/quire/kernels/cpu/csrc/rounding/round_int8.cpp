// Rotates weights, rounds them to int8 and packs them.
//
// Layout and formula: linear_int8.h; kernels/quantize.py's quantize_int8_weight does the same, in
// the same order, so every instruction set stores the same bytes.
#include <cstring>
#include <vector>

#include "hadamard.h"
#include "kernels_isa.h"
#include "packing/int8_bytes.h"
#include "rounding/round_bytes.h"

namespace quire::QUIRE_ISA {
namespace {

template <typename Row>
void round_rows(const Weights& linear, const Row* rows, int64_t ld, int64_t first,
                int64_t num_rows) {
  const int64_t K = linear.num_inputs, num_quads = int8_quads(linear);
  const int rotation = int8_rotation(linear);
  const vf unscaled = splat(1.0f / float(rotation));
  std::vector<float> wide(divide_up(K, kLanes) * kLanes);
  std::vector<uint8_t> bytes(kUnitOutputs * num_quads * 4);
  uint8_t* outputs[kUnitOutputs];
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t count = num_rows - start < kUnitOutputs ? num_rows - start : kUnitOutputs;
    std::memset(bytes.data(), kByteBias, bytes.size());
    for (int64_t r = 0; r < count; ++r) {
      const Row* row = rows + (start + r) * ld;
      rotate_blocks(row, K, rotation, wide.data());
      for (int64_t k = 0; rotation > 1 && k < K; k += kLanes)
        store(&wide[k], load(&wide[k]) * unscaled);
      const int64_t position = packed_position(linear, first + start + r);
      const_cast<float*>(linear.scales)[position] =
          round_bytes(wide.data(), K, bytes.data() + r * num_quads * 4);
      outputs[r] = int8_output_bytes(linear, position);
    }
    store_int8_quads(bytes.data(), num_quads, count, outputs);
  }
}

}  // namespace

void round_int8(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                int64_t first, int64_t num_rows) {
  if (rows_dtype == kBF16)
    round_rows(linear, static_cast<const uint16_t*>(rows), ld, first, num_rows);
  else
    round_rows(linear, static_cast<const float*>(rows), ld, first, num_rows);
}

}  // namespace quire::QUIRE_ISA
