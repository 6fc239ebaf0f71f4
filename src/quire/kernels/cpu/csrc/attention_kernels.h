// The two products of attention, over registers: scores of rows against sixteen keys a register,
// and rows of probabilities against values, sixteen dimensions a register. Each result is a sum
// over steps in ascending order, alike for any number of rows (R) and of columns (C): how rows and
// columns are grouped changes no bit.
//
// A "mode" says how elements are multiplied:
//   Element    stored in pages, queries and outputs
//   Factor     what queries and probabilities are packed as
//   kDepth     elements that one step adds up: the pairs of the bf16 layouts (kv_page.h), or one
#pragma once
#include "kv_page.h"
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
constexpr int kMostRows = 6, kFewRows = 6;
constexpr int kScoreColumns = 1, kValueColumns = 1;
#else
constexpr int kMostRows = 3, kFewRows = 3;
constexpr int kScoreColumns = 1, kValueColumns = 1;
#endif

// Into the L2 cache: its misses are more than those that the L1 cache can wait for (12 against 20
// GB/s; Zen 4, one thread, units anywhere).
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

struct FullMode {  // fp32
  using Element = float;
  using Factor = float;
  using Left = vf;
  using Right = vf;
  static constexpr int kDepth = 1;
  static constexpr bool kFine = true;
  static Factor factor(Element x) { return x; }
  static Left broadcast(const Factor* p) { return splat(*p); }
  static Right load_right(const Element* p) { return load(p); }
  static Right load_right_n(const Element* p, int n) { return load_n(p, n); }
  static vf multiply(Left a, Right b, vf sum) { return fma(a, b, sum); }
  // Stores the probabilities of keys 0..15 and 16..31, adds what was stored to the lanes of sum.
  static vf put(Factor* to, vf first, vf second, vf sum) {
    store(to, first);
    store(to + 16, second);
    return sum + first + second;
  }
};

struct WideMode {  // bf16, computed in fp32
  using Element = uint16_t;
  using Factor = float;
  struct Left {
    vf even, odd;
  };
  using Right = Left;
  static constexpr int kDepth = 2;
  static constexpr bool kFine = true;
  static Factor factor(Element x) { return to_float(x); }
  static Left broadcast(const Factor* p) { return {splat(p[0]), splat(p[1])}; }
  static Right split(vu pairs) { return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)}; }
  static Right load_right(const Element* p) {
    vu pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return split(pairs);
  }
  static Right load_right_n(const Element* p, int n) {
    vu pairs{};
    std::memcpy(&pairs, p, 4 * n);
    return split(pairs);
  }
  static vf multiply(const Left& a, const Right& b, vf sum) {
    return fma(a.odd, b.odd, fma(a.even, b.even, sum));
  }
  static vf put(Factor* to, vf first, vf second, vf sum) {
    return FullMode::put(to, first, second, sum);
  }
};

#if defined(__AVX512BF16__)
struct DotMode {  // bf16, by the processor's dot products of pairs; probabilities too are bf16
  using Element = uint16_t;
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
  static vf multiply(Left a, Right b, vf sum) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, a, b);
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

// scores[r, 16 c + lane] = sum over steps of q [steps][R] times units[c] [steps][16]. Fetches the
// lines of ahead[c] meanwhile, where the rows are few and memory is what they wait for.
template <typename M, int R, int C>
inline void score_units(const typename M::Factor* q, const typename M::Element* const* units,
                        const typename M::Element* const* ahead, int num_steps, float* scores) {
  vf sums[R][C] = {};
  for (int64_t step = 0; step < num_steps; ++step, q += R * M::kDepth) {
    typename M::Right keys[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const int64_t at = step * 16 * M::kDepth;
      keys[c] = M::load_right(units[c] + at);
      if constexpr (R <= kFewRows) prefetch(ahead[c] + at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename M::Left x = M::broadcast(q + r * M::kDepth);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = M::multiply(x, keys[c], sums[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + r * kScoreStride + 16 * c, sums[r][c]);
}

// Where rows of attended values go. keep: null to store them; else rows[r] becomes
// rows[r] * keep[r] + values * add[r].
struct ValueRows {
  float* const* rows;
  const float* keep;
  const float* add;
};

// rows[r][at + 16 c + lane] gets the sum over units [first, end) of probs [R][kProbStride] times
// units[u] [16 / kDepth][D][kDepth]. kTail: only the first `num_lanes` dimensions exist.
template <typename M, int R, int C, bool kTail>
inline void add_values(const typename M::Factor* probs, const typename M::Element* const* units,
                       const typename M::Element* const* ahead, int first, int end, int head_dim,
                       int at, const ValueRows& out) {
  const int num_lanes = head_dim - at;
  vf sums[R][C] = {};
  for (int u = first; u < end; ++u) {
    const typename M::Element* unit = units[u] + at * M::kDepth;
    const typename M::Element* next = ahead[u] + at * M::kDepth;
    const typename M::Factor* p = probs + 16 * u;
    for (int step = 0; step < 16; step += M::kDepth) {
      typename M::Right values[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const typename M::Element* from = unit + 16 * c * M::kDepth;
        values[c] = kTail ? M::load_right_n(from, num_lanes) : M::load_right(from);
        if constexpr (R <= kFewRows) prefetch(next + 16 * c * M::kDepth);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename M::Left x = M::broadcast(p + r * kProbStride + step);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = M::multiply(x, values[c], sums[r][c]);
      }
      unit += head_dim * M::kDepth;
      next += head_dim * M::kDepth;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* row = out.rows[r] + at;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      vf x = sums[r][c];
      if (out.keep) x = fma(load(row + 16 * c), splat(out.keep[r]), x * splat(out.add[r]));
      store(row + 16 * c, x);
    }
  }
}

// All dimensions: as many columns at once as there are registers for, what remains by halves.
template <typename M, int R>
inline void add_all_values(const typename M::Factor* probs, const typename M::Element* const* units,
                           const typename M::Element* const* ahead, int first, int end,
                           int head_dim, const ValueRows& out) {
  constexpr int kColumns = R > kFewRows ? kValueColumns / 2 : kValueColumns;
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
