// The layout of kInt8: a scale per output, weights symmetric around zero.
//
//   w[n, k] ~ scales[n] * (byte - kByteBias),   scales[n] = max over k of |w[n, k]| / 127
//
// Where Weights::group_size is not 0, w is the checkpoint's weight times a Hadamard matrix: blocks
// of int8_rotation(linear) inputs are rotated, in w and in x, and so many inputs of x share a
// scale. Where it is 0, nothing is rotated, and x has a scale for each row.
//
//   [N/32 panels][K/4][32][4]   bytes: inputs 4k .. 4k+3 of an output are neighbours; K is padded
//                               with bytes of kByteBias, that is with zeros
//
// What the bias adds to a sum is taken off again with the sum of x:
// sum of (w + 128) x = sum of w x + 128 * sum of x. All in integers of 32 bits, which hold
// 255 * 127 * K for 66,000 inputs that share a scale.
#pragma once
#include "linear/linear.h"

namespace quire {

static inline int64_t int8_quads(const Weights& linear) { return divide_up(linear.num_inputs, 4); }

// As kernels/quantize.py's rotation_size.
static inline int int8_rotation(const Weights& linear) {
  if (linear.group_size == 0) return 1;
  const int64_t even = linear.num_inputs & -int64_t(linear.num_inputs);
  return even < 64 ? int(even) : 64;
}

static inline int64_t int8_panel_bytes(const Weights& linear) {
  return int8_quads(linear) * 4 * kPanelOutputs;
}

}  // namespace quire
