// The layout of kInt4: groups of inputs with scale and offset.
//
// Groups of G = 32 or 64 inputs of an output share a scale and an offset, each of eight bits, which
// in turn are multiples of the output's own two factors:
//
//   w[n, k] ~ S[n] * s[n, g] * q[n, k] - O[n] * o[n, g],   0 <= q <= 15,  s and o in 0..255
//
// which is 4.5 bits a weight for G = 32, and 4 bytes an output. Weights::scales holds S, then O, of
// padded_outputs(linear) bf16 numbers each (`int4_factors`). Groups are padded to an even number,
// and lie by pairs, so that a panel is two units of 16 outputs, and a unit one run of bytes:
//
//   [N/32 panels][2 units][pairs of groups]:
//       s  [2 groups][16]            bytes
//       o  [16][2 groups]            bytes: both groups' offsets of an output are neighbours
//       q  [2 groups][G/8][16][4]    bytes: the low halves are inputs 8i .. 8i+3 of the group, the
//                                    high ones inputs 8i+4 .. 8i+7
//
// Padding has s = o = 0.
//
// Weights::num_wide inputs, Weights::wide_inputs, have weights of zero in their groups, and lie
// behind a unit's pairs with eight bits and an fp32 scale per output, V, behind O in
// Weights::scales (`int4_wide_scales`):
//
//       [num_wide/4][16][4]          bytes: w[n, k] ~ V[n] * (byte - kByteBias)
#pragma once
#include "linear/linear.h"

namespace quire {

static constexpr int64_t kInt4HeaderBytes = 4 * kUnitOutputs;

static inline int64_t int4_group_pairs(const Weights& linear) {
  return divide_up(linear.num_inputs, 2 * linear.group_size);
}

static inline int64_t int4_pair_bytes(const Weights& linear) {
  return kInt4HeaderBytes + linear.group_size * kUnitOutputs;
}

static inline int64_t int4_unit_bytes(const Weights& linear) {
  return int4_group_pairs(linear) * int4_pair_bytes(linear) + linear.num_wide * kUnitOutputs;
}

// S, then O.
static inline uint16_t* int4_factors(const Weights& linear) {
  return reinterpret_cast<uint16_t*>(const_cast<float*>(linear.scales));
}

// V; only of a linear with wide inputs.
static inline float* int4_wide_scales(const Weights& linear) {
  return const_cast<float*>(linear.scales) + padded_outputs(linear);
}

}  // namespace quire
