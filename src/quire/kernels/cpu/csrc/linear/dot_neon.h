// Dot products of bytes on ARM64; dot.h says what they are for.
//
//   with dotprod    sdot multiplies signed bytes
//   else            smull does, to 16 bits, which a sum of two products fits: it is at most
//                   2 * 128 * 127 = 32,512
//
// row_sums_neon.h has products of several quads.
#pragma once
#include "simd.h"

namespace quire::QUIRE_ISA {

typedef int32_t DotInts __attribute__((vector_size(16)));
typedef int8_t DotElement;  // of x

// Four inputs of x: in all lanes, or in the first, which instructions for dot products give to all.
// Loading them to one lane takes no instruction of the vector unit, and copying them takes one.
struct DotInput {
#if defined(__ARM_FEATURE_DOTPROD)
  int8x8_t bytes;
#else
  int8x16_t bytes;
#endif
  explicit DotInput(const DotElement* x) {
    uint32_t four;
    std::memcpy(&four, x, sizeof four);
#if defined(__ARM_FEATURE_DOTPROD)
    bytes = vcreate_s8(four);
#else
    bytes = vreinterpretq_s8_u32(vdupq_n_u32(four));
#endif
  }
};

// Two registers by one instruction, which GCC 12 seldom chooses by itself.
inline void load_two(const uint8_t* p, DotInts& first, DotInts& second) {
  const auto* from = reinterpret_cast<const int32x4_t*>(p);
  asm("ldp %q0, %q1, %2" : "=w"(first), "=w"(second) : "Ump"(from[0]), "m"(from[1]));
}

// The weights of four inputs.
struct DotWeights {
  DotInts bytes;
  explicit DotWeights(DotInts w) : bytes(w) {}
};

inline DotInts dot(DotInts acc, const DotWeights& w, const DotInput& x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (DotInts)vdotq_lane_s32((int32x4_t)acc, (int8x16_t)w.bytes, x.bytes, 0);
#else
  const auto weights = (int8x16_t)w.bytes;
  const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(x.bytes));
  const int16x8_t high = vmull_high_s8(weights, x.bytes);
  return (DotInts)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, high));
#endif
}

// acc + a[0] b[0] + a[1] b[1] in each lane; a and b are pairs of 16 bits.
inline DotInts dot_pairs(DotInts acc, DotInts a, DotInts b) {
  const auto left = (int16x8_t)a, right = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right));
  return acc + (DotInts)vpaddq_s32(low, vmull_high_s16(left, right));
}

// A byte to a lane.
inline DotInts widen_bytes(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return (DotInts)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}

// Two neighbouring bytes to a lane, each as 16 bits.
inline DotInts widen_byte_pairs(const uint8_t* p) { return (DotInts)vmovl_u8(vld1_u8(p)); }

// The low halves of sixteen numbers: eight, then eight.
inline int16x8x2_t narrow_to_16_bits(vi x) {
  union { vi whole; int16x8_t parts[4]; } wide{x};
  return {vuzp1q_s16(wide.parts[0], wide.parts[1]), vuzp1q_s16(wide.parts[2], wide.parts[3])};
}

// The low bytes.
inline void store_elements(int8_t* to, vi x) {
  const int16x8x2_t narrow = narrow_to_16_bits(x);
  vst1q_s8(to, vuzp1q_s8(vreinterpretq_s8_s16(narrow.val[0]), vreinterpretq_s8_s16(narrow.val[1])));
}

// As pairs for dot_pairs: of each four, the second and the third change places.
inline void store_elements(int16_t* to, vi x) {
  const int16x8x2_t narrow = narrow_to_16_bits(x);
  const int16x8_t evens = vuzp1q_s16(narrow.val[0], narrow.val[1]);
  const int16x8_t odds = vuzp2q_s16(narrow.val[0], narrow.val[1]);
  const auto even = vreinterpretq_s32_s16(evens), odd = vreinterpretq_s32_s16(odds);
  vst1q_s16(to, vreinterpretq_s16_s32(vzip1q_s32(even, odd)));
  vst1q_s16(to + 8, vreinterpretq_s16_s32(vzip2q_s32(even, odd)));
}

}  // namespace quire::QUIRE_ISA
