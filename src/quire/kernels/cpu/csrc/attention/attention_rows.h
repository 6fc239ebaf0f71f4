// Attention of rows of queries to tiles of keys.
//
// A row is one query head of one token; the rows of a block share a KV head. A record is the state
// of a row after some tiles, in floats:
//
//   [Dp] acc: sum of p * value      p = 2^(score * factor - peak * factor), Dp: D rounded up to 16
//   [16] sum of p, by lanes
//   [16] the peak, the greatest score; 15 unused
//
// Tiles are merged in ascending order, each from a record of its own or, which is the same
// arithmetic, straight from registers.
#pragma once
#include "attention/attention_math.h"
#include "attention/attention_tile.h"

namespace quire::QUIRE_ISA {

// Turns a layer's raw products q·k into probabilities.
struct Softmax {
  bool is_plain;   // scores are the products themselves
  float soft_cap;  // 0: none
  float inner;     // what products are multiplied by before the cap
  float factor;    // scores times it are exponents of 2; positive

  explicit Softmax(const AttentionLayer& layer)
      : is_plain(layer.soft_cap == 0.0f && layer.scale > 0.0f),
        soft_cap(layer.soft_cap),
        inner(soft_cap == 0.0f ? layer.scale : layer.scale / soft_cap),
        factor(is_plain ? layer.scale * kLog2E : kLog2E) {}

  vf score(vf product) const {
    const vf x = product * splat(inner);
    return soft_cap == 0.0f ? x : tanh(x) * splat(soft_cap);
  }
};

struct RecordShape {
  int padded_dim, size;
  explicit RecordShape(int head_dim)
      : padded_dim((head_dim + 15) / 16 * 16), size(padded_dim + 32) {}
  float* sums(float* record) const { return record + padded_dim; }
  template <typename F>
  F& peak(F* record) const {
    return record[padded_dim + 16];
  }
  void clear(float* record) const {
    std::memset(record, 0, size * sizeof(float));
    peak(record) = kNever;
  }
};

// The shares of an old record and of a new tile in a merged record, for up to 16 rows.
struct MergeFactors {
  float keep[16], add[16];

  // old_peaks become the peaks after the merge. A row that sees nothing of the tile stays as it is.
  void find(float* old_peaks, const float* new_peaks, float factor) {
    const vf before = load(old_peaks), now = load(new_peaks);
    const vf peak = max(before, now);
    const vf origin = max(splat(-__FLT_MAX__), peak);  // no inf - inf
    store(keep, exp2_below_one<true>((before - origin) * splat(factor)));
    store(add, exp2_below_one<true>((now - origin) * splat(factor)));
    store(old_peaks, peak);
  }
};

inline void merge_lanes(float* to, const float* values, int count, float keep, float add) {
  for (int i = 0; i < count; i += 16)
    store(to + i, fma(load(to + i), splat(keep), load(values + i) * splat(add)));
}

// Merges the record of one tile into a record.
inline void merge_record(float* record, const float* other, float factor,
                         const RecordShape& shape) {
  if (shape.peak(other) == kNever) return;  // nothing else is written in such a one
  alignas(64) float old_peaks[16] = {shape.peak(record)}, new_peaks[16] = {shape.peak(other)};
  MergeFactors factors;
  factors.find(old_peaks, new_peaks, factor);
  shape.peak(record) = old_peaks[0];
  merge_lanes(record, other, shape.padded_dim + 16, factors.keep[0], factors.add[0]);
}

// A thread's working memory for a few rows and a tile.
template <typename M>
struct RowScratch {
  alignas(64) float scores[kMostRows * kScoreStride];
  alignas(64) typename M::Factor probs[kMostRows * kProbStride];
};

// The keys [low, high) of a tile that one row sees, by pairs of units: 32 i .. 32 i + 31.
struct SeenPairs {
  int low, high;
  int begin, end;            // pairs with such keys
  int begin_full, end_full;  // pairs of nothing else

  // position: the tile's. unit: where a row that sees nothing pretends to look.
  static SeenPairs of(const Range& range, int position, int unit) {
    int low = larger(range.low - position, 0), high = smaller(range.high - position, kTileTokens);
    if (low >= high) low = high = 16 * unit;
    return {low, high, low / 32, (high + 31) / 32, (low + 31) / 32, high / 32};
  }

