// The products of latent attention, and the softmax between them.
//
// All query heads read one vector a token (see latent.cpp), so there are many rows to a key, and
// sixteen rows are the lanes of a register:
//
//   scores    [tokens][16 rows]: elements of a token, each copied to all lanes, by the queries
//   softmax   by lanes: no sum or maximum goes across a register
//   values    sixteen dimensions a register, by probabilities, each copied to all lanes
//
// Both products read the stored vectors as they are. Only for vdpbf16ps, which adds up products of
// two tokens, a thread interleaves pairs of tokens in its own memory, some dimensions at a time.
// Each result is a sum in ascending order, whatever rows are computed beside it.
//
// A mode is one of attention_kernels.h, FullMode or DotMode; T is what pages hold. bf16 without dot
// products is widened first.
#pragma once
#include "attention/attention_rows.h"

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__)
constexpr int kLatentTokens = 16;     // scored at once for one group of rows; half of it for two
constexpr int kLatentGroups = 2;      // groups of sixteen rows that are scored at once
constexpr int kLatentValueRows = 8;   // against two columns of values; fewer against four
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kLatentTokens = 4, kLatentGroups = 1, kLatentValueRows = 4;
#else
constexpr int kLatentTokens = 2, kLatentGroups = 1, kLatentValueRows = 2;
#endif

// Prefetches the next tile line by line while the processor computes: `rate` 256ths of a line with
// each step of a product.
struct Fetcher {
  const char* const* runs = nullptr;
  int num_runs = 0;
  int64_t run_bytes = 0;
  const char* at = nullptr;
  int64_t left = 0;
  int rate = 0, credit = 0;

  int64_t num_lines() const { return num_runs * run_bytes / 64; }

  void fetch_all() const {
    for (int i = 0; i < num_runs; ++i)
      for (int64_t byte = 0; byte < run_bytes; byte += 64) prefetch(runs[i] + byte);
  }

  // From now on, spreads `lines` lines over `steps` steps.
  void spread(int64_t lines, int64_t steps) { rate = int(lines * 256 / steps); }

  void step() {
    credit += rate;
    if (credit < 256) return;
    credit -= 256;
    if (left <= 0) {
      if (num_runs == 0) return;
      at = *runs++;
      left = run_bytes;
      --num_runs;
    }
    prefetch(at);
    at += 64;
    left -= 64;
  }
};

// scores[(c * kTileTokens + r) * 16 + lane] = sum over steps of token r's elements times the
// queries' [C][num_steps][16][kDepth]. Tokens are `stride` bytes apart.
template <typename M, int R, int C>
inline void score_tokens(const char* tokens, int64_t stride, const typename M::Factor* queries,
                         int num_steps, float* scores, Fetcher& shared_fetcher) {
  using Factor = typename M::Factor;
  constexpr int kParts = C * kNumParts, kStepBytes = M::kDepth * sizeof(Factor);
  constexpr int kBases = (R + 3) / 4;
  // Four tokens from one address: there are too few registers for an address each.
  const char* bases[kBases];
  for (int i = 0; i < kBases; ++i) bases[i] = tokens + 4 * i * stride;
  const int64_t thrice = 3 * stride, group = int64_t(num_steps) * 16 * M::kDepth;
  part sums[R][kParts] = {};
  Fetcher fetcher = shared_fetcher;
  for (int step = 0; step < num_steps; ++step, queries += 16 * M::kDepth) {
    typename M::Right q[kParts];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int p = 0; p < kNumParts; ++p)
        q[c * kNumParts + p] = M::load_right(queries + c * group + p * kPartLanes * M::kDepth);
    fetcher.step();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const char* base = bases[r / 4];
      const char* from = r % 4 == 0 ? base : r % 4 == 3 ? base + thrice : base + r % 4 * stride;
      const typename M::Left x = M::broadcast(reinterpret_cast<const Factor*>(from));
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) sums[r][c] = M::multiply(x, q[c], sums[r][c]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) bases[i] += kStepBytes;
  }
  shared_fetcher = fetcher;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int p = 0; p < kNumParts; ++p)
        store_part(scores + (c * kTileTokens + r) * 16 + p * kPartLanes,
                   sums[r][c * kNumParts + p]);
}

// Dimensions of values that are prepared at once, for all rows: 32 KiB of a tile.
template <typename M>
constexpr int kSliceDims = 32 * M::kDepth;

