// Dot products of bytes in exact 32-bit integers, for quantized linears.
//
// Sums are exact, so they do not depend on the order, and all instruction sets agree on them.
//
// Weights are bytes, four inputs of an output to a lane, and unsigned except on ARM64 (kByteBias).
// x is signed, and its four inputs ("a quad") are given to all lanes: as bytes where the processor
// has products of those (VNNI, ARM64), else as two pairs of 16 bits, the even inputs, then the odd
// ones, so that a lane's bytes need but a mask. dot_codes.h has products of codes.
#pragma once
#include "linear/linear.h"
#include "simd.h"
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "linear/dot_neon.h"
#endif

namespace quire::QUIRE_ISA {

#if defined(__AVX512BW__)
constexpr int kIntLanes = 16;
#elif defined(__AVX2__)
constexpr int kIntLanes = 8;
#else
constexpr int kIntLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kHas32Registers = true;  // else 16
#else
constexpr bool kHas32Registers = false;
#endif
typedef int32_t DotInts __attribute__((vector_size(kIntLanes * 4)));
typedef uint16_t DotShorts __attribute__((vector_size(kIntLanes * 4)));
typedef uint8_t DotBytes __attribute__((vector_size(kIntLanes * 4)));
typedef float DotFloats __attribute__((vector_size(kIntLanes * 4)));

inline DotFloats to_floats(DotInts x) { return __builtin_convertvector(x, DotFloats); }

// Returns `sum`. GCC adds the products of an unrolled loop as a tree, for which it first makes them
// all and keeps most of them in memory. It does not move additions past this.
template <typename V>
inline V in_order(V sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#elif defined(__SSE2__)
  asm("" : "+x"(sum));
#endif
  return sum;
}

// Registers that lie side by side.
template <int U>
inline void load_registers(const uint8_t* p, DotInts (&to)[U]) {
#if defined(__aarch64__)
  if constexpr (U % 2 == 0) {
#pragma GCC unroll 2
    for (int u = 0; u < U; u += 2) load_two(p + u * sizeof(DotInts), to[u], to[u + 1]);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u) to[u] = load_as<DotInts>(p + u * sizeof(DotInts));
}

// Of each byte, its high half.
inline DotInts high_halves(DotInts bytes) {
#if defined(__aarch64__)
  return (DotInts)((DotBytes)bytes >> 4);
#else
  return bytes >> 4 & 0x0f0f0f0f;  // x86-64 doesn't shift bytes
#endif
}

// Four bytes in all lanes.
inline DotInts all_lanes(const void* p) { return DotInts{} + load_as<int32_t>(p); }

#if !defined(__aarch64__)

// A byte to a lane. (g++ 12 takes __builtin_convertvector from bytes apart, lane by lane.)
inline DotInts widen_bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  return (DotInts)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (DotInts)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return DotInts{p[0], p[1], p[2], p[3]};
#endif
}

// Two neighbouring bytes to a lane, each as 16 bits.
inline DotInts widen_byte_pairs(const uint8_t* p) {
#if defined(__AVX512BW__)
  return (DotInts)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (DotInts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(__SSE2__)
  return (DotInts)_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
#else
  return DotInts{p[0] | p[1] << 16, p[2] | p[3] << 16, p[4] | p[5] << 16, p[6] | p[7] << 16};
#endif
}

// acc + a[0] b[0] + a[1] b[1] in each lane; a and b are pairs of 16 bits.
inline DotInts dot_pairs(DotInts acc, DotInts a, DotInts b) {
#if defined(__AVX512VNNI__)
  return (DotInts)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (DotInts)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
  return in_order(acc + (DotInts)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return in_order(acc + (DotInts)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__SSE2__)
  return in_order(acc + (DotInts)_mm_madd_epi16((__m128i)a, (__m128i)b));
#else
  return acc + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#endif  // !__aarch64__

#if defined(__aarch64__)
// dot_neon.h has the same functions.
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)

typedef int8_t DotElement;  // of x

// Four inputs of x, in all lanes.
struct DotInput {
  DotInts bytes;
  explicit DotInput(const DotElement* x) : bytes(all_lanes(x)) {}
};

// The weights of four inputs.
struct DotWeights {
  DotInts bytes;
  explicit DotWeights(DotInts w) : bytes(w) {}
};

inline DotInts dot(DotInts acc, const DotWeights& w, const DotInput& x) {
#if defined(__AVX512VNNI__)
  return (DotInts)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w.bytes, (__m512i)x.bytes);
#else
  return (DotInts)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w.bytes, (__m256i)x.bytes);
#endif
}

#else

typedef int16_t DotElement;

struct DotInput {
  DotInts even, odd;
  explicit DotInput(const DotElement* x)
      : even(all_lanes(x)), odd(all_lanes(x + 2)) {}
};

struct DotWeights {
  DotInts even, odd;
  explicit DotWeights(DotInts w) : even(w & 0x00ff00ff), odd((DotInts)((DotShorts)w >> 8)) {}
};

inline DotInts dot(DotInts acc, const DotWeights& w, const DotInput& x) {
  return dot_pairs(dot_pairs(acc, w.even, x.even), w.odd, x.odd);
}

#endif

#if !defined(__aarch64__)
typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));

// Sixteen numbers that fit 16 bits.
inline Shorts narrow_to_shorts(vi x) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  union { vi v; __m256i halves[2]; } wide{x};
  const __m256i mixed = _mm256_packs_epi32(wide.halves[0], wide.halves[1]);
  return (Shorts)_mm256_permute4x64_epi64(mixed, 0xd8);
#elif defined(__SSE2__)
  union { vi v; __m128i q[4]; } wide{x};
  union { __m128i q[2]; Shorts v; } packed;
  packed.q[0] = _mm_packs_epi32(wide.q[0], wide.q[1]);
  packed.q[1] = _mm_packs_epi32(wide.q[2], wide.q[3]);
  return packed.v;
#else
  return __builtin_convertvector(x, Shorts);
#endif
}

// Stores sixteen numbers as products read them: bytes in their order, numbers of 16 bits as
// dot_pairs takes them.
inline void store_elements(int8_t* to, vi x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__SSE2__)
  union { Shorts v; __m128i halves[2]; } shorts{narrow_to_shorts(x)};
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(shorts.halves[0], shorts.halves[1]));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(x[i]);
#endif
}

// Within a lane of four pairs, the second and the third change places.
inline void store_elements(int16_t* to, vi x) {
  const Shorts narrow = narrow_to_shorts(x);
  const Shorts swapped = __builtin_shufflevector(narrow, narrow, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9,
                                                 11, 12, 14, 13, 15);
  std::memcpy(to, &swapped, sizeof swapped);
}
#endif

// What the products of a panel's outputs with R rows are summed in: two registers for a row, so a
// panel is one tile or several side by side. kMaxTileRows of them fit beside the weights and x.
constexpr int kTileLanes = 2 * kIntLanes;
constexpr int kTilesPerPanel = int(kPanelOutputs) / kTileLanes;
constexpr int kMaxTileRows =
    kIntLanes == 16 ? 12 : kHas32Registers ? 8 : sizeof(DotElement) == 1 ? 6 : 4;
constexpr int kQuadBytes = int(kPanelOutputs) * 4;  // [32][4]: four inputs of a panel's outputs

}  // namespace quire::QUIRE_ISA