  void hide_others(int pair, vf& first, vf& second, float value) const {
    if (pair >= begin_full && pair < end_full) return;
    first = keep_lanes(first, low - 32 * pair, high - 32 * pair, value);
    second = keep_lanes(second, low - 32 * pair - 16, high - 32 * pair - 16, value);
  }
};

// sums[lane] = f(its value so far, of the lane's keys of a pair), pair by pair. Pairs of keys that are
// all seen are computed register by register, since GCC keeps wider values in memory.
//   by_registers(pair, p, total): part p of the sixteen lanes; by_lanes(pair, total): all
template <typename F, typename G>
inline vf over_pairs(const SeenPairs& seen, vf total, F&& by_registers, G&& by_lanes) {
  const int begin_full = smaller(larger(seen.begin_full, seen.begin), seen.end);
  const int end_full = larger(smaller(seen.end_full, seen.end), begin_full);
  for (int i = seen.begin; i < begin_full; ++i) total = by_lanes(i, total);
  part parts[kNumParts];
  std::memcpy(parts, &total, sizeof total);
  for (int i = begin_full; i < end_full; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kNumParts; ++p) parts[p] = by_registers(i, p, parts[p]);
  std::memcpy(&total, parts, sizeof total);
  for (int i = end_full; i < seen.end; ++i) total = by_lanes(i, total);
  return total;
}

inline float greatest_score(const float* scores, const SeenPairs& seen) {
  const auto by_registers = [&](int i, int p, part best) {
    const float* from = scores + 32 * i + p * kPartLanes;
    return max(max(best, load_part<part>(from)), load_part<part>(from + 16));
  };
  return greatest_lane(over_pairs(seen, splat(kNever), by_registers, [&](int i, vf best) {
    vf first = load(scores + 32 * i), second = load(scores + 32 * i + 16);
    seen.hide_others(i, first, second, kNever);
    return max(max(best, first), second);
  }));
}

// Probabilities of visible keys, and 0 for the others in all pairs of units [first, end). Returns
// the sum by lanes.
template <typename M>
inline vf find_probs(const float* scores, const SeenPairs& seen, int first, int end, float peak,
                     float factor, typename M::Factor* probs) {
  const vf origin = max(splat(-__FLT_MAX__), splat(peak)), scale = splat(factor);
  for (int i = first / 2; i < seen.begin; ++i) M::put(probs + 32 * i, vf{}, vf{}, vf{});
  for (int i = seen.end; i < (end + 1) / 2; ++i) M::put(probs + 32 * i, vf{}, vf{}, vf{});
  const auto by_lanes = [&](int i, vf sum) {
    vf a = exp2_below_one<M::kFine>((load(scores + 32 * i) - origin) * scale);
    vf b = exp2_below_one<M::kFine>((load(scores + 32 * i + 16) - origin) * scale);
    seen.hide_others(i, a, b, 0.0f);
    return M::put(probs + 32 * i, a, b, sum);
  };
  if constexpr (kNumParts == 1 || sizeof(typename M::Factor) < sizeof(float)) {
    vf sum{};
    for (int i = seen.begin; i < seen.end; ++i) sum = by_lanes(i, sum);
    return sum;
  } else {
    const part from = splat_part(origin[0]), by = splat_part(factor);
    const auto by_registers = [&](int i, int p, part sum) {
      const int at = 32 * i + p * kPartLanes;
      const part a = exp2_below_one<M::kFine>((load_part<part>(scores + at) - from) * by);
      const part b = exp2_below_one<M::kFine>((load_part<part>(scores + at + 16) - from) * by);
      store_part(probs + at, a);
      store_part(probs + at + 16, b);
      return sum + a + b;
    };
    return over_pairs(seen, vf{}, by_registers, by_lanes);
  }
}

// Rows that share a KV head. Records: of all tiles merged (running), or of one tile each.
template <typename M>
struct RowBlock {
  int num_rows;
  bool running;
  const typename M::Factor* queries;  // by groups of rows: [D / kDepth][rows of the group][kDepth]
  const typename M::QueryScale* query_scales;  // [num_rows]
  const Range* ranges;                // [num_rows]
  float* const* records;              // [num_rows]
};

// The largest number of rows, at most num_rows, for which there is a kernel.
inline int rows_at_once(int num_rows) {
  if (num_rows >= kMostRows) return kMostRows;
  if (num_rows >= kFewRows) return kFewRows;
  return num_rows == 5 ? 4 : num_rows;
}

// Rows [row, row + R) of a block against a tile.
template <typename M, int R>
  requires(!M::kIsQuantized)
void attend_rows(const RowBlock<M>& block, int row, Tile<typename M::Stored>& tile,
                 const Softmax& softmax, int head_dim, RowScratch<M>& scratch) {
  constexpr int kColumns = columns_for(R, kScoreColumns);
  const RecordShape shape(head_dim);
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
  const typename M::Factor* queries = block.queries + int64_t(row) * head_dim;
  for (int u = first / kColumns * kColumns; u < end; u += kColumns)
    score_units<M, R, kColumns>(queries, tile.keys + u, tile.next_keys + u, head_dim / M::kDepth,
                                scratch.scores + 16 * u);
  alignas(64) float old_peaks[16] = {}, new_peaks[16] = {};
  alignas(64) float sums[R][16];
  SeenPairs seen[R];
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * kScoreStride;
    if (!softmax.is_plain)
      for (int i = first * 16; i < end * 16; i += 16)
        store(scores + i, softmax.score(load(scores + i)));
    if constexpr (R <= kFewRows) tile.fetch_between(head_dim, r, 2 * R);
    seen[r] = SeenPairs::of(block.ranges[row + r], tile.position, first);
    new_peaks[r] = greatest_score(scores, seen[r]);
    if (block.running) old_peaks[r] = shape.peak(records[r]);
    else shape.peak(records[r]) = new_peaks[r];
  }
  for (int r = 0; r < R; ++r) {
    if constexpr (R <= kFewRows) tile.fetch_between(head_dim, R + r, 2 * R);
    store(sums[r], find_probs<M>(scratch.scores + r * kScoreStride, seen[r], first, end,
                                 new_peaks[r], softmax.factor, scratch.probs + r * kProbStride));
  }
  tile.clear_edges(head_dim);
  MergeFactors factors;
  ValueRows out{records, nullptr, nullptr};
  if (block.running) {
    factors.find(old_peaks, new_peaks, softmax.factor);
    out.keep = factors.keep;
    out.add = factors.add;
  }
  for (int r = 0; r < R; ++r) {
    if (!block.running) {
      store(shape.sums(records[r]), load(sums[r]));
      continue;
    }
    merge_lanes(shape.sums(records[r]), sums[r], 16, factors.keep[r], factors.add[r]);
    shape.peak(records[r]) = old_peaks[r];
  }
  add_all_values<M, R>(scratch.probs, tile.values, tile.next_values, first, end, head_dim, out);
}

