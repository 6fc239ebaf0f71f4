// Sums over a row, the same whatever the registers.
#pragma once
#include "attention/attention_math.h"
#include "elementwise/rows.h"

namespace quire::QUIRE_ISA {

// The sum of map(x): of each sixteenth element in runs of 64, run after run, and of the elements
// after the last run.
template <typename T, typename F>
inline float sum_row(const T* x, int64_t size, F&& map) {
  vf sums[4] = {}, rest{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int part = 0; part < 4; ++part) sums[part] += map(load(x + i + part * kLanes));
  for (; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf v = map(load_up_to(x + i, n));
    rest += n >= kLanes ? v : keep_lanes(v, 0, int(n), 0.0f);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]) + rest);
}

// 1 / sqrt(mean(x^2) + eps)
template <typename T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
  const float sum = sum_row(x, size, [](vf v) { return v * v; });
  return 1.0f / __builtin_sqrtf(sum / float(size) + eps);
}

}  // namespace quire::QUIRE_ISA
