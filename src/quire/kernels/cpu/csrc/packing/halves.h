// Floats of 16 bits, one at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace quire {

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline float from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

static inline float from_fp16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | magnitude << 13);
  // The exponent is 112 short; a number without one becomes right by the multiplication too.
  const float x = float_of(magnitude << 13) * 0x1p112f;
  return sign != 0 ? -x : x;
}

// To the nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace quire
