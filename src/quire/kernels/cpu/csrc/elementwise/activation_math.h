// The functions of kernels/activations.py, on sixteen numbers or on one register (V).
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

// 1 / (1 + e^-x)
template <typename V>
inline V sigmoid(V x) { return filled<V>(1.0f) / (filled<V>(1.0f) + exp(-x)); }

// x / (1 + e^-x)
template <typename V>
inline V silu(V x) { return x / (filled<V>(1.0f) + exp(-x)); }

// x / 2 (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u).
template <typename V>
inline V gelu_tanh(V x) {
  const V u = filled<V>(0.7978845608f) * (x + filled<V>(0.044715f) * x * x * x);
  return x / (filled<V>(1.0f) + exp(filled<V>(-2.0f) * u));
}

// The lanes of a where all bits of chosen are set, of b elsewhere.
template <typename I, typename V>
inline V choose(I chosen, V a, V b) {
  return (V)((chosen & (I)a) | (~chosen & (I)b));
}

// The error function within 1 ulp (N. Juffa's minimax polynomials): x + x p(x^2) up to 475/512,
// then 1 - e^q(|x|).
template <typename V>
inline V erf(V x) {
  using I = decltype(greater(x, x));
  const I kSign = I{} + INT32_MIN;  // the sign's bit of each lane
  const V size = (V)((I)x & ~kSign), square = x * x;
  V p = fma(filled<V>(-5.96761703e-4f), square, filled<V>(4.99119423e-3f));
  p = fma(p, square, filled<V>(-2.67681349e-2f));
  p = fma(p, square, filled<V>(1.12819925e-1f));
  p = fma(p, square, filled<V>(-3.76125336e-1f));
  p = fma(p, square, filled<V>(1.28379166e-1f));
  p = fma(p, x, x);
  V q = fma(filled<V>(-1.72853470e-5f), size, filled<V>(3.83197126e-4f));
  q = fma(q, square, fma(filled<V>(-3.88396438e-3f), size, filled<V>(2.42546219e-2f)));
  q = fma(q, size, filled<V>(-1.06777877e-1f));
  q = fma(q, size, filled<V>(-6.34846687e-1f));
  q = fma(q, size, filled<V>(-1.28717512e-1f));
  q = fma(q, size, -size);
  // At 4 the function is 1 in fp32; far beyond it the polynomial rises again.
  const V far = choose(greater(size, filled<V>(4.0f)), filled<V>(1.0f), filled<V>(1.0f) - exp(q));
  const V outer = (V)((I)far | ((I)x & kSign));
  return choose(greater(size, filled<V>(0.927734375f)), outer, p);
}

// x / 2 (1 + erf(x / sqrt(2)))
template <typename V>
inline V gelu(V x) {
  return x * filled<V>(0.5f) * (filled<V>(1.0f) + erf(x * filled<V>(0.70710678118654752f)));
}

// NaN stays NaN: min and max are their second argument where either is.
template <typename V>
inline V relu(V x) { return max(filled<V>(0.0f), x); }

// The operations around the function in a gated MLP; see Op.
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
