// The two products of attention: queries by keys, probabilities by values.
//
// Both work over registers: scores of rows against sixteen keys a register, and rows of
// probabilities against values, sixteen dimensions a register. Each result is a sum over steps in
// ascending order, alike for any number of rows (R) and of columns (C): how rows and columns are
// grouped changes no bit.
//
// A "mode" says how elements are multiplied:
//   Element    of queries and outputs
//   Stored     in pages
//   QueryScale the data of a packed query beside its query_size factors
//   Factor     the type of packed queries and probabilities
//   kDepth     elements that one step adds up: the pairs of the bf16 layouts (kv_page.h), or one
#pragma once
#include "attention/kv_page.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kTileTokens = 256;  // keys whose softmax has one maximum; see attention.cpp
constexpr int kTileUnits = kTileTokens / 16;
constexpr int kScoreStride = kTileTokens + 16;  // rows are no multiple of a page apart
constexpr int kProbStride = kTileTokens + 32;   // tokens; a multiple of 64 bytes in every mode

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 6;
constexpr int kScoreColumns = 4, kValueColumns = 4;  // of up to kFewRows rows; half for kMostRows
#elif defined(__AVX2__)
// Six rows of sixteen keys leave registers for the keys and a query.
constexpr int kMostRows = 6, kFewRows = 4;
constexpr int kScoreColumns = 1, kValueColumns = 1;
#elif defined(__aarch64__)
constexpr int kMostRows = 4, kFewRows = 4;
constexpr int kScoreColumns = 1, kValueColumns = 1;
#else
constexpr int kMostRows = 2, kFewRows = 2;
constexpr int kScoreColumns = 1, kValueColumns = 1;
#endif

// The columns of `columns` that R rows have registers for.
constexpr int columns_for(int num_rows, int columns) {
  return num_rows > kFewRows && columns > 1 ? columns / 2 : columns;
}

// Prefetches into the L2 cache, which can wait for more misses at once than the L1 cache (20 GB/s
// instead of 12; Zen 4, one thread, units anywhere).
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Sums are held by registers, `part`s of sixteen lanes.
typedef uint32_t part_bits __attribute__((vector_size(kRegisterBytes)));

