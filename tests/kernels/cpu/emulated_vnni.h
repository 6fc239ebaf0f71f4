// The two intrinsics of AVX-VNNI that the kernels use, in instructions of AVX2.
//
// tools/emulated_vnni.py includes this file before each source, and so tests the kernels of AVX-VNNI
// on a processor without it.
#pragma once
#include <immintrin.h>

// acc + u[0] s[0] + .. + u[3] s[3] in each lane of 32 bits, modulo 2^32: bytes u are unsigned, s
// signed. Products fit 16 bits with their sign only one by one, so odd and even bytes are apart.
static inline __m256i emulated_dpbusd(__m256i acc, __m256i u, __m256i s) {
  const __m256i even_u = _mm256_and_si256(u, _mm256_set1_epi16(0xff));
  const __m256i even_s = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8);
  const __m256i odd_u = _mm256_srli_epi16(u, 8), odd_s = _mm256_srai_epi16(s, 8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even_u, even_s));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(odd_u, odd_s));
}

// acc + a[0] b[0] + a[1] b[1] in each lane of 32 bits, modulo 2^32: pairs of signed 16 bits.
static inline __m256i emulated_dpwssd(__m256i acc, __m256i a, __m256i b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd
