// Functions that all packers of rounded weights use.
#pragma once
#include <cstdint>
#include <cstring>

#include "linear/linear.h"

namespace quire {

// To the nearest integer, ties to even, for |x| < 2^22.
static inline int32_t rounded(float x) {
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer is left in the low bits
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// Row `offset` elements into `rows`, as floats.
static inline void widen_row(const void* rows, DType dtype, int64_t offset, int64_t K, float* to) {
  if (dtype != kBF16) {
    std::memcpy(to, static_cast<const float*>(rows) + offset, K * sizeof(float));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(rows) + offset;
  for (int64_t k = 0; k < K; ++k) {
    const uint32_t bits = uint32_t(from[k]) << 16;
    std::memcpy(to + k, &bits, 4);
  }
}

}  // namespace quire