template <typename V>
inline V load_part(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store_part(float* p, part x) { std::memcpy(p, &x, sizeof x); }

// The first n lanes, of four bytes each, from p; the other lanes are zero.
template <typename V>
inline V load_part_n(const void* p, int n) {
  V x{};
  if (n > 0) std::memcpy(&x, p, 4 * (n < kPartLanes ? n : kPartLanes));
  return x;
}

struct NoScale {};

struct FullMode {  // fp32
  using Element = float;
  using Stored = float;
  using QueryScale = NoScale;
  static constexpr bool kIsQuantized = false;
  static int64_t query_size(int head_dim) { return head_dim; }
  using Factor = float;
  using Left = part;
  using Right = part;
  static constexpr int kDepth = 1;
  static constexpr bool kFine = true;
  static Factor factor(Element x) { return x; }
  static Left broadcast(const Factor* p) { return splat_part(*p); }
  static Right load_right(const Element* p) { return load_part<part>(p); }
  static Right load_right_n(const Element* p, int n) { return load_part_n<part>(p, n); }
  static part multiply(Left a, Right b, part sum) { return fma(a, b, sum); }
  // Stores the probabilities of keys 0..15 and 16..31, adds what was stored to the lanes of sum.
  static vf put(Factor* to, vf first, vf second, vf sum) {
    store(to, first);
    store(to + 16, second);
    return sum + first + second;
  }
};

struct WideMode {  // bf16, computed in fp32
  using Element = uint16_t;
  using Stored = uint16_t;
  using QueryScale = NoScale;
  static constexpr bool kIsQuantized = false;
  static int64_t query_size(int head_dim) { return head_dim; }
  using Factor = float;
  struct Left {
    part even, odd;
  };
  using Right = Left;
  static constexpr int kDepth = 2;
  static constexpr bool kFine = true;
  static Factor factor(Element x) { return to_float(x); }
  static Left broadcast(const Factor* p) { return {splat_part(p[0]), splat_part(p[1])}; }
  static Right split(const part_bits& pairs) {
    return {(part)(pairs << 16), (part)(pairs & 0xffff0000u)};
  }
  static Right load_right(const Element* p) { return split(load_part<part_bits>(p)); }
  static Right load_right_n(const Element* p, int n) { return split(load_part_n<part_bits>(p, n)); }
  static part multiply(const Left& a, const Right& b, part sum) {
    return fma(a.odd, b.odd, fma(a.even, b.even, sum));
  }
  // Half of the elements of load_right: those with an even or those with an odd index.
  template <int kHalf>
  static part load_half(const Element* p) {
    const Right both = load_right(p);
    return kHalf == 0 ? both.even : both.odd;
  }
  template <int kHalf>
  static part load_half_n(const Element* p, int n) {
    const Right both = load_right_n(p, n);
    return kHalf == 0 ? both.even : both.odd;
  }
  static vf put(Factor* to, vf first, vf second, vf sum) {
    return FullMode::put(to, first, second, sum);
  }
};

#if defined(__AVX512BF16__)
struct DotMode {  // bf16, by the processor's dot products of pairs; probabilities too are bf16
  using Element = uint16_t;
  using Stored = uint16_t;
  using QueryScale = NoScale;
  static constexpr bool kIsQuantized = false;
  static int64_t query_size(int head_dim) { return head_dim; }
  using Factor = uint16_t;
  using Left = __m512bh;
  using Right = __m512bh;
  static constexpr int kDepth = 2;
  static constexpr bool kFine = false;
  static Factor factor(Element x) { return x; }
  static Left broadcast(const Factor* p) {
    int pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Right load_right(const Element* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Right load_right_n(const Element* p, int n) {
    return (__m512bh)_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p);
  }
  static part multiply(Left a, Right b, part sum) {
    return (part)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
  // The sum is of the rounded probabilities, so that the weights of a mean add up to one.
  static vf put(Factor* to, vf first, vf second, vf sum) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(to, &pairs, sizeof pairs);
    return multiply((__m512bh)_mm512_set1_epi32(0x3f803f80), pairs, sum);
  }
};
using BF16Mode = DotMode;
#else
using BF16Mode = WideMode;
#endif

// Whether a step multiplies even and odd elements one after the other, in the order of `multiply`:
// the sums of more than kFewRows rows leave no registers for both.
template <typename M, int R>
constexpr bool kByHalves = R > kFewRows && kPartLanes == 8 && sizeof(typename M::Left) > sizeof(part);

// Lets the compiler keep nothing that it has read in a register.
inline void forget_reads() { __asm__ volatile("" : : : "memory"); }

// sum += a * b, rounded once. GCC would add in another register and move sums to memory.
inline void add_product(part& sum, part a, part b) {
#if defined(__FMA__) && !defined(__AVX512F__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum = fma(a, b, sum);
#endif
}

// sums[r][c] += half `kHalf` of a step: factors[r * stride] times parts[c].
template <typename M, int R, int kParts, int kHalf>
inline void multiply_half(const typename M::Factor* factors, int64_t stride,
                          const part (&parts)[kParts], part (&sums)[R][kParts]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const part x = splat_part(factors[r * stride + kHalf]);
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) add_product(sums[r][c], x, parts[c]);
  }
  forget_reads();
}

// scores[r, 16 c + lane] = sum over steps of q [steps][R] times units[c] [steps][16]. With few
// rows, which wait for memory, fetches the lines of ahead[c] meanwhile.
template <typename M, int R, int C>
inline void score_units(const typename M::Factor* q, const typename M::Element* const* units,
                        const typename M::Element* const* ahead, int num_steps, float* scores) {
  constexpr int kParts = C * kNumParts;
  part sums[R][kParts] = {};
  for (int64_t step = 0; step < num_steps; ++step, q += R * M::kDepth) {
    if constexpr (kByHalves<M, R>) {
      const auto key = [&](int c) {
        const int p = c % kNumParts * kPartLanes;
        return units[c / kNumParts] + (step * 16 + p) * M::kDepth;
      };
      part keys[kParts];
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) keys[c] = M::template load_half<0>(key(c));
      multiply_half<M, R, kParts, 0>(q, M::kDepth, keys, sums);
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) keys[c] = M::template load_half<1>(key(c));
      multiply_half<M, R, kParts, 1>(q, M::kDepth, keys, sums);
      continue;
    }
    typename M::Right keys[kParts];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const int64_t at = step * 16 * M::kDepth;
#pragma GCC unroll 4
      for (int p = 0; p < kNumParts; ++p)
        keys[c * kNumParts + p] = M::load_right(units[c] + at + p * kPartLanes * M::kDepth);
      if constexpr (R <= kFewRows) prefetch(ahead[c] + at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename M::Left x = M::broadcast(q + r * M::kDepth);
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) sums[r][c] = M::multiply(x, keys[c], sums[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c)
      store_part(scores + r * kScoreStride + c * kPartLanes, sums[r][c]);
}

