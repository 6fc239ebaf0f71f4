// The layout of K and V in a layer's page.
//
// Shared by all that write or read pages.
//
// Legend: B block size, U = min(B, 16) tokens of a unit, D head size. A page is
//
//   [Hkv] heads, each [ K: B/U units | V: B/U units ]
//
//           K unit          V unit
//   bf16    [D/2][U][2]     [U/2][D][2]    pairs of dimensions | pairs of tokens
//   fp32    [D][U]          [U][D]
//
// so that a register holds sixteen tokens of K (scores of sixteen keys add up in one) and sixteen
// dimensions of V, and in bf16 the numbers that vdpbf16ps adds up lie in pairs. D is even. Slots
// that were never written may hold anything, NaN too.
#pragma once
#include <cstdint>
#include <cstring>

#include "library/abi.h"

namespace quire::QUIRE_ISA {

// A layer's pages, element type T: float, or uint16_t for bf16.
template <typename T>
struct KVPages {
  uint8_t* pages;
  int64_t page_stride;    // bytes
  int64_t head_elements;  // K and V of one head in a page
  int64_t half_elements;  // K of one head in a page
  int head_dim;
  int unit;         // U
  int block_shift;  // log2 B
  int unit_shift;   // log2 U

  explicit KVPages(const AttentionLayer& layer)
      : pages(layer.pages),
        page_stride(layer.page_stride),
        head_elements(int64_t(2) * layer.block_size * layer.head_dim),
        half_elements(int64_t(layer.block_size) * layer.head_dim),
        head_dim(layer.head_dim),
        unit(layer.block_size < 16 ? layer.block_size : 16),
        block_shift(__builtin_ctz(unsigned(layer.block_size))),
        unit_shift(__builtin_ctz(unsigned(unit))) {}

  // The unit of K with a block's token `offset`. The unit of V is half_elements further.
  T* key_unit(int64_t block, int head, int offset) const {
    T* page = reinterpret_cast<T*>(pages + block * page_stride);
    return page + head * head_elements + int64_t(offset >> unit_shift) * unit * head_dim;
  }

  // The unit of K that has a slot, block * B + offset.
  T* key_unit_of_slot(int64_t slot, int head) const {
    return key_unit(slot >> block_shift, head, int(slot & ((int64_t(1) << block_shift) - 1)));
  }
};

// Stores k [D], one head of the token at `slot`.
inline void store_k(const KVPages<float>& kv, int64_t slot, int head, const float* k) {
  float* to = kv.key_unit_of_slot(slot, head) + (slot & (kv.unit - 1));
  for (int d = 0; d < kv.head_dim; ++d) to[int64_t(d) * kv.unit] = k[d];
}

inline void store_k(const KVPages<uint16_t>& kv, int64_t slot, int head, const uint16_t* k) {
  uint16_t* to = kv.key_unit_of_slot(slot, head) + 2 * (slot & (kv.unit - 1));
  const int stride = 2 * kv.unit;
  for (int pair = 0; pair < kv.head_dim / 2; ++pair)
    std::memcpy(to + int64_t(pair) * stride, k + 2 * pair, 4);
}

// Stores v [D], one head of the token at `slot`.
inline void store_v(const KVPages<float>& kv, int64_t slot, int head, const float* v) {
  float* unit = kv.key_unit_of_slot(slot, head) + kv.half_elements;
  std::memcpy(unit + (slot & (kv.unit - 1)) * kv.head_dim, v, kv.head_dim * sizeof(float));
}

inline void store_v(const KVPages<uint16_t>& kv, int64_t slot, int head, const uint16_t* v) {
  uint16_t* unit = kv.key_unit_of_slot(slot, head) + kv.half_elements;
  const int64_t token = slot & (kv.unit - 1);
  uint16_t* to = unit + (token >> 1) * 2 * kv.head_dim + (token & 1);
  for (int d = 0; d < kv.head_dim; ++d) to[2 * d] = v[d];
}

}  // namespace quire::QUIRE_ISA
