// The two products of attention over int8 codes, in exact 32-bit integers.
//
// Queries and weights (probabilities times the scales of V) are whole numbers of 16 bits, codes of
// 8, and four products are added up in a lane at once. Sums are exact: they do not depend on their
// order, nor on the instruction set. Where the processor multiplies bytes (VNNI), a number is two
// digits, 256 * high + low, and each digit is multiplied by the codes separately; elsewhere codes
// are widened to 16 bits.
//
//   queries   |q| <= 32639, so that high digits fit -128..127 where low ones are signed. Sums of
//             D <= 512 products with |code| <= 127 are below 2^31. K is stored as code + 128;
// the excess, 128 * sum of q, is subtracted from the sum, modulo 2^32.
//   weights   0 <= w <= 32767; sums over the 256 tokens of a tile are below 2^31.
#pragma once
#include "attention/attention_tile.h"
#include "attention/quantized/quantized_page.h"

namespace quire::QUIRE_ISA {

constexpr float kMostQuery = 32639.0f, kMostWeight = 32767.0f;

// Numbers of queries and weights: two bytes each, in fours.
//
//   VNNI      a query: bytes, all low digits, then, from kMaxQuantizedDim on, all high ones;
//             weights of 32 tokens: [4][2][2][4] bytes, a four of the first sixteen, one of the
//             others, and so on, low digits before high ones
//   else      as dot.h has pairs, first and third, second and fourth
typedef int16_t Packed;

// From a query to the next; 17 lines, so that they don't meet in few sets of the L1 cache.
constexpr int kQueryStride = kMaxQuantizedDim + 32;
constexpr int kQueryBytes = kQueryStride * int(sizeof(Packed));

// Sums of rows times columns that are held beside what they are made of.
#if defined(__AVX512VNNI__)
constexpr int kMostPairs = 12;
#endif

typedef uint32_t SumBits __attribute__((vector_size(kIntLanes * 4)));

// factor: the scale of a packed query's whole numbers. offset: 128 * their sum.
struct PackedScale {
  float factor;
  int32_t offset;
};

// Turns the sums of a row against a unit into scores: raw products, or close to them.
__attribute__((always_inline)) inline void put_scores(float* to, DotInts sum, const PackedScale& scale, part key_scales) {
  const auto exact = (DotInts)((SumBits)sum - uint32_t(scale.offset));
  store_part(to, (part)to_floats(exact) * splat_part(scale.factor) * key_scales);
}

#if defined(__AVX512VNNI__)

inline DotInts joined_digits(DotInts high, DotInts low) {
  return (DotInts)(((SumBits)high << 8) + (SumBits)low);
}

inline DotInts dot_bytes(DotInts acc, DotInts unsigned_bytes, DotInts signed_bytes) {
  return (DotInts)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)unsigned_bytes,
                                      (__m512i)signed_bytes);
}

// One digit of R rows against C units of codes, added to sums; see score_codes.
template <int R, int C, bool kFetch>
inline void add_scores(const uint8_t* digits, const uint8_t* const* units,
                       const uint8_t* const* ahead, int num_steps, DotInts (&sums)[R][C]) {
  for (int64_t step = 0; step < num_steps; ++step, digits += 4) {
    DotInts keys[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      keys[c] = load_as<DotInts>(units[c] + step * 64);
      if constexpr (kFetch) prefetch(ahead[c] + step * 64);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts x = all_lanes(digits + r * kQueryBytes);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = dot_bytes(sums[r][c], keys[c], x);
    }
  }
}

#endif

