// Norm and rotation of one head.
#pragma once
#include "elementwise/row_sums.h"

namespace quire::QUIRE_ISA {

// The RMSNorm of one head. weight: null: there is none.
template <typename T>
struct HeadNorm {
  const T* weight;
  float eps;
  bool offsets;
  float offset;

  // n lanes of the head from d on, already multiplied by `scale`'s reciprocal root.
  vf apply(vf x, vf scale, int d, int n) const {
    if (weight == nullptr) return x;
    const vf factor = load_up_to(weight + d, n);
    if (offsets) return rounded<T>(x * scale * (factor + splat(offset)));
    return rounded<T>(rounded<T>(x * scale) * factor);
  }
};

// A position's cosines and sines, row [R], rounded as the model's dtype stores them -> turns [R].
template <typename T>
inline void round_turns(const float* row, int rotary_dim, float* turns) {
  for (int d = 0; d < rotary_dim; d += kLanes) {
    const int n = rotary_dim - d;
    store_up_to(turns + d, rounded<T>(load_up_to(row + d, n)), n);
  }
}

// One head, x -> out, which may be x: normalised, then its first R elements rotated.
//   out[:R/2] = x[:R/2] * cos - x[R/2:R] * sin,  out[R/2:R] = x[R/2:R] * cos + x[:R/2] * sin
template <typename T>
inline void rotate_head(const T* x, const HeadNorm<T>& norm, const float* cos, const float* sin,
                        int rotary_dim, int head_dim, T* out) {
  const int half = rotary_dim / 2;
  const vf scale = splat(norm.weight != nullptr ? inverse_rms(x, head_dim, norm.eps) : 1.0f);
  for (int d = 0; d < half; d += kLanes) {
    const int n = half - d;
    const vf low = norm.apply(load_up_to(x + d, n), scale, d, n);
    const vf high = norm.apply(load_up_to(x + half + d, n), scale, half + d, n);
    const vf c = load_up_to(cos + d, n), s = load_up_to(sin + d, n);
    store_up_to(out + d, rounded<T>(low * c) - rounded<T>(high * s), n);
    store_up_to(out + half + d, rounded<T>(high * c) + rounded<T>(low * s), n);
  }
  if (norm.weight == nullptr && out == x) return;
  for (int d = rotary_dim; d < head_dim; d += kLanes) {
    const int n = head_dim - d;
    store_up_to(out + d, norm.apply(load_up_to(x + d, n), scale, d, n), n);
  }
}

}  // namespace quire::QUIRE_ISA
