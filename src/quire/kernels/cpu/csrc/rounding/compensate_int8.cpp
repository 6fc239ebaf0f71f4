// Rotates weights, rounds them to int8 so that errors cancel for typical inputs, and packs them.
//
// Each block of 64 inputs of an output is rounded from its first input to its last. The error of
// input j is subtracted from the later inputs k, times feedback[j][k]:
//
//   q_j = round(x_j / scale);  x_k -= feedback[j][k] * (x_j - scale q_j)  for k > j
//
// kernels/compensation.py explains the factors and computes the same, in the same order. Products
// are rounded before they are subtracted, so every instruction set stores the same bytes.
//
// Sixteen outputs at a time, each in a lane of its own.
#include <cstring>
#include <vector>

#include "hadamard.h"
#include "kernels_isa.h"
#include "linear/quantize_rows.h"
#include "packing/int8_bytes.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kBlock = 64;
constexpr float kLevels = 127.0f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// Rounds a block of sixteen outputs. x: [64][16], replaced by levels. factors and steps: [16], the
// reciprocal of each output's scale, and the scale.
void round_block(float* x, const float* feedback, const float* factors, const float* steps) {
  const part lowest = splat_part(-kLevels), highest = splat_part(kLevels);
  for (int lane = 0; lane < kLanes; lane += kPartLanes) {
    const part factor = load_part(factors + lane), step = load_part(steps + lane);
    float* const column = x + lane;
    for (int j = 0; j < kBlock; ++j) {
      const part weight = load_part(column + j * kLanes);
      const part level = min(max(weight * factor, lowest), highest) + kRound - kRound;
      std::memcpy(column + j * kLanes, &level, sizeof level);
      const part error = weight - level * step;
      const float* const shares = feedback + j * kBlock;
#pragma GCC unroll 4
      for (int k = j + 1; k < kBlock; ++k) {
        const part corrected =
            load_part(column + k * kLanes) - splat_part(shares[k]) * error;
        std::memcpy(column + k * kLanes, &corrected, sizeof corrected);
      }
    }
  }
}

// Up to sixteen outputs, as they are rounded.
struct Outputs {
  int64_t K;
  std::vector<float> rows;     // [16][K], rotated
  std::vector<uint8_t> bytes;  // [16][K]
  float factors[kLanes] = {}, steps[kLanes] = {};

  explicit Outputs(int64_t num_inputs)
      : K(num_inputs), rows(kLanes * num_inputs), bytes(kLanes * num_inputs) {}

  // Rotates an output's weights and returns its scale. Weights that are all but zero, or not
  // finite, become zeros; in the latter case the scale is NaN (see rounding/round_bytes.h).
  template <typename Row>
  float take(int64_t lane, const Row* row) {
    float* const wide = &rows[lane * K];
    rotate_blocks(row, K, kBlock, wide);
    const vf unscaled = splat(1.0f / kBlock);
    for (int64_t k = 0; k < K; k += kLanes) store(wide + k, load(wide + k) * unscaled);
    const float largest = largest_magnitude(wide, K);
    const bool is_finite = largest <= 3.4028235e38f;
    const bool is_rounded = is_finite && largest >= 1e-30f;
    factors[lane] = is_rounded ? kLevels / largest : 0.0f;
    steps[lane] = is_rounded ? largest / kLevels : 0.0f;
    if (!is_rounded) std::memset(wide, 0, K * sizeof(float));
    return is_finite ? largest / kLevels : __builtin_nanf("");
  }

  void round(int64_t count, const float* feedback) {
    float x[kBlock * kLanes] = {};
    for (int64_t first = 0; first < K; first += kBlock, feedback += kBlock * kBlock) {
      for (int64_t lane = 0; lane < count; ++lane)
        for (int j = 0; j < kBlock; ++j) x[j * kLanes + lane] = rows[lane * K + first + j];
      round_block(x, feedback, factors, steps);
      for (int64_t lane = 0; lane < count; ++lane)
        for (int j = 0; j < kBlock; ++j)
          bytes[lane * K + first + j] = uint8_t(int32_t(x[j * kLanes + lane]) + kByteBias);
    }
  }
};

template <typename Row>
void round_rows(const Weights& linear, const Row* rows, int64_t ld, int64_t first, int64_t num_rows,
                const float* feedback) {
  Outputs outputs(linear.num_inputs);
  uint8_t* places[kLanes];
  for (int64_t start = 0; start < num_rows; start += kLanes) {
    const int64_t count = num_rows - start < kLanes ? num_rows - start : kLanes;
    for (int64_t lane = 0; lane < count; ++lane) {
      const int64_t position = packed_position(linear, first + start + lane);
      const_cast<float*>(linear.scales)[position] = outputs.take(lane, rows + (start + lane) * ld);
      places[lane] = int8_output_bytes(linear, position);
    }
    outputs.round(count, feedback);
    store_int8_quads(outputs.bytes.data(), linear.num_inputs / 4, count, places);
  }
}

}  // namespace

void compensate_int8(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                     int64_t first, int64_t num_rows, const float* feedback) {
  if (rows_dtype == kBF16)
    round_rows(linear, static_cast<const uint16_t*>(rows), ld, first, num_rows, feedback);
  else
    round_rows(linear, static_cast<const float*>(rows), ld, first, num_rows, feedback);
}

}  // namespace quire::QUIRE_ISA