// Sums of R rows against C units: over dimensions of q [R][kQueryStride] times units[c] [D/4][16][4],
// as integers. Fetches the lines of ahead[c] meanwhile, where the rows are few and memory is what they
// wait for.
template <int R, int C>
inline void sum_codes(const Packed* q, const uint8_t* const* units, const uint8_t* const* ahead,
                      int num_steps, DotInts (&sums)[R][C * kNumParts]) {
#if defined(__AVX512VNNI__)
  const auto* low_digits = reinterpret_cast<const uint8_t*>(q);
  const uint8_t* high_digits = low_digits + kMaxQuantizedDim;
  if constexpr (R * C <= kMostPairs) {
    DotInts lows[R][C] = {};
    for (int64_t step = 0; step < num_steps; ++step) {
      DotInts keys[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        keys[c] = load_as<DotInts>(units[c] + step * 64);
        prefetch(ahead[c] + step * 64);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const int64_t at = step * 4 + r * kQueryBytes;
        const DotInts high = all_lanes(high_digits + at), low = all_lanes(low_digits + at);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          sums[r][c] = dot_bytes(sums[r][c], keys[c], high);
          lows[r][c] = dot_bytes(lows[r][c], keys[c], low);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = joined_digits(sums[r][c], lows[r][c]);
  } else {
    add_scores<R, C, (R <= kFewRows)>(high_digits, units, ahead, num_steps, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = joined_digits(sums[r][c], DotInts{});
    add_scores<R, C, false>(low_digits, units, ahead, num_steps, sums);
  }
#else
  constexpr int kParts = C * kNumParts;
  for (int64_t step = 0; step < num_steps; ++step, q += 4) {
    DotInts even[kParts], odd[kParts];
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) {
      const uint8_t* from = units[c / kNumParts] + step * 64 + c % kNumParts * kRegisterBytes;
      const SumBits codes = load_as<SumBits>(from);
      even[c] = (DotInts)(codes & 0x00ff00ffu);
      odd[c] = (DotInts)(codes >> 8 & 0x00ff00ffu);
      if constexpr (R <= kFewRows) {
        if (c % kNumParts == 0) prefetch(ahead[c / kNumParts] + step * 64);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts first = DotInts{} + load_as<int32_t>(q + r * kQueryStride);
      const DotInts second = DotInts{} + load_as<int32_t>(q + r * kQueryStride + 2);
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c)
        sums[r][c] = dot_pairs(dot_pairs(sums[r][c], even[c], first), odd[c], second);
    }
  }
#endif
}

// scores[r, 16 c + lane] = q·k of R rows and C units of keys with their scales.
template <int R, int C>
inline void score_codes(const Packed* q, const PackedScale* query_scales, const Tile<uint8_t>& tile,
                        int unit, int num_steps, float* scores) {
  DotInts sums[R][C * kNumParts] = {};
  sum_codes<R, C>(q, tile.keys + unit, tile.next_keys + unit, num_steps, sums);
  Parts key_scales[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) key_scales[c].whole = load(tile.key_scales[unit + c]);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int p = 0; p < kNumParts; ++p)
        put_scores(scores + r * kScoreStride + 16 * c + p * kPartLanes, sums[r][c * kNumParts + p],
                   query_scales[r], key_scales[c].parts[p]);
}

// ValueRows for sums of integers, which are first multiplied by factors[r].
struct CodeRows {
  ValueRows to;
  const float* factors;

  __attribute__((always_inline)) void put(int r, int at, DotInts sum) const {
    float* row = to.rows[r] + at;
    part x = (part)to_floats(sum) * splat_part(factors[r]);
    if (to.keep)
      x = fma(load_part<part>(row), splat_part(to.keep[r]),
                       x * splat_part(to.add[r]));
    store_part(row, x);
  }
};

// A register of codes of values: four tokens of one dimension in each lane. With kTail, only the
// first n lanes.
template <bool kTail>
inline DotInts load_codes(const uint8_t* from, int n) {
  if constexpr (kTail) return (DotInts)load_part_n<part>(from, n);
  return load_as<DotInts>(from);
}

// rows[r][at + 16 c + lane] gets the sum over units [first, end) of weights [R][kProbStride] times
// units[u] [4][D][4]; kTail and ahead as for add_values.
#if defined(__AVX512VNNI__)

// The digits from kFirst on; 0: low, 1: high.
template <int R, int C, bool kTail, bool kFetch, int kFirst, int kDigits>
inline void add_codes_pass(const uint8_t* weights, const uint8_t* const* units,
                           const uint8_t* const* ahead, int first, int end, int head_dim, int at,
                           DotInts (&sums)[kDigits][R][C]) {
  const int num_lanes = head_dim - at;
  for (int u = first; u < end; ++u) {
    const uint8_t* unit = units[u] + at * 4;
    int64_t next = ((u % 4) * 16 * head_dim + at * 4) / 4;
    const uint8_t* w = weights + 64 * (u / 2) + 8 * (u % 2) + 4 * kFirst;
#pragma GCC unroll 1
    for (int quad = 0; quad < 4; ++quad, w += 16, unit += head_dim * 4, next += head_dim) {
      DotInts values[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        values[c] = load_codes<kTail>(unit + c * 64, num_lanes - c * 16);
        if constexpr (kFetch) prefetch(ahead[u / 4 * 4 + c % 4] + next);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int digit = 0; digit < kDigits; ++digit) {
          const DotInts x = all_lanes(w + r * kProbStride * int64_t(sizeof(Packed)) + digit * 4);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c)
            sums[digit][r][c] = dot_bytes(sums[digit][r][c], x, values[c]);
        }
    }
  }
}

