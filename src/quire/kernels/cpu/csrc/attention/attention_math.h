// The functions of attention's softmax.
//
// Powers of two instead of e: the factor log2(e) joins the scale that scores are multiplied by
// anyway.
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kNever = -__builtin_inff();

// 2^f, 0 <= f < 1: minimax polynomials (Remez) with 2^0 = 1 exactly.
template <typename V>
inline V exp2_fraction_coarse(V f) {  // relative error 2.9e-6
  V p = fma(filled<V>(0.0134266842506f), f, filled<V>(0.0522424742691f));
  p = fma(p, f, filled<V>(0.241280204723f));
  p = fma(p, f, filled<V>(0.693044844908f));
  return fma(p, f, filled<V>(1.0f));
}

template <typename V>
inline V exp2_fraction_fine(V f) {  // relative error 2.0e-9, before rounding
  V p = fma(filled<V>(0.000216129253735f), f, filled<V>(0.00124678427436f));
  p = fma(p, f, filled<V>(0.00967545206464f));
  p = fma(p, f, filled<V>(0.0554852803083f));
  p = fma(p, f, filled<V>(0.24022930564f));
  p = fma(p, f, filled<V>(0.693147044435f));
  return fma(p, f, filled<V>(1.0f));
}

// 2^x for x <= 0; 0 for -inf; NaN stays NaN. V: vf or part. kFine: as exact as fp32 is; else enough
// for a result that is rounded to bf16.
template <bool kFine, typename V>
inline V exp2_below_one(V x) {
#if defined(__AVX512DQ__)
  const V fraction = (V)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
  const V p = kFine ? exp2_fraction_fine(fraction) : exp2_fraction_coarse(fraction);
  return (V)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
  using I = decltype(greater(x, x));
  const V kRound = filled<V>(12582912.0f);  // 1.5 * 2^23: sums are rounded to integers
  const V y = max(filled<V>(-160.0f), x);
  const V shifted = (y - filled<V>(0.5f)) + kRound;
  const V whole = max(filled<V>(-126.0f), shifted - kRound);
  const V fraction = y - (shifted - kRound);
  const V p = kFine ? exp2_fraction_fine(fraction) : exp2_fraction_coarse(fraction);
  const V power = (V)(((I)(whole + kRound) - (I)kRound + 127) << 23);
  const V result = p * power;
  return (V)((I)result & ~greater(filled<V>(-126.0f), y));
#endif
}

// tanh(x) = e / (e + 2), e = exp(2x) - 1. exp(y) - 1 = 2^n q(r) + 2^n - 1 with y = n ln 2 + r and
// q(r) = exp(r) - 1, a polynomial without a constant: small arguments keep their relative accuracy.
inline vf tanh(vf x) {
  const vf kRound = splat(12582912.0f);
  const vf y = max(splat(-30.0f), min(splat(30.0f), x + x));
  const vf shifted = fma(y, splat(kLog2E), kRound);
  const vf n = shifted - kRound;
  vf r = fma(n, splat(-0.693145751953125f), y);
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  vf q = fma(splat(0.000198412445004f), r, splat(0.00139410047879f));
  q = fma(q, r, splat(0.00833340290958f));
  q = fma(q, r, splat(0.0416663544522f));
  q = fma(q, r, splat(0.166666662496f));
  q = fma(q, r, splat(0.5f));
  q = fma(q, r, splat(1.0f)) * r;
  const vf power = (vf)(((vi)shifted - (vi)kRound + 127) << 23);
  const vf e = fma(q, power, power - splat(1.0f));
  return e / (e + splat(2.0f));
}

// Lanes [first, end) of x; `otherwise` in the others.
inline vf keep_lanes(vf x, int first, int end, float otherwise) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi inside = ((lane - end) >> 31) & ~((lane - first) >> 31);
  return (vf)((inside & (vi)x) | (~inside & (vi)splat(otherwise)));
}

inline float greatest_lane(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return reduce_max(x);
#endif
}

}  // namespace quire::QUIRE_ISA
