// Sixteen floats as one value, on every instruction set.
//
// Included by the kernels that are compiled once for each of them (see kernels.h). Nothing here
// depends on how wide the registers are, so what a kernel computes is laid out alike everywhere.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire::QUIRE_ISA {

constexpr int kLanes = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));  // sixteen bf16

template <typename V>
inline V load_as(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// GCC tears some operations on values wider than a register into single lanes (10 times as slow):
// comparisons and copies of one number to all lanes. They are made register by register.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
typedef float part __attribute__((vector_size(kRegisterBytes)));
constexpr int kPartLanes = kRegisterBytes / 4;
constexpr int kNumParts = kLanes / kPartLanes;
union Parts {
  vf whole;
  part parts[kNumParts];
};

inline vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#else
  Parts all;
  for (int i = 0; i < kNumParts; ++i) all.parts[i] = part{} + x;
  return all.whole;
#endif
}

inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

// The first n of sixteen, zeros behind them; reads no further than it must.
inline vf load_n(const float* p, int n) {
  vf x{};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
}

inline void store_n(float* p, vf x, int n) { std::memcpy(p, &x, n * sizeof(float)); }

// a * b + c, rounded once where the processor can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { vf v; __m256 h[2]; } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#elif defined(__aarch64__)
  Parts x{a}, y{b}, z{c};
  for (int i = 0; i < kNumParts; ++i)
    z.parts[i] = (part)vfmaq_f32(z.parts[i], x.parts[i], y.parts[i]);
  return z.whole;
#else
  return a * b + c;
#endif
}

// a > b ? a : b
inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  Parts x{a}, y{b};
  for (int i = 0; i < kNumParts; ++i)
    x.parts[i] = x.parts[i] > y.parts[i] ? x.parts[i] : y.parts[i];
  return x.whole;
#endif
}

// a < b ? a : b
inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  Parts x{a}, y{b};
  for (int i = 0; i < kNumParts; ++i)
    x.parts[i] = x.parts[i] < y.parts[i] ? x.parts[i] : y.parts[i];
  return x.whole;
#endif
}

// All bits of a lane where a is greater than b, else none.
inline vi greater(vf a, vf b) {
#if defined(__AVX512F__)
  return (vi)(a > b);
#else
  Parts x{a}, y{b};
  for (int i = 0; i < kNumParts; ++i) x.parts[i] = (part)(x.parts[i] > y.parts[i]);
  return (vi)x.whole;
#endif
}

inline vi is_nan(vf x) {
#if defined(__AVX512F__)
  return (vi)(x != x);
#else
  return (vi)(((vu)x & 0x7fffffff) + 0x7fffff) >> 31;  // carries into the sign above infinity
#endif
}

// Sums by halves, always in the same order.
inline float reduce_add(vf x) {
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

inline float reduce_max(vf x) {
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}

inline float to_float(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Round to nearest even, as every conversion here; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline vf widen(vh x) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(__AVX2__)  // g++ 12 takes __builtin_convertvector apart
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)x));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)x, 1));
  const union { __m256i halves[2]; vf whole; } wide{
      {_mm256_slli_epi32(low, 16), _mm256_slli_epi32(high, 16)}};
  return wide.whole;
#else
  return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

// As to_bf16.
#if defined(__AVX512BF16__)
__attribute__((noinline))  // seldom called
#endif
inline vh narrow_all(vf x) {
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  vu nan = bits >> 16 | 0x40;
  vi broken = is_nan(x);
  vu chosen = (vu)((broken & (vi)nan) | (~broken & (vi)rounded));
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)chosen);
#else
  return __builtin_convertvector(chosen, vh);
#endif
}

inline vh narrow(vf x) {
#if defined(__AVX512BF16__)
  // vcvtneps2bf16 flushes denormals, which are to be rounded as everywhere else.
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, 0x20) == 0, 1))
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
  return narrow_all(x);
}

inline vf load(const uint16_t* p) {
  vh x;
  std::memcpy(&x, p, sizeof x);
  return widen(x);
}

inline void store(uint16_t* p, vf x) {
  vh h = narrow(x);
  std::memcpy(p, &h, sizeof h);
}

inline vf load_n(const uint16_t* p, int n) {
  vh x{};
  std::memcpy(&x, p, n * sizeof(uint16_t));
  return widen(x);
}

inline void store_n(uint16_t* p, vf x, int n) {
  vh h = narrow(x);
  std::memcpy(p, &h, n * sizeof(uint16_t));
}

// One register, for loops that keep many values in registers: GCC keeps those that are wider than
// one in memory. With AVX-512 it is the same as vf. load_part_n and store_n: the first n lanes.
inline part splat_part(float x) { return x - part{}; }  // x - 0 is x, and so left out

