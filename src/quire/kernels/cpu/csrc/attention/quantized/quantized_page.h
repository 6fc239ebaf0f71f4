// The layout of int8 codes of K and V in a layer's page, and how they are written.
//
// attention/quantized_kv.py defines codes and scales; the bytes are the same here. Legend: B block
// size, U = min(B, 16) tokens of a unit, D head size rounded up to a multiple of 4. A page is
//
//   [Hkv] heads, each [ K: B/U units | V: B/U units | scales of K: [B] bf16 | of V: [B] bf16 ]
//
//   K unit  [D/4][U][4]   code + 128, unsigned: four dimensions of a token
//   V unit  [U/4][D][4]   code, signed: four tokens of a dimension
//
// so that the bytes that a dot product adds up lie in fours, and in both products an unsigned byte
// meets a signed one (vpdpbusd). Dimensions from the head size on are codes of 0. K is rotated
// first (rotated.h).
#pragma once
#include "attention/quantized/rotated.h"
#include "attention/kv_page.h"
#include "linear/quantize_rows.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

template <>
struct KVPages<uint8_t> {
  uint8_t* pages;
  int64_t page_stride;
  int64_t head_bytes;
  int64_t half_elements;  // bytes of K of one head in a page, without scales
  int real_dim;           // the head size
  int head_dim;           // D
  int block_size;
  int unit;
  int block_shift;
  int unit_shift;

  explicit KVPages(const AttentionLayer& layer)
      : pages(layer.pages),
        page_stride(layer.page_stride),
        real_dim(layer.head_dim),
        head_dim((layer.head_dim + 3) / 4 * 4),
        block_size(layer.block_size),
        unit(layer.block_size < 16 ? layer.block_size : 16),
        block_shift(__builtin_ctz(unsigned(layer.block_size))),
        unit_shift(__builtin_ctz(unsigned(unit))) {
    half_elements = int64_t(block_size) * head_dim;
    head_bytes = 2 * half_elements + 2 * block_size * int64_t(sizeof(uint16_t));
  }

  uint8_t* head_of(int64_t block, int head) const {
    return pages + block * page_stride + head * head_bytes;
  }

  // The unit of K with a block's token `offset`. The unit of V is half_elements further.
  uint8_t* key_unit(int64_t block, int head, int offset) const {
    return head_of(block, head) + int64_t(offset >> unit_shift) * unit * head_dim;
  }

  // K's scale of a block's token. V's scale is block_size entries further.
  uint16_t* key_scales(int64_t block, int head, int offset) const {
    return reinterpret_cast<uint16_t*>(head_of(block, head) + 2 * half_elements) + offset;
  }
};

// A head's vector as codes, [D] with zeros from the head size on. Returns the scale, in bf16.
template <typename T>
inline uint16_t find_codes(const T* x, int real_dim, int head_dim, int8_t* codes) {
  const float largest = largest_magnitude(x, real_dim);
  if (!(largest <= __FLT_MAX__)) {
    std::memset(codes, 0, head_dim);
    return 0x7fc0;  // NaN
  }
  const uint16_t bits = to_bf16(largest / 127.0f);
  const float scale = to_float(bits);
  if (scale == 0.0f) {
    std::memset(codes, 0, head_dim);
    return bits;
  }
  for (int d = 0; d < head_dim; d += kLanes) {
    const int left = real_dim - d;
    const vf y = (left >= kLanes ? load(x + d) : load_n(x + d, left < 0 ? 0 : left)) / splat(scale);
    const vf near = min(splat(127.0f), max(splat(-127.0f), y)) + splat(12582912.0f);
    const vi code = (vi)near - 0x4b400000;
    int8_t narrow[kLanes];
    store_elements(narrow, code);
    std::memcpy(codes + d, narrow, head_dim - d < kLanes ? head_dim - d : kLanes);
  }
  return bits;
}

// Stores k, one head of the token at `slot`.
template <typename T>
inline void store_k(const KVPages<uint8_t>& kv, int64_t slot, int head, const T* k) {
  const int64_t block = slot >> kv.block_shift;
  const int offset = int(slot & (kv.block_size - 1));
  int8_t codes[kMaxQuantizedDim];
  const Rotated rotated(k, kv.real_dim);
  *kv.key_scales(block, head, offset) = find_codes(rotated.x, kv.real_dim, kv.head_dim, codes);
  uint8_t* to = kv.key_unit(block, head, offset) + 4 * (offset & (kv.unit - 1));
  for (int d = 0; d < kv.head_dim; d += 4, to += 4 * kv.unit) {
    uint32_t four;
    std::memcpy(&four, codes + d, 4);
    four ^= 0x80808080u;
    std::memcpy(to, &four, 4);
  }
}

// Stores v, one head of the token at `slot`.
template <typename T>
inline void store_v(const KVPages<uint8_t>& kv, int64_t slot, int head, const T* v) {
  const int64_t block = slot >> kv.block_shift;
  const int offset = int(slot & (kv.block_size - 1));
  int8_t codes[kMaxQuantizedDim];
  kv.key_scales(block, head, offset)[kv.block_size] =
      find_codes(v, kv.real_dim, kv.head_dim, codes);
  const int token = offset & (kv.unit - 1);
  uint8_t* to = kv.key_unit(block, head, offset) + kv.half_elements +
                int64_t(token >> 2) * 4 * kv.head_dim + (token & 3);
  int d = 0;
#if defined(__AVX512BW__)
  // A byte of each lane, sixteen dimensions at once; the others may be written meanwhile.
  const __mmask64 byte = 0x1111111111111111u << (token & 3);
  for (; d + kLanes <= kv.head_dim; d += kLanes) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + d)));
    const __m512i shifted = _mm512_sllv_epi32(wide, _mm512_set1_epi32(8 * (token & 3)));
    _mm512_mask_storeu_epi8(to - (token & 3) + 4 * d, byte, shifted);
  }
#endif
  for (; d < kv.head_dim; ++d) to[4 * d] = uint8_t(codes[d]);
}

}  // namespace quire::QUIRE_ISA
