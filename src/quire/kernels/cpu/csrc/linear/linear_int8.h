// The layout of kInt8: a scale per output, weights symmetric around zero.
//
//   w[n, k] ~ scales[n] * (byte - 128),   scales[n] = max over k of |w[n, k]| / 127
//
//   [N/32 panels][K/4][32][4]   bytes: inputs 4k .. 4k+3 of an output are neighbours; K is padded
//                               with bytes of 128, that is with zeros
//
// Unsigned bytes, since VNNI multiplies unsigned by signed ones; what the 128 adds to a sum is
// taken off again with the sum of x: sum of (w + 128) x = sum of w x + 128 * sum of x. All in
// integers of 32 bits, which hold 255 * 127 * K for K up to 66,000.
#pragma once
#include "linear/linear.h"

namespace quire {

static inline int64_t int8_quads(const Weights& linear) { return divide_up(linear.num_inputs, 4); }

static inline int64_t int8_panel_bytes(const Weights& linear) {
  return int8_quads(linear) * 4 * kPanelOutputs;
}

}  // namespace quire
