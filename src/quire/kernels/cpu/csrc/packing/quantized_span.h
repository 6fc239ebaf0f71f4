// 256 inputs of an output, between a checkpoint's blocks and block_quantized/layout.h's layout.
#pragma once
#include <cstdint>

#include "block_quantized/layout.h"

namespace quire {

struct QuantizedSpan {
  static constexpr int64_t kMaxFlatGroups = kBlockInputs / 32, kMaxGroups = kBlockInputs / 16;
  uint8_t codes[kBlockInputs];
  uint16_t halves[kMaxFlatGroups];         // flat: scales of 16 bits
  uint16_t second_halves[kMaxFlatGroups];  // flat: zeros or offsets
  int8_t scales[kMaxGroups];               // two-level: s
  uint8_t offsets[kMaxGroups];             // two-level: o
  uint16_t factors[2];                     // two-level: fp16, of s and of o
};

// Stores inputs [k, k + 256), or up to K, of `count` outputs that lie side by side in a unit, the
// first at packed position `position`. k: a multiple of 256.
void store_spans(const Weights&, int64_t position, int64_t count, int64_t k,
                 const QuantizedSpan* spans);

// f(row, position, count) for rows [0, num_rows), outputs from `first` on, in runs that
// `store_spans` takes.
template <typename F>
void for_unit_runs(const Weights& linear, int64_t first, int64_t num_rows, F&& f) {
  for (int64_t row = 0; row < num_rows;) {
    const int64_t position = packed_position(linear, first + row);
    int64_t count = 1;
    while (row + count < num_rows && (position + count) % kUnitOutputs != 0 &&
           packed_position(linear, first + row + count) == position + count)
      ++count;
    f(row, position, count);
    row += count;
  }
}

// fill(row, k, span) writes inputs [k, k + 256) of a row into a span that is zero, for all of
// `num_rows`, and they are stored.
template <typename Fill>
void pack_spans(const Weights& linear, int64_t first, int64_t num_rows, Fill&& fill) {
  QuantizedSpan spans[kUnitOutputs];
  const int64_t K = linear.num_inputs;
  for_unit_runs(linear, first, num_rows, [&](int64_t row, int64_t position, int64_t count) {
    for (int64_t k = 0; k < K; k += kBlockInputs) {
      if (k == 0 || K - k < kBlockInputs)
        for (int64_t i = 0; i < count; ++i) spans[i] = QuantizedSpan{};
      for (int64_t i = 0; i < count; ++i) fill(row + i, k, spans[i]);
      store_spans(linear, position, count, k, spans);
    }
  });
}

}  // namespace quire