template <typename M>
void attend_tile(const RowBlock<M>& block, Tile<typename M::Stored>& tile, const Softmax& softmax,
                 int head_dim, RowScratch<M>& scratch) {
  for (int row = 0; row < block.num_rows;) {
    const int count = rows_at_once(block.num_rows - row);
    switch (count) {
      case 1: attend_rows<M, 1>(block, row, tile, softmax, head_dim, scratch); break;
      case 2: attend_rows<M, 2>(block, row, tile, softmax, head_dim, scratch); break;
#if defined(__AVX2__) || defined(__aarch64__)
      case 3: attend_rows<M, 3>(block, row, tile, softmax, head_dim, scratch); break;
      case 4: attend_rows<M, 4>(block, row, tile, softmax, head_dim, scratch); break;
#endif
#if defined(__AVX2__)
      case 6: attend_rows<M, 6>(block, row, tile, softmax, head_dim, scratch); break;
#endif
#if defined(__AVX512F__)
      case 12: attend_rows<M, 12>(block, row, tile, softmax, head_dim, scratch); break;
#endif
    }
    row += count;
  }
}

// Packs the query of row `index` of a group of `num_rows` that begins at `group`.
template <typename M>
  requires(!M::kIsQuantized)
NoScale pack_query(const typename M::Element* q, int head_dim, int index, int num_rows,
                   typename M::Factor* group) {
  typename M::Factor* to = group + index * M::kDepth;
  for (int d = 0; d < head_dim; d += M::kDepth, to += num_rows * M::kDepth)
    for (int i = 0; i < M::kDepth; ++i) to[i] = M::factor(q[d + i]);
  return {};
}

// Turns a record into the result: out [size], and the natural log of the sum of exp(score). A sink
// is one more score, with a value of 0.
template <typename T>
void finish(float* record, const RecordShape& shape, const Softmax& softmax, const float* sink,
            int size, T* out, float* lse) {
  float peak = shape.peak(record) * softmax.factor;  // as exponents of 2
  float sum = reduce_add(load(shape.sums(record)));
  float kept = 1.0f;
  if (sink) {
    const float other = *sink * kLog2E;
    const float both = peak > other ? peak : other;
    kept = exp2_below_one<true>(splat(peak - both))[0];
    sum = sum * kept + exp2_below_one<true>(splat(other - both))[0];
    peak = both;
  }
  const vf inverse = splat(kept / sum);
  int d = 0;
  for (; d + 16 <= size; d += 16) store(out + d, load(record + d) * inverse);
  if (d < size) store_n(out + d, load(record + d) * inverse, size - d);
  if (lse) *lse = peak * kLn2 + __builtin_logf(sum);
}

}  // namespace quire::QUIRE_ISA
