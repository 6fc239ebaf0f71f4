// XXH3, 128 bits, of long inputs: the checksum of what is kept on disk.
//
// Yann Collet, xxHash (https://xxhash.com), XXH3_128bits with its default secret and no seed, for
// inputs above 240 bytes. Eight lanes of 64 bits; a stripe of 64 bytes goes into all of them, 16
// stripes are a block, after which the lanes are scrambled. The bytes are those of XXH128_canonical.
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels_isa.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kStripe = 64, kSecretStep = 8, kStripesPerBlock = 16;
constexpr int64_t kBlock = kStripe * kStripesPerBlock;
constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c,
    0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97,
    0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26,
    0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

// One register of lanes: key = data ^ secret; lane += low half of key * high half of key, and the
// data of the lane beside it.
#if defined(__AVX512F__)
typedef __m512i Lanes;
inline Lanes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Lanes accumulate(Lanes acc, Lanes data, Lanes secret) {
  const Lanes key = _mm512_xor_si512(data, secret);
  const Lanes product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  const Lanes swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
  return _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
}
inline Lanes scramble(Lanes acc, Lanes secret) {
  const Lanes prime = _mm512_set1_epi64(int64_t(kPrime32[0]));
  const Lanes mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), secret);
  const Lanes high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}
#elif defined(__AVX2__)
typedef __m256i Lanes;
inline Lanes load(const uint8_t* p) { return _mm256_loadu_si256((const Lanes*)p); }
inline Lanes accumulate(Lanes acc, Lanes data, Lanes secret) {
  const Lanes key = _mm256_xor_si256(data, secret);
  const Lanes product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  const Lanes swapped = _mm256_shuffle_epi32(data, 0x4E);
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}
inline Lanes scramble(Lanes acc, Lanes secret) {
  const Lanes prime = _mm256_set1_epi64x(int64_t(kPrime32[0]));
  const Lanes mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
  const Lanes high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}
#elif defined(__SSE2__)
typedef __m128i Lanes;
inline Lanes load(const uint8_t* p) { return _mm_loadu_si128((const Lanes*)p); }
inline Lanes accumulate(Lanes acc, Lanes data, Lanes secret) {
  const Lanes key = _mm_xor_si128(data, secret);
  const Lanes product = _mm_mul_epu32(key, _mm_srli_epi64(key, 32));
  return _mm_add_epi64(acc, _mm_add_epi64(product, _mm_shuffle_epi32(data, 0x4E)));
}
inline Lanes scramble(Lanes acc, Lanes secret) {
  const Lanes prime = _mm_set1_epi64x(int64_t(kPrime32[0]));
  const Lanes mixed = _mm_xor_si128(_mm_xor_si128(acc, _mm_srli_epi64(acc, 47)), secret);
  const Lanes high = _mm_mul_epu32(_mm_srli_epi64(mixed, 32), prime);
  return _mm_add_epi64(_mm_mul_epu32(mixed, prime), _mm_slli_epi64(high, 32));
}
#else
struct Lanes {
  uint64_t lane[2];
};
inline Lanes load(const uint8_t* p) { return {word(p), word(p + 8)}; }
inline Lanes accumulate(Lanes acc, Lanes data, Lanes secret) {
  for (int i = 0; i < 2; ++i) {
    const uint64_t key = data.lane[i] ^ secret.lane[i];
    acc.lane[i] += (key & 0xffffffff) * (key >> 32) + data.lane[1 - i];
  }
  return acc;
}
inline Lanes scramble(Lanes acc, Lanes secret) {
  for (int i = 0; i < 2; ++i)
    acc.lane[i] = (acc.lane[i] ^ acc.lane[i] >> 47 ^ secret.lane[i]) * kPrime32[0];
  return acc;
}
#endif
constexpr int kNumRegisters = kStripe / sizeof(Lanes);

union State {
  uint64_t lanes[8];
  Lanes registers[kNumRegisters];
};

inline void take_stripe(Lanes* acc, const uint8_t* input, const uint8_t* secret) {
  for (int i = 0; i < kNumRegisters; ++i) {
    const int64_t at = i * int64_t(sizeof(Lanes));
    acc[i] = accumulate(acc[i], load(input + at), load(secret + at));
  }
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

uint64_t merge(const uint64_t* lanes, const uint8_t* secret, uint64_t sum) {
  for (int i = 0; i < 4; ++i)
    sum += folded_product(lanes[2 * i] ^ word(secret + 16 * i),
                          lanes[2 * i + 1] ^ word(secret + 16 * i + 8));
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
  return sum ^ sum >> 32;
}

void store_big_endian(uint8_t* out, uint64_t x) {
  for (int i = 0; i < 8; ++i) out[i] = uint8_t(x >> (56 - 8 * i));
}

}  // namespace

void xxh3_128(const uint8_t* input, int64_t num_bytes, uint8_t* digest) {
  alignas(64) State state = {{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3],
                              kPrime32[1], kPrime64[4], kPrime32[0]}};
  Lanes acc[kNumRegisters];
  for (int i = 0; i < kNumRegisters; ++i) acc[i] = state.registers[i];
  const int64_t num_blocks = (num_bytes - 1) / kBlock;
  const uint8_t* p = input;
  for (int64_t block = 0; block < num_blocks; ++block, p += kBlock) {
    for (int64_t i = 0; i < kStripesPerBlock; ++i)
      take_stripe(acc, p + i * kStripe, kSecret + i * kSecretStep);
    for (int i = 0; i < kNumRegisters; ++i)
      acc[i] = scramble(acc[i], load(kSecret + sizeof kSecret - kStripe + i * sizeof(Lanes)));
  }
  const int64_t num_stripes = (num_bytes - 1 - num_blocks * kBlock) / kStripe;
  for (int64_t i = 0; i < num_stripes; ++i)
    take_stripe(acc, p + i * kStripe, kSecret + i * kSecretStep);
  take_stripe(acc, input + num_bytes - kStripe, kSecret + sizeof kSecret - kStripe - 7);
  for (int i = 0; i < kNumRegisters; ++i) state.registers[i] = acc[i];
  const uint64_t length = uint64_t(num_bytes);
  store_big_endian(digest, merge(state.lanes, kSecret + sizeof kSecret - kStripe - 11,
                                 ~(length * kPrime64[1])));
  store_big_endian(digest + 8, merge(state.lanes, kSecret + 11, length * kPrime64[0]));
}

}  // namespace quire::QUIRE_ISA
