// The places of the bytes of kInt8, for the functions that store them.
#pragma once
#include <cstring>

#include "linear/linear_int8.h"

namespace quire {

// The bytes of one output's quads; the next quad is 4 * 32 bytes on.
static inline uint8_t* int8_output_bytes(const Weights& linear, int64_t position) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights)) +
         position / kPanelOutputs * int8_panel_bytes(linear) + position % kPanelOutputs * 4;
}

// bytes: [count][num_quads][4]. Quads outside, so that whole cache lines are written one after
// another.
static inline void store_int8_quads(const uint8_t* bytes, int64_t num_quads, int64_t count,
                                    uint8_t* const* outputs) {
  for (int64_t quad = 0; quad < num_quads; ++quad)
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(outputs[r] + quad * 4 * kPanelOutputs, bytes + (r * num_quads + quad) * 4, 4);
}

}  // namespace quire
