// Vectors times an orthonormal Hadamard matrix, which spreads single large elements over others.
//
// attention/quantized_kv.py explains its purpose and the order of sums; the bits are the same here.
#pragma once
#include "hadamard.h"

namespace quire::QUIRE_ISA {

constexpr int kMaxQuantizedDim = 512;

// x [D] of type T, rotated, then zeros up to a multiple of sixteen.
struct Rotated {
  alignas(64) float x[kMaxQuantizedDim];

  template <typename T>
  Rotated(const T* from, int head_dim) {
    switch (head_dim) {
      case 64: rotate_all<4>(from); break;
      case 128: rotate_all<8>(from); break;
      default: rotate(from, head_dim);
    }
  }

 private:
  // Rotates 16 N elements, which stay in registers.
  template <int N, typename T>
  void rotate_all(const T* from) {
    vf y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) y[i] = add_near(load(from + 16 * i), 16 * N);
    add_far(y);
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