// The target of attended values. keep: null to store them; otherwise rows[r] becomes rows[r] *
// keep[r] + values * add[r].
struct ValueRows {
  float* const* rows;
  const float* keep;
  const float* add;
};

// rows[r][at + 16 c + lane] gets the sum over units [first, end) of probs [R][kProbStride] times
// units[u] [16 / kDepth][D][kDepth]. kTail: only the first `num_lanes` dimensions exist. With few
// rows, ahead[u] .. of four units are fetched side by side, a quarter with each of units[u] ..
// (four streams at once are a fifth faster than one after the other; Zen 4). The loop over steps is
// not unrolled: GCC would move the prefetches of a unit to its front, 32 at once.
template <typename M, int R, int C, bool kTail>
inline void add_values(const typename M::Factor* probs, const typename M::Element* const* units,
                       const typename M::Element* const* ahead, int first, int end, int head_dim,
                       int at, const ValueRows& out) {
  constexpr int kParts = C * kNumParts;
  const int num_lanes = head_dim - at;
  part sums[R][kParts] = {};
  for (int u = first; u < end; ++u) {
    const typename M::Element* unit = units[u] + at * M::kDepth;
    const int64_t next_step = int64_t(head_dim) * M::kDepth / 4;
    int64_t next = ((u % 4) * 16 * head_dim + at * M::kDepth) / 4;
    const typename M::Factor* p = probs + 16 * u;
#pragma GCC unroll 1
    for (int step = 0; step < 16; step += M::kDepth) {
      if constexpr (kByHalves<M, R>) {
        const auto load = [&]<int kHalf>(int c) {
          const int lane = c * kPartLanes;
          if constexpr (kTail)
            return M::template load_half_n<kHalf>(unit + lane * M::kDepth, num_lanes - lane);
          else
            return M::template load_half<kHalf>(unit + lane * M::kDepth);
        };
        part values[kParts];
#pragma GCC unroll 8
        for (int c = 0; c < kParts; ++c) values[c] = load.template operator()<0>(c);
        multiply_half<M, R, kParts, 0>(p + step, kProbStride, values, sums);
#pragma GCC unroll 8
        for (int c = 0; c < kParts; ++c) values[c] = load.template operator()<1>(c);
        multiply_half<M, R, kParts, 1>(p + step, kProbStride, values, sums);
        unit += head_dim * M::kDepth;
        continue;
      }
      typename M::Right values[kParts];
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) {
        const typename M::Element* from = unit + c * kPartLanes * M::kDepth;
        values[c] = kTail ? M::load_right_n(from, num_lanes - c * kPartLanes) : M::load_right(from);
        if constexpr (R <= kFewRows) {
          if (c % kNumParts == 0) prefetch(ahead[u / 4 * 4 + c / kNumParts % 4] + next);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename M::Left x = M::broadcast(p + r * kProbStride + step);
#pragma GCC unroll 8
        for (int c = 0; c < kParts; ++c) sums[r][c] = M::multiply(x, values[c], sums[r][c]);
      }
      unit += head_dim * M::kDepth;
      next += next_step;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* row = out.rows[r] + at;
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) {
      float* to = row + c * kPartLanes;
      part x = sums[r][c];
      if (out.keep)
        x = fma(load_part<part>(to), splat_part(out.keep[r]),
                         x * splat_part(out.add[r]));
      store_part(to, x);
    }
  }
}

// All dimensions: as many columns at once as there are registers for, then the rest by halves.
template <typename M, int R>
inline void add_all_values(const typename M::Factor* probs, const typename M::Element* const* units,
                           const typename M::Element* const* ahead, int first, int end,
                           int head_dim, const ValueRows& out) {
  constexpr int kColumns = columns_for(R, kValueColumns);
  int at = 0;
  for (; at + 16 * kColumns <= head_dim; at += 16 * kColumns)
    add_values<M, R, kColumns, false>(probs, units, ahead, first, end, head_dim, at, out);
  if constexpr (kColumns > 2) {
    for (; at + 32 <= head_dim; at += 32)
      add_values<M, R, 2, false>(probs, units, ahead, first, end, head_dim, at, out);
  }
  if constexpr (kColumns > 1) {
    for (; at + 16 <= head_dim; at += 16)
      add_values<M, R, 1, false>(probs, units, ahead, first, end, head_dim, at, out);
  }
  if (at < head_dim)
    add_values<M, R, 1, true>(probs, units, ahead, first, end, head_dim, at, out);
}

}  // namespace quire::QUIRE_ISA
