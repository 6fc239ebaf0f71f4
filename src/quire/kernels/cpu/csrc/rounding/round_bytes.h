// Rounds some weights of an output to int8, with one scale.
#pragma once
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

// w [count] ~ (bytes - kByteBias) * the scale that is returned, max |w| / 127; ties to even. Weights
// that are all but zero are zero; if there is a NaN or an infinity among them, they are too, but
// then the scale is NaN, and so is the output.
inline float round_bytes(const float* w, int64_t count, uint8_t* bytes) {
  const float largest = largest_magnitude(w, count);
  const bool is_finite = largest <= 3.4028235e38f;
  const float factor = is_finite && largest >= 1e-30f ? 127.0f / largest : 0.0f;
  for (int64_t k = 0; k < count; k += kLanes) {
    const int n = count - k < kLanes ? int(count - k) : kLanes;
    vi q{};
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    if (factor > 0.0f) q = (vi)(load_n(w + k, n) * splat(factor) + splat(12582912.0f)) - 0x4b400000;
    for (int i = 0; i < n; ++i) bytes[k + i] = uint8_t(q[i] + kByteBias);
  }
  return is_finite ? largest / 127.0f : __builtin_nanf("");
}

}  // namespace quire::QUIRE_ISA