// splat or splat_part, of functions for both.
template <typename V> inline V filled(float x);
template <> inline vf filled<vf>(float x) { return splat(x); }
#if !defined(__AVX512F__)
template <> inline part filled<part>(float x) { return splat_part(x); }
#endif

template <typename T>
inline part load_part(const T* p) {
  if constexpr (sizeof(T) == sizeof(float)) {
    part x;
    std::memcpy(&x, p, sizeof x);
    return x;
  } else {
    typedef uint16_t halves __attribute__((vector_size(kRegisterBytes / 2)));
    typedef uint32_t words __attribute__((vector_size(kRegisterBytes)));
    halves x;
    std::memcpy(&x, p, sizeof x);
    return (part)(__builtin_convertvector(x, words) << 16);
  }
}

template <typename T>
inline part load_part_n(const T* p, int n) {
  T x[kPartLanes] = {};
  std::memcpy(x, p, n * sizeof(T));
  return load_part(x);
}

#if !defined(__AVX512F__)
inline part fma(part a, part b, part c) {
#if defined(__FMA__)
  return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (part)vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline part max(part a, part b) { return a > b ? a : b; }
inline part min(part a, part b) { return a < b ? a : b; }

typedef int32_t part_ints __attribute__((vector_size(kRegisterBytes)));
inline part_ints greater(part a, part b) { return (part_ints)(a > b); }
inline part_ints is_nan(part x) { return (part_ints)(x != x); }

inline void store(float* p, part x) { std::memcpy(p, &x, sizeof x); }

// As to_bf16.
inline void store(uint16_t* p, part x) {
  typedef uint16_t halves __attribute__((vector_size(kRegisterBytes / 2)));
  typedef uint32_t words __attribute__((vector_size(kRegisterBytes)));
  const words bits = (words)x;
  const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const words chosen = x == x ? rounded : bits >> 16 | 0x40;
  const halves narrow = __builtin_convertvector(chosen, halves);
  std::memcpy(p, &narrow, sizeof narrow);
}

template <typename T>
inline void store_n(T* p, part x, int n) {
  T all[kPartLanes];
  store(all, x);
  std::memcpy(p, all, n * sizeof(T));
}
#endif

// What x becomes when it is stored as T and read again.
template <typename T> inline vf rounded(vf x);
template <> inline vf rounded<float>(vf x) { return x; }
template <> inline vf rounded<uint16_t>(vf x) { return widen(narrow(x)); }

template <typename T>
inline part rounded_part(part x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
#if defined(__AVX512F__)
    return rounded<T>(x);
#else
    typedef uint32_t words __attribute__((vector_size(kRegisterBytes)));
    const words bits = (words)x;  // as to_bf16
    const words rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (part)((x == x ? rounded : bits | 0x400000) & 0xffff0000);
#endif
  }
}

// e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r, times 2^n.
// Below -87.3 the result is 0, above 88.7 infinity; NaN stays NaN.
// V: vf or part.
template <typename V>
inline V exp(V x) {
  using I = decltype(greater(x, x));
  const V bounded = min(max(x, filled<V>(-104.0f)), filled<V>(89.0f));
  const V shifted = fma(bounded, filled<V>(1.44269504088896341f), filled<V>(12582912.0f));
  const V n = shifted - filled<V>(12582912.0f);
  V r = fma(n, filled<V>(-0.693145751953125f), bounded);
  r = fma(n, filled<V>(-1.42860682030941723e-6f), r);
  V p = filled<V>(1.3981999e-3f);
  p = fma(p, r, filled<V>(8.3333454e-3f));
  p = fma(p, r, filled<V>(4.1665796e-2f));
  p = fma(p, r, filled<V>(1.6666666e-1f));
  p = fma(p, r, filled<V>(5.0000000e-1f));
  p = fma(p, r, filled<V>(1.0f));
  p = fma(p, r, filled<V>(1.0f));
  const I power = (I)shifted - (I)filled<V>(12582912.0f);
  // Twice 2^(n/2), so that neither factor leaves the normal range.
  const I half = power >> 1;
  const V scale = (V)((half + 127) << 23), rest = (V)((power - half + 127) << 23);
  const V y = p * scale * rest;
  const I low = greater(filled<V>(-87.3f), x), high = greater(x, filled<V>(88.7228f));
  const I nan = is_nan(x);
  I bits = (I)y & ~low;
  bits = (high & (I)filled<V>(__builtin_inff())) | (~high & bits);
  return (V)((nan & (I)x) | (~nan & bits));
}

}  // namespace quire::QUIRE_ISA
