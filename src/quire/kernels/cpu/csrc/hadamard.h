// Blocks of elements times a Hadamard matrix of ones and minus ones.
//
// It spreads single large elements over their block. Sums are of two terms, their partners 1, 2, 4,
// .. elements away: in this order, so that torch, Triton and all instruction sets get the same bits
// (kernels/quantize.py, attention/quantized_kv.py).
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

// Lane i of the result is lane i ^ S of x.
template <int S>
inline part swapped_lanes(part x) {
#if defined(__AVX512F__)
  if constexpr (S == 1) return (part)_mm512_permute_ps((__m512)x, 0xb1);
  if constexpr (S == 2) return (part)_mm512_permute_ps((__m512)x, 0x4e);
  if constexpr (S == 4) return (part)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1);
  return (part)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e);
#elif defined(__AVX2__)
  if constexpr (S == 1) return (part)_mm256_permute_ps((__m256)x, 0xb1);
  if constexpr (S == 2) return (part)_mm256_permute_ps((__m256)x, 0x4e);
  return (part)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
#else
  if constexpr (S == 1) return __builtin_shufflevector(x, x, 1, 0, 3, 2);
  return __builtin_shufflevector(x, x, 2, 3, 0, 1);
#endif
}

// Lanes i and i ^ S become their sum and, in the higher one, their difference.
template <int S>
inline part add_lanes(part x) {
  part signs{};
  for (int i = 0; i < kPartLanes; ++i) signs[i] = i & S ? -1.0f : 1.0f;
  return fma(x, signs, swapped_lanes<S>(x));
}

// Partners up to eight lanes away, of sixteen; `size`: of the matrix.
inline vf add_near(vf x, int size) {
  Parts y{x};
  for (int i = 0; i < kNumParts; ++i) {
    if (size > 1) y.parts[i] = add_lanes<1>(y.parts[i]);
    if (size > 2) y.parts[i] = add_lanes<2>(y.parts[i]);
    if constexpr (kPartLanes > 4) {
      if (size > 4) y.parts[i] = add_lanes<4>(y.parts[i]);
    }
    if constexpr (kPartLanes > 8) {
      if (size > 8) y.parts[i] = add_lanes<8>(y.parts[i]);
    }
  }
  for (int far = 1; far < kNumParts && far * kPartLanes < size; far *= 2)
    for (int i = 0; i < kNumParts; ++i) {
      if (i & far) continue;
      const part a = y.parts[i], b = y.parts[i + far];
      y.parts[i] = a + b;
      y.parts[i + far] = a - b;
    }
  return y.whole;
}

// 16 N elements in registers: partners sixteen elements away and further.
template <int N>
inline void add_far(vf (&y)[N]) {
#pragma GCC unroll 4
  for (int far = 1; far < N; far *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      if (i & far) continue;
      const vf a = y[i], b = y[i + far];
      y[i] = a + b;
      y[i + far] = a - b;
    }
}

// Blocks of 16 N elements: x [count] of type T -> to [count], which may be x.
template <int N, typename T>
inline void rotate_wide_blocks(const T* x, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += 16 * N) {
    vf y[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) y[i] = add_near(load(x + k + 16 * i), 16);
    add_far(y);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) store(to + k + 16 * i, y[i]);
  }
}

// Blocks of `size` elements, a power of two of at most 64: x [count] of type T -> to [count], then
// zeros up to a multiple of sixteen. `count` is a multiple of `size`.
template <typename T>
inline void rotate_blocks(const T* x, int64_t count, int size, float* to) {
  if (size == 64) return rotate_wide_blocks<4>(x, count, to);
  if (size == 32) return rotate_wide_blocks<2>(x, count, to);
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(to + k, add_near(load(x + k), size));
  if (k < count) store(to + k, add_near(load_n(x + k, int(count - k)), size));
}

}  // namespace quire::QUIRE_ISA
