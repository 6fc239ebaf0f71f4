// Dot products of bytes of weights with bytes of x, for AVX2 and AVX-512 without VNNI.
//
// Without an instruction that adds products of bytes in 32 bits (VNNI), vpmaddubsw multiplies
// unsigned by signed bytes and adds neighbours in 16 bits, which saturate. Codes of few bits leave
// room there: x is at most 127 in magnitude, so a pair of products of codes up to L is at most
// 2 * 127 * L, and 32767 / (254 L) of these are added in 16 bits, exactly, before they are widened:
//
//   4 bits: 2 * 127 * 15 =  3810, 8 quads: 30480        5 bits:  7874, 4 quads: 31496
//   8 bits: 2 * 127 * 128 = 32512, 1 quad               6 bits: 16002, 2 quads: 32004
//
// Bytes of eight bits are made signed (byte - 128). The instruction then gets their magnitudes, and
// x with their signs. Products of pairs of 16 bits (dot.h) take as many instructions, and fewer
// registers: linears of block-quantized bytes have x in 16 bits (ElementOf).
#pragma once
#include <type_traits>

#include "linear/dot.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// Whether products of codes are those of this file.
constexpr bool kHasByteSums = true;
typedef int8_t CodeElement;  // of x

#if defined(__AVXVNNI__)

// Products of bytes of weights, at most kLargest, with four inputs of x.
template <int kLargest>
struct ByteDot {
  static constexpr int kQuads = 16;  // that are added before they are widened
  static constexpr int kBias = 0;    // what `stored` takes off each byte
  typedef DotInput Input;
  typedef DotInts Sum;

  static DotInts stored(DotInts bytes) { return bytes; }

  explicit ByteDot(DotInts bytes) : weights(bytes) {}
  Sum multiply(const Input& x) const { return add(DotInts{}, x); }
  Sum add(Sum sum, const Input& x) const { return dot(sum, weights, x); }
  static DotInts widen(Sum sum) { return sum; }

 private:
  DotWeights weights;
};

#else

// Four inputs of x, in all lanes.
struct ByteInput {
  DotInts bytes;
  explicit ByteInput(const CodeElement* x) : bytes(all_lanes(x)) {}
};

// Products of unsigned by signed bytes, of which neighbours are added.
inline DotShorts multiply_bytes(DotInts weights, DotInts x) {
#if defined(__AVX512BW__)
  return (DotShorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
#else
  return (DotShorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
#endif
}

// The sums of neighbours, signed numbers of 16 bits.
inline DotInts add_neighbours(DotShorts sums) {
  return dot_pairs(DotInts{}, (DotInts)sums, DotInts{} + 0x00010001);
}

inline DotInts magnitudes(DotInts bytes) {
#if defined(__AVX512BW__)
  return (DotInts)_mm512_abs_epi8((__m512i)bytes);
#else
  return (DotInts)_mm256_abs_epi8((__m256i)bytes);
#endif
}

// x, negated where a byte of `signs` is below zero. Where it is zero, any number.
inline DotInts with_signs(DotInts x, DotInts signs) {
#if defined(__AVX512BW__)
  const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)signs);
  return (DotInts)_mm512_mask_sub_epi8((__m512i)x, is_negative, __m512i{}, (__m512i)x);
#else
  return (DotInts)_mm256_sign_epi8((__m256i)x, (__m256i)signs);
#endif
}

template <int kLargest>
struct ByteDot {
  static constexpr int kQuads = 32767 / (2 * 127 * kLargest);
  static_assert(kQuads > 0);
  static constexpr int kBias = 0;
  typedef ByteInput Input;
  typedef DotShorts Sum;

  static DotInts stored(DotInts bytes) { return bytes; }

  explicit ByteDot(DotInts bytes) : weights(bytes) {}
  Sum multiply(const Input& x) const { return multiply_bytes(weights, x.bytes); }
  Sum add(Sum sum, const Input& x) const { return in_order(sum + multiply(x)); }
  static DotInts widen(Sum sum) { return add_neighbours(sum); }

 private:
  DotInts weights;
};

template <>
struct ByteDot<255> {
  static constexpr int kQuads = 1;
  static constexpr int kBias = 128;
  typedef ByteInput Input;
  typedef DotShorts Sum;

  static DotInts stored(DotInts bytes) { return bytes ^ int32_t(0x80808080); }

  // bytes: as stored.
  explicit ByteDot(DotInts bytes) : weights(bytes) {}
  Sum multiply(const Input& x) const {
    return multiply_bytes(magnitudes(weights), with_signs(x.bytes, weights));
  }
  Sum add(Sum sum, const Input& x) const { return sum + multiply(x); }
  static DotInts widen(Sum sum) { return add_neighbours(sum); }

 private:
  DotInts weights;
};

#endif

#else

constexpr bool kHasByteSums = false;
typedef DotElement CodeElement;

template <int kLargest>
struct ByteDot {
  static constexpr int kBias = 0;
};

#endif

// A unit of 16 outputs is two registers, which are multiplied together.
constexpr bool kHasHalves = kHasByteSums && kIntLanes < int(kUnitOutputs);

// Whether products with weights of at most kLargest take x as bytes where kHasByteSums.
template <int kLargest>
constexpr bool kTakesBytes = kHasByteSums && (kLargest < 255 || sizeof(DotElement) == 1);

// x of such products: elsewhere as `dot` takes it.
template <int kLargest>
using ElementOf = std::conditional_t<kTakesBytes<kLargest>, int8_t, DotElement>;

// Whether products of so many quads are added in 16 bits.
template <int kLargest, int kQuads>
constexpr bool fits_shorts() {
  if constexpr (kTakesBytes<kLargest> && sizeof(DotElement) == 2)
    return ByteDot<kLargest>::kQuads >= kQuads;
  return false;
}

// One quad of weights, bytes that are not stored yet, times four inputs.
template <typename Dot>
inline DotInts multiply_quad(DotInts bytes, const CodeElement* x) {
  return Dot::widen(Dot(Dot::stored(bytes)).multiply(typename Dot::Input(x)));
}

// sums [R][U] = starts + rows of x, which begin `ld` bytes apart, times quads [0, kQuads).
// bytes(u, q): quad q of register u, as stored; starts: four bytes of each row, also `ld` apart, or
// null for zeros.
template <typename Dot, int kQuads, int R, int U, typename Bytes>
inline void sum_quads(const Bytes& bytes, const uint8_t* x, const uint8_t* starts, int64_t ld,
                      DotInts (&sums)[R][U]) {
  constexpr int kSteps = Dot::kQuads < kQuads ? Dot::kQuads : kQuads;
  static_assert(kQuads % kSteps == 0);
#pragma GCC unroll 16
  for (int first = 0; first < kQuads; first += kSteps) {
    typename Dot::Sum parts[R][U];
#pragma GCC unroll 16
    for (int q = first; q < first + kSteps; ++q) {
      const Dot low(bytes(0, q)), high(bytes(U - 1, q));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename Dot::Input input((const CodeElement*)(x + r * ld + q * 4));
        parts[r][0] = q == first ? low.multiply(input) : low.add(parts[r][0], input);
        if constexpr (U == 2)
          parts[r][1] = q == first ? high.multiply(input) : high.add(parts[r][1], input);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      DotInts start{};
      if (starts != nullptr) start += load_as<int32_t>(starts + r * ld);
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u)
        sums[r][u] = in_order(Dot::widen(parts[r][u]) + (first == 0 ? start : sums[r][u]));
    }
  }
}

}  // namespace quire::QUIRE_ISA
