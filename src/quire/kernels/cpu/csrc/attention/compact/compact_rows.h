// Attention of rows of queries to tiles of int8 codes.
//
// As attention_rows.h, with numbers that are rounded to 16 bits before each product (see
// compact_kernels.h), each by a factor that is a pure function of what one row knows:
//
//   queries   q / factor, factor = max |q| / 32639, of the row
//   weights   p * scale of V / factor, factor = the greatest of these in the tile / 32767
//
// Neither depends on other rows, so rows get the same bits whatever is computed beside them. Rounded
// weights are off by at most 2^-16 of the greatest. NaN, of a query or of a stored scale, reaches
// the result of the rows that see it and of no others.
#pragma once
#include "attention/attention_rows.h"
#include "attention/compact/compact_kernels.h"

namespace quire::QUIRE_ISA {

// factor: what a packed query's whole numbers stand for. offset: see score_codes.
struct PackedScale {
  float factor;
  int32_t offset;
};

// Queries and outputs of type T over codes.
template <typename T>
struct CompactMode {
  using Element = T;
  using Stored = uint8_t;
  using Factor = Packed;
  using QueryScale = PackedScale;
  static constexpr bool kIsCompact = true;
  static constexpr int kDepth = 4;
  static constexpr bool kFine = sizeof(T) == 4;
};

// Below, what numbers are divided by would have no inverse; next to a model's this is nothing.
constexpr float kLeastFactor = 1e-30f;

inline vi nearest(vf x) { return (vi)(x + splat(12582912.0f)) - 0x4b400000; }

// Packs the query of row `index` of a group of `num_rows` that begins at `group`.
template <typename M>
  requires(M::kIsCompact)
PackedScale pack_query(const typename M::Element* q, int head_dim, int index, int num_rows,
                       Packed* group) {
  const int padded = (head_dim + 3) / 4 * 4;
  int32_t numbers[kMostCompactDim + kLanes];
  const float largest = largest_magnitude(q, head_dim);
  const bool is_finite = largest <= __FLT_MAX__, is_zero = largest < kLeastFactor;
  const vf inverse = splat(is_finite && !is_zero ? kMostQuery / largest : 0.0f);
  vi total{};
  for (int d = 0; d < padded; d += kLanes) {
    const int left = head_dim - d;
    vi x = nearest((left >= kLanes ? load(q + d) : load_n(q + d, left)) * inverse);
    if (!is_finite) x = vi{};
    total += x;
    std::memcpy(numbers + d, &x, sizeof x);
  }
#if defined(__AVX512VNNI__)
  auto* high = reinterpret_cast<int8_t*>(group) + index * 4;
  int8_t* low = high + int64_t(padded) * num_rows;
  for (int d = 0; d < padded; d += 4, high += num_rows * 4, low += num_rows * 4)
    for (int i = 0; i < 4; ++i) {
      high[i] = int8_t((numbers[d + i] + 128) >> 8);
      low[i] = int8_t(numbers[d + i]);
    }
#else
  Packed* to = group + index * 4;
  for (int d = 0; d < padded; d += 4, to += num_rows * 4) {
    to[0] = Packed(numbers[d]);
    to[1] = Packed(numbers[d + 2]);
    to[2] = Packed(numbers[d + 1]);
    to[3] = Packed(numbers[d + 3]);
  }
#endif
  const float factor = is_zero ? 0.0f : largest / kMostQuery;
  return {is_finite ? factor : __builtin_nanf(""), 128 * sum_of(total)};
}

inline vf int_lanes_to_floats(const float* p) {
  vi x;
  std::memcpy(&x, p, sizeof x);
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps((__m512i)x);
#else
  union { vi whole; DotInts parts[kNumParts]; } from{x};
  Parts to;
  for (int i = 0; i < kNumParts; ++i) to.parts[i] = (part)to_floats(from.parts[i]);
  return to.whole;
#endif
}

// Sums of integers become scores, in place.
inline void finish_scores(float* scores, int first, int end, float factor,
                          const uint16_t* const* scales, const Softmax& softmax) {
  for (int u = first; u < end; ++u) {
    vf x = int_lanes_to_floats(scores + 16 * u) * splat(factor) * load(scales[u]);
    if (!softmax.is_plain) x = softmax.score(x);
    store(scores + 16 * u, x);
  }
}

// Of the keys seen, probabilities times the scales of V take the place of scores. Returns the sum
// of the probabilities, by lanes; `greatest` of the products orders NaN above all numbers.
template <bool kFine>
inline vf find_products(float* scores, const SeenPairs& seen, const uint16_t* const* scales,
                        float peak, float factor, float& greatest) {
  const vf origin = max(splat(-__FLT_MAX__), splat(peak)), scale = splat(factor);
  vf sum{};
  vi most{};
  for (int i = seen.begin; i < seen.end; ++i) {
    float* at = scores + 32 * i;
    vf a = exp2_below_one<kFine>((load(at) - origin) * scale);
    vf b = exp2_below_one<kFine>((load(at + 16) - origin) * scale);
    seen.hide_others(i, a, b, 0.0f);
    sum = sum + a + b;
    a = a * load(scales[2 * i]);
    b = b * load(scales[2 * i + 1]);
    seen.hide_others(i, a, b, 0.0f);
    store(at, a);
    store(at + 16, b);
    most = larger(larger(most, (vi)a & 0x7fffffff), (vi)b & 0x7fffffff);
  }
  int32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof most);
  int32_t bits = 0;
  for (int lane : lanes) bits = lane > bits ? lane : bits;
  std::memcpy(&greatest, &bits, sizeof greatest);
  return sum;
}

