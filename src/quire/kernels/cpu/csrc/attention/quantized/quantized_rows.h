// Attention of rows of queries to tiles of int8 codes.
//
// As attention_rows.h, with numbers that are rounded to 16 bits before each product (see
// quantized_kernels.h), each by a factor that is a pure function of one row's data:
//
//   queries   q / factor, factor = max |q| / 32639, of the row; rotated first, as K is
//   weights   p * scale of V / factor, factor = the greatest of these in the tile / 32767
//
// Neither depends on other rows, so rows get the same bits whatever is computed beside them. Rounded
// weights are off by at most 2^-16 of the greatest. NaN, of a query or of a stored scale, reaches
// the result of the rows that see it and of no others.
#pragma once
#include "attention/attention_rows.h"
#include "attention/quantized/quantized_kernels.h"

namespace quire::QUIRE_ISA {

// Queries and outputs of type T over codes.
template <typename T>
struct QuantizedMode {
  using Element = T;
  using Stored = uint8_t;
  using Factor = Packed;
  using QueryScale = PackedScale;
  static constexpr bool kIsQuantized = true;
  static constexpr int kDepth = 4;
  static constexpr bool kFine = sizeof(T) == 4;
  static int64_t query_size(int) { return kQueryStride; }
};

// Below this, divisors would have no inverse. Numbers of models are much larger.
constexpr float kLeastFactor = 1e-30f;

inline vi nearest(vf x) { return (vi)(x + splat(12582912.0f)) - 0x4b400000; }

// Sixteen numbers of a query, of dimensions d .. d + 15.
inline void put_query(Packed* query, int d, vi x) {
#if defined(__AVX512VNNI__)
  auto* low = reinterpret_cast<int8_t*>(query) + d;
  store_elements(low, x);
  store_elements(low + kMaxQuantizedDim, (x + 128) >> 8);
#else
  store_elements(query + d, x);
#endif
}

// Packs the query of row `index` of the rows that begin at `group`.
template <typename M>
  requires(M::kIsQuantized)
PackedScale pack_query(const typename M::Element* q, int head_dim, int index, int, Packed* group) {
  Packed* query = group + int64_t(index) * kQueryStride;
  const Rotated rotated(q, head_dim);
  const float largest = largest_magnitude(rotated.x, head_dim);
  const bool is_finite = largest <= __FLT_MAX__, is_zero = largest < kLeastFactor;
  const vf inverse = splat(is_finite && !is_zero ? kMostQuery / largest : 0.0f);
  vi total{};
  for (int d = 0; d < head_dim; d += kLanes) {
    vi x = nearest(load(rotated.x + d) * inverse);
    if (!is_finite) x = vi{};
    total += x;
    put_query(query, d, x);
  }
  const float factor = is_zero ? 0.0f : largest / kMostQuery;
  return {is_finite ? factor : __builtin_nanf(""), 128 * sum_of(total)};
}

// Replaces the scores of visible keys by probabilities times `scales`, V's scales. Returns the sum
// of the probabilities, by lanes. `greatest`, the largest product, is NaN where a scale is.
template <bool kFine>
inline vf find_products(float* scores, const SeenPairs& seen, const float* scales, float peak,
                        float factor, float& greatest) {
  const vf origin = max(splat(-__FLT_MAX__), splat(peak)), scale = splat(factor);
  vf sum{};
  vi most{};
  for (int i = seen.begin; i < seen.end; ++i) {
    float* at = scores + 32 * i;
    vf a = exp2_below_one<kFine>((load(at) - origin) * scale);
    vf b = exp2_below_one<kFine>((load(at + 16) - origin) * scale);
    seen.hide_others(i, a, b, 0.0f);
    sum = sum + a + b;
    a = a * load(scales + 32 * i);
    b = b * load(scales + 32 * i + 16);
    seen.hide_others(i, a, b, 0.0f);  // where scales may be anything
    store(at, a);
    store(at + 16, b);
    // As whole numbers, positive floats have their own order, and NaN is above them.
    most = larger(larger(most, (vi)a), (vi)b);
  }
  const int32_t bits = greatest_lane(most);
  std::memcpy(&greatest, &bits, sizeof greatest);
  return sum;
}

// The scales of up to sixteen rows' weights, and the factors for their products.
struct WeightScales {
  alignas(64) float inverse[16];
  alignas(64) float factor[16];