template <int R, int C, bool kTail>
inline void add_codes(const Packed* weights, const uint8_t* const* units,
                      const uint8_t* const* ahead, int first, int end, int head_dim, int at,
                      const CodeRows& out) {
  const auto* digits = reinterpret_cast<const uint8_t*>(weights);
  constexpr bool kFetch = R <= kFewRows;
  if constexpr (R * C <= kMostPairs) {
    DotInts sums[2][R][C] = {};
    add_codes_pass<R, C, kTail, kFetch, 0, 2>(digits, units, ahead, first, end, head_dim, at, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        out.put(r, at + 16 * c, joined_digits(sums[1][r][c], sums[0][r][c]));
  } else {
    DotInts sums[1][R][C] = {};
    add_codes_pass<R, C, kTail, kFetch, 1, 1>(digits, units, ahead, first, end, head_dim, at, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[0][r][c] = joined_digits(sums[0][r][c], DotInts{});
    add_codes_pass<R, C, kTail, false, 0, 1>(digits, units, ahead, first, end, head_dim, at, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) out.put(r, at + 16 * c, sums[0][r][c]);
  }
}

#else

// The first and third, or the second and fourth of each four codes as 16 bits.
inline DotInts even_codes(DotInts codes) {
  typedef int16_t Shorts __attribute__((vector_size(kIntLanes * 4)));
  return (DotInts)((Shorts)((Shorts)codes << 8) >> 8);
}
inline DotInts odd_codes(DotInts codes) {
  typedef int16_t Shorts __attribute__((vector_size(kIntLanes * 4)));
  return (DotInts)((Shorts)codes >> 8);
}

template <int R, int C, bool kTail>
inline void add_codes(const Packed* weights, const uint8_t* const* units,
                      const uint8_t* const* ahead, int first, int end, int head_dim, int at,
                      const CodeRows& out) {
  constexpr int kParts = C * kNumParts;
  const int num_lanes = head_dim - at;
  DotInts sums[R][kParts] = {};
  for (int u = first; u < end; ++u) {
    const uint8_t* unit = units[u] + at * 4;
    int64_t next = ((u % 4) * 16 * head_dim + at * 4) / 4;
    const Packed* w = weights + 16 * u;
#pragma GCC unroll 1
    for (int quad = 0; quad < 4; ++quad, w += 4, unit += head_dim * 4, next += head_dim) {
      DotInts even[kParts], odd[kParts];
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) {
        const DotInts codes =
            load_codes<kTail>(unit + c * kRegisterBytes, num_lanes - c * kPartLanes);
        even[c] = even_codes(codes);
        odd[c] = odd_codes(codes);
        if constexpr (R <= kFewRows) {
          if (c % kNumParts == 0) prefetch(ahead[u / 4 * 4 + c / kNumParts % 4] + next);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const DotInts x = DotInts{} + load_as<int32_t>(w + r * kProbStride);
        const DotInts y = DotInts{} + load_as<int32_t>(w + r * kProbStride + 2);
#pragma GCC unroll 8
        for (int c = 0; c < kParts; ++c)
          sums[r][c] = dot_pairs(dot_pairs(sums[r][c], even[c], x), odd[c], y);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) out.put(r, at + c * kPartLanes, sums[r][c]);
}

#endif

// All dimensions, as add_all_values.
template <int R>
inline void add_all_codes(const Packed* weights, const uint8_t* const* units,
                          const uint8_t* const* ahead, int first, int end, int head_dim,
                          const CodeRows& out) {
  constexpr int kColumns = columns_for(R, kValueColumns);
  int at = 0;
  for (; at + 16 * kColumns <= head_dim; at += 16 * kColumns)
    add_codes<R, kColumns, false>(weights, units, ahead, first, end, head_dim, at, out);
  if constexpr (kColumns > 2) {
    for (; at + 32 <= head_dim; at += 32)
      add_codes<R, 2, false>(weights, units, ahead, first, end, head_dim, at, out);
  }
  if constexpr (kColumns > 1) {
    for (; at + 16 <= head_dim; at += 16)
      add_codes<R, 1, false>(weights, units, ahead, first, end, head_dim, at, out);
  }
  if (at < head_dim)
    add_codes<R, 1, true>(weights, units, ahead, first, end, head_dim, at, out);
}

}  // namespace quire::QUIRE_ISA
