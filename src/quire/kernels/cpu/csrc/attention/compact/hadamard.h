// Vectors times an orthonormal Hadamard matrix, which spreads single large elements over others.
//
// What it is for, and its order of sums, says attention/compact_kv.py; the bits are the same here.
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kMostCompactDim = 512;

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
  typedef int32_t ints __attribute__((vector_size(kRegisterBytes)));
  ints signs{};
  for (int i = 0; i < kPartLanes; ++i) signs[i] = i & S ? INT32_MIN : 0;
  return swapped_lanes<S>(x) + (part)((ints)x ^ signs);
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

// x [D] of type T, rotated; zeros behind it, up to a multiple of sixteen.
struct Rotated {
  alignas(64) float x[kMostCompactDim];

  template <typename T>
  Rotated(const T* from, int head_dim) {
    switch (head_dim) {
      case 64: rotate_all<4>(from); break;
      case 128: rotate_all<8>(from); break;
      default: rotate(from, head_dim);
    }
  }

 private:
  // Of 16 N elements, which stay in registers.
  template <int N, typename T>
  void rotate_all(const T* from) {
    vf y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) y[i] = add_near(load(from + 16 * i), 16 * N);
#pragma GCC unroll 4
    for (int far = 1; far < N; far *= 2)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        if (i & far) continue;
        const vf a = y[i], b = y[i + far];
        y[i] = a + b;
        y[i + far] = a - b;
      }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) store(x + 16 * i, y[i] * splat(inverse_root(16 * N)));
  }

  template <typename T>
  void rotate(const T* from, int head_dim) {
    const int size = head_dim & -head_dim;
    const int num_lanes = (head_dim + kLanes - 1) / kLanes * kLanes;
    for (int d = 0; d < num_lanes; d += kLanes) {
      const int left = head_dim - d;
      store(x + d, add_near(left >= kLanes ? load(from + d) : load_n(from + d, left), size));
    }
    for (int far = kLanes; far < size; far *= 2)
      for (int d = 0; d < num_lanes; d += kLanes) {
        if (d & far) continue;
        const vf a = load(x + d), b = load(x + d + far);
        store(x + d, a + b);
        store(x + d + far, a - b);
      }
    const vf scale = splat(inverse_root(size));
    for (int d = 0; d < num_lanes; d += kLanes) store(x + d, load(x + d) * scale);
  }

  static float inverse_root(int size) { return 1.0f / __builtin_sqrtf(float(size)); }
};

}  // namespace quire::QUIRE_ISA