// rows[r][16 c + lane] gets the sum over steps [first, end) of probs [steps][16][kDepth], row r, by
// slice [steps][kSliceDims][kDepth], as ValueRows says.
template <typename M, int R, int C>
inline void add_slice(const typename M::Factor* probs, const typename M::Factor* slice, int first,
                      int end, int at, const ValueRows& out, Fetcher& shared_fetcher) {
  constexpr int kParts = C * kNumParts, kRow = kSliceDims<M> * M::kDepth;
  part sums[R][kParts] = {};
  Fetcher fetcher = shared_fetcher;
  const typename M::Factor* p = probs + int64_t(first) * 16 * M::kDepth;
  const typename M::Factor* v = slice + int64_t(first) * kRow;
  for (int step = first; step < end; ++step, p += 16 * M::kDepth, v += kRow) {
    typename M::Right values[kParts];
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) values[c] = M::load_right(v + c * kPartLanes * M::kDepth);
    fetcher.step();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename M::Left x = M::broadcast(p + r * M::kDepth);
#pragma GCC unroll 8
      for (int c = 0; c < kParts; ++c) sums[r][c] = M::multiply(x, values[c], sums[r][c]);
    }
  }
  shared_fetcher = fetcher;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kParts; ++c) {
      float* to = out.rows[r] + at + c * kPartLanes;
      part x = sums[r][c];
      if (out.keep)
        x = fma(load_part<part>(to), splat_part(out.keep[r]),
                         x * splat_part(out.add[r]));
      store_part(to, x);
    }
  }
}

// Stores the probabilities of tokens t and t + 1, by rows, and adds what was stored to sum[0] and
// sum[1].
inline void put_pair(FullMode, float* to, vf first, vf second, vf* sum) {
  store(to, first);
  store(to + 16, second);
  sum[0] = sum[0] + first;
  sum[1] = sum[1] + second;
}

#if defined(__AVX512BF16__)
inline void put_pair(DotMode, uint16_t* to, vf first, vf second, vf* sum) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i pairs = _mm512_permutexvar_epi16(order, halves);
  std::memcpy(to, &pairs, sizeof pairs);
  sum[0] = DotMode::multiply((__m512bh)_mm512_set1_epi32(0x3f803f80), (__m512bh)pairs, sum[0]);
}
#endif

// Which tokens of a tile sixteen rows see: row i [low[i], high[i]), all of them [begin_full,
// end_full), any of them [begin, end).
struct SeenLanes {
  vi low, high;
  int begin, end, begin_full, end_full;

  // ranges: [count]. Lanes without a row repeat the last row.
  static SeenLanes of(const Range* ranges, int count, int position) {
    SeenLanes seen{{}, {}, kTileTokens, 0, 0, kTileTokens};
    for (int lane = 0; lane < 16; ++lane) {
      const Range& range = ranges[smaller(lane, count - 1)];
      const int low = larger(range.low - position, 0);
      const int high = smaller(range.high - position, kTileTokens);
      seen.low[lane] = low;
      seen.high[lane] = high;
      seen.begin_full = larger(seen.begin_full, low);
      seen.end_full = smaller(seen.end_full, high);
      if (low >= high) continue;
      seen.begin = smaller(seen.begin, low);
      seen.end = larger(seen.end, high);
    }
    return seen;
  }

  bool is_empty() const { return begin >= end; }

  vf hide_others(int token, vf x, float value) const {
    if (token >= begin_full && token < end_full) return x;
    const vi now = vi{} + token;
    const vi inside = ~((now - low) >> 31) & ((now - high) >> 31);
    return (vf)((inside & (vi)x) | (~inside & (vi)splat(value)));
  }
};

// scores [tokens][16] -> the greatest of each row; they become what the softmax takes.
inline vf greatest_scores(float* scores, const SeenLanes& seen, const Softmax& softmax) {
  vf best[2] = {splat(kNever), splat(kNever)};
  for (int t = seen.begin; t < seen.end; ++t) {
    vf x = load(scores + 16 * t);
    if (!softmax.is_plain) {
      x = softmax.score(x);
      store(scores + 16 * t, x);
    }
    best[t & 1] = max(best[t & 1], seen.hide_others(t, x, kNever));
  }
  return max(best[0], best[1]);
}

// Probabilities of the tokens that any row sees, and of their neighbours in pairs: 0 where a row
// doesn't see them. Returns each row's sum.
template <typename M>
inline vf find_row_probs(const float* scores, const SeenLanes& seen, vf peaks, float factor,
                         typename M::Factor* probs) {
  const vf origin = max(splat(-__FLT_MAX__), peaks), scale = splat(factor);
  vf sum[2] = {};
  for (int t = seen.begin & ~1; t < seen.end; t += 2) {
    vf x[2];
    for (int i = 0; i < 2; ++i) {
      const vf power = exp2_below_one<M::kFine>((load(scores + 16 * (t + i)) - origin) * scale);
      x[i] = seen.hide_others(t + i, power, 0.0f);
    }
    put_pair(M{}, probs + 16 * t, x[0], x[1], sum);
  }
  return sum[0] + sum[1];
}

}  // namespace quire::QUIRE_ISA
