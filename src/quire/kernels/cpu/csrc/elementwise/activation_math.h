// The functions of kernels/activations.py, of sixteen numbers.
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

// 1 / (1 + e^-x)
inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// x / (1 + e^-x)
inline vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

// x / 2 (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u).
inline vf gelu_tanh(vf x) {
  const vf u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

// The lanes of a where all bits of chosen are set, of b elsewhere.
inline vf choose(vi chosen, vf a, vf b) { return (vf)((chosen & (vi)a) | (~chosen & (vi)b)); }

// The error function within 1 ulp (N. Juffa's minimax polynomials): x + x p(x^2) up to 475/512,
// then 1 - e^q(|x|).
inline vf erf(vf x) {
  const vi kSign = vi{} + INT32_MIN;  // the sign's bit of each lane
  const vf size = (vf)((vi)x & ~kSign), square = x * x;
  vf p = fma(splat(-5.96761703e-4f), square, splat(4.99119423e-3f));
  p = fma(p, square, splat(-2.67681349e-2f));
  p = fma(p, square, splat(1.12819925e-1f));
  p = fma(p, square, splat(-3.76125336e-1f));
  p = fma(p, square, splat(1.28379166e-1f));
  p = fma(p, x, x);
  vf q = fma(splat(-1.72853470e-5f), size, splat(3.83197126e-4f));
  q = fma(q, square, fma(splat(-3.88396438e-3f), size, splat(2.42546219e-2f)));
  q = fma(q, size, splat(-1.06777877e-1f));
  q = fma(q, size, splat(-6.34846687e-1f));
  q = fma(q, size, splat(-1.28717512e-1f));
  q = fma(q, size, -size);
  // At 4 the function is 1 in fp32; far beyond it the polynomial rises again.
  const vf far = choose(greater(size, splat(4.0f)), splat(1.0f), splat(1.0f) - exp(q));
  const vf outer = (vf)((vi)far | ((vi)x & kSign));
  return choose(greater(size, splat(0.927734375f)), outer, p);
}

// x / 2 (1 + erf(x / sqrt(2)))
inline vf gelu(vf x) {
  return x * splat(0.5f) * (splat(1.0f) + erf(x * splat(0.70710678118654752f)));
}

// NaN stays NaN: min and max are their second argument where either is.
inline vf relu(vf x) { return max(splat(0.0f), x); }

// What precedes and follows the function in a gated MLP; see Op.
struct Gating {
  float limit;
  float alpha;
  float up_offset;
};

inline bool is_plain(const Gating& gating) {
  return gating.limit == 0.0f && gating.alpha == 1.0f && gating.up_offset == 0.0f;
}

// act(gate) * up, not yet rounded; every intermediate is, as T.
template <typename T, typename F>
inline vf gated_product(vf gate, vf up, const Gating& gating, F&& act) {
  if (gating.limit != 0.0f) {
    const vf limit = rounded<T>(splat(gating.limit));
    gate = min(limit, gate);
    up = max(-limit, min(limit, up));
  }
  if (gating.up_offset != 0.0f) up = rounded<T>(up + splat(gating.up_offset));
  if (gating.alpha == 1.0f) return rounded<T>(act(gate)) * up;
  const vf share = rounded<T>(sigmoid(rounded<T>(gate * splat(gating.alpha))));
  return rounded<T>(gate * share) * up;
}

}  // namespace quire::QUIRE_ISA