  explicit WeightScales(const float* greatest) {
    const vf most = load(greatest);
    const vi is_zero = greater(splat(kLeastFactor), most);
    store(inverse, (vf)(~is_zero & (vi)(splat(kMostWeight) / most)));
    store(factor, (vf)(~is_zero & (vi)(most / splat(kMostWeight))));
  }
};

// Weights of tokens 0 .. 15 and 16 .. 31 of a pair of units, as floats above 1.5 * 2^23.
inline void put_weights(Packed* pair, vf first, vf second) {
#if defined(__AVX512VNNI__)
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m512i low = _mm512_shuffle_epi8((__m512i)first, order);
  const __m512i high = _mm512_shuffle_epi8((__m512i)second, order);
  _mm512_storeu_si512(pair, _mm512_unpacklo_epi64(low, high));
#else
  store_elements(pair, (vi)first - 0x4b400000);
  store_elements(pair + 16, (vi)second - 0x4b400000);
#endif
}

// Products of visible keys become weights; other keys in all pairs of units [first, end) get 0.
inline void find_weights(const float* products, const SeenPairs& seen, int first, int end,
                         float inverse, Packed* row) {
  const vf factor = splat(inverse), zero = splat(12582912.0f);
  for (int i = first / 2; i < seen.begin; ++i) put_weights(row + 32 * i, zero, zero);
  for (int i = seen.begin; i < seen.end; ++i)
    put_weights(row + 32 * i, fma(load(products + 32 * i), factor, zero),
                fma(load(products + 32 * i + 16), factor, zero));
  for (int i = seen.end; i < (end + 1) / 2; ++i) put_weights(row + 32 * i, zero, zero);
}

// Rows [row, row + R) of a block against a tile.
template <typename M, int R>
  requires(M::kIsQuantized)
void attend_rows(const RowBlock<M>& block, int row, Tile<uint8_t>& tile, const Softmax& softmax,
                 int head_dim, RowScratch<M>& scratch) {
  constexpr int kColumns = columns_for(R, kScoreColumns);
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
  const Packed* queries = block.queries + int64_t(row) * kQueryStride;
  for (int u = first / kColumns * kColumns; u < end; u += kColumns)
    score_codes<R, kColumns>(queries, block.query_scales + row, tile, u, padded / 4,
                             scratch.scores + 16 * u);
  alignas(64) float old_peaks[16] = {}, new_peaks[16] = {};
  alignas(64) float sums[R][16], value_scales[kTileTokens], greatest[16] = {};
  SeenPairs seen[R];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kScoreStride;
    if (!softmax.is_plain)
      for (int i = first * 16; i < end * 16; i += 16)
        store(scores + i, softmax.score(load(scores + i)));
    if constexpr (R <= kFewRows) tile.fetch_between(padded, r, 2 * R);
    seen[r] = SeenPairs::of(block.ranges[row + r], tile.position, first);
    new_peaks[r] = greatest_score(scores, seen[r]);
    if (block.running) old_peaks[r] = shape.peak(records[r]);
    else shape.peak(records[r]) = new_peaks[r];
  }
  for (int u = first / 2 * 2; u < end + end % 2; ++u)
    store(value_scales + 16 * u, load(tile.value_scales[u]));
  for (int r = 0; r < R; ++r) {
    if constexpr (R <= kFewRows) tile.fetch_between(padded, R + r, 2 * R);
    store(sums[r], find_products<M::kFine>(scratch.scores + r * kScoreStride, seen[r], value_scales,
                                           new_peaks[r], softmax.factor, greatest[r]));
  }
  const WeightScales weights(greatest);
  for (int r = 0; r < R; ++r)
    find_weights(scratch.scores + r * kScoreStride, seen[r], first, end, weights.inverse[r],
                 scratch.probs + r * kProbStride);
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
                   {out, weights.factor});
}

}  // namespace quire::QUIRE_ISA