// Sixteen weights, of tokens token .. token + 15 of a tile.
inline void put_weights(Packed* row, int token, vi w) {
#if defined(__AVX512VNNI__)
  auto* high = reinterpret_cast<int8_t*>(row) + token;
  store_elements(high, w >> 8);
  store_elements(high + kTileTokens, w);
#else
  store_elements(row + token, w);
#endif
}

// Products of the keys seen become weights; of the others, in all pairs of units [first, end), 0.
// Returns what a weight of one stands for.
inline float find_weights(const float* products, const SeenPairs& seen, int first, int end,
                          float greatest, Packed* row) {
  const bool is_zero = greatest < kLeastFactor;
  const vf inverse = splat(is_zero ? 0.0f : kMostWeight / greatest);
  for (int i = first / 2; i < (end + 1) / 2; ++i) {
    const bool is_seen = i >= seen.begin && i < seen.end;
    for (int at = 32 * i; at < 32 * i + 32; at += 16)
      put_weights(row, at, is_seen ? nearest(load(products + at) * inverse) : vi{});
  }
  return is_zero ? 0.0f : greatest / kMostWeight;
}

// Rows [row, row + R) of a block against a tile.
template <typename M, int R>
  requires(M::kIsCompact)
void attend_rows(const RowBlock<M>& block, int row, Tile<uint8_t>& tile, const Softmax& softmax,
                 int head_dim, RowScratch<M>& scratch) {
  constexpr int kColumns = R > kFewRows ? kScoreColumns / 2 : kScoreColumns;
  const RecordShape shape(head_dim);
  const int padded = (head_dim + 3) / 4 * 4;
  float* const* records = block.records + row;
  int low = kTileTokens, high = 0;
  for (int r = 0; r < R; ++r) {
    low = smaller(low, larger(block.ranges[row + r].low - tile.position, 0));
    high = larger(high, smaller(block.ranges[row + r].high - tile.position, kTileTokens));
  }
  if (low >= high) {
    for (int r = 0; r < R && !block.running; ++r) shape.peak(records[r]) = kNever;
    return;
  }
  const int first = low / 16, end = (high + 15) / 16;
  const Packed* queries = block.queries + int64_t(row) * padded;
  int32_t offsets[R];
  for (int r = 0; r < R; ++r) offsets[r] = block.query_scales[row + r].offset;
  for (int u = first / kColumns * kColumns; u < end; u += kColumns)
    score_codes<R, kColumns>(queries, tile.keys + u, tile.next_keys + u, padded / 4, offsets,
                             scratch.scores + 16 * u);
  alignas(64) float old_peaks[16] = {}, new_peaks[16] = {};
  alignas(64) float sums[R][16];
  float factors[R];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kScoreStride;
    finish_scores(scores, first, end, block.query_scales[row + r].factor, tile.key_scales, softmax);
    if constexpr (R <= kFewRows) tile.fetch_between(padded, r, 2 * R);
    const SeenPairs seen = SeenPairs::of(block.ranges[row + r], tile.position, first);
    new_peaks[r] = greatest_score(scores, seen);
    if (block.running) old_peaks[r] = shape.peak(records[r]);
    else shape.peak(records[r]) = new_peaks[r];
  }
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kScoreStride;
    if constexpr (R <= kFewRows) tile.fetch_between(padded, R + r, 2 * R);
    const SeenPairs seen = SeenPairs::of(block.ranges[row + r], tile.position, first);
    float greatest;
    store(sums[r], find_products<M::kFine>(scores, seen, tile.value_scales, new_peaks[r],
                                           softmax.factor, greatest));
    factors[r] = find_weights(scores, seen, first, end, greatest, scratch.probs + r * kProbStride);
  }
  MergeFactors merge;
  ValueRows out{records, nullptr, nullptr};
  if (block.running) {
    merge.find(old_peaks, new_peaks, softmax.factor);
    out.keep = merge.keep;
    out.add = merge.add;
  }
  for (int r = 0; r < R; ++r) {
    if (!block.running) {
      store(shape.sums(records[r]), load(sums[r]));
      continue;
    }
    merge_lanes(shape.sums(records[r]), sums[r], 16, merge.keep[r], merge.add[r]);
    shape.peak(records[r]) = old_peaks[r];
  }
  add_all_codes<R>(scratch.probs, tile.values, tile.next_values, first, end, padded,
                   {out, factors});
}

}  // namespace quire::QUIRE_ISA
