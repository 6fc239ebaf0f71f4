// Attention of latent layers: one vector a token is the key, and in part the value, of all heads.
//
// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with the projections to
// each head's keys and values absorbed into its query and its output:
//
//   out[h] = sum over visible tokens of p[h] * x[:Dv] / sum of p[h],
//   p[h] = exp(cap(scale * q[h]·x) - peak)
//
// Tiles, their merging and tasks are as in attention.cpp, in decoding and in prefill: a row's
// result is the same to the bit, whatever is computed beside it. The shape differs: all heads of a
// token, 16 to 128, are rows against one vector of several hundred dimensions, so the processor
// computes for as long as it reads. A piece's rows therefore go through a tile together: all
// scores, all probabilities, then values, some dimensions of them at a time (latent_kernels.h), and
// the lines of the next tile are fetched meanwhile.
#include "attention/latent.h"

#include <utility>

#include "attention/attention_tasks.h"
#include "attention/latent_tile.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTokensPerWrite = 16;
constexpr int kLatentTasksPerThread = 8;  // few: a split sequence's records are as large as values
constexpr int kSharesSlot = 2;  // of the pool's memory; tasks have 0, records 1

template <typename T>
T* take(char*& at, int64_t count) {
  T* taken = reinterpret_cast<T*>(at);
  at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  return taken;
}

// Columns of values against R rows, as many as there are registers for.
template <int R>
constexpr int columns() {
#if defined(__AVX512F__)
  return R > 4 ? 2 : 4;
#elif defined(__AVX2__) || defined(__aarch64__)
  return R > 2 ? 1 : 2;
#else
  return 1;
#endif
}

// Values of dimensions [at, at + width) of a record, and the operands of their products.
template <typename M>
struct SliceWork {
  const typename M::Factor* slice;
  int at, width;
  Fetcher& fetcher;
};

template <typename M, int R>
void add_columns(const SliceWork<M>& work, const typename M::Factor* probs, int first, int end,
                 const ValueRows& out) {
  constexpr int C = columns<R>();
  int d = 0;
  for (; d + 16 * C <= work.width; d += 16 * C)
    add_slice<M, R, C>(probs, work.slice + d * M::kDepth, first, end, work.at + d, out,
                       work.fetcher);
  for (; C > 1 && d < work.width; d += 16)
    add_slice<M, R, 1>(probs, work.slice + d * M::kDepth, first, end, work.at + d, out,
                       work.fetcher);
}

// Up to sixteen rows of a group.
template <typename M>
void add_group(const SliceWork<M>& work, const typename M::Factor* probs, int first, int end,
               int num_rows, const ValueRows& out) {
  for (int r = 0; r < num_rows;) {
    const int left = smaller(num_rows - r, kLatentValueRows);
    const int count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const ValueRows rows{out.rows + r, out.keep ? out.keep + r : nullptr, out.add + r};
    const typename M::Factor* p = probs + r * M::kDepth;
    switch (count) {
      case 1: add_columns<M, 1>(work, p, first, end, rows); break;
      case 2: add_columns<M, 2>(work, p, first, end, rows); break;
#if defined(__AVX2__) || defined(__aarch64__)
      case 4: add_columns<M, 4>(work, p, first, end, rows); break;
#endif
#if defined(__AVX512F__)
      case 8: add_columns<M, 8>(work, p, first, end, rows); break;
#endif
    }
    r += count;
  }
}

// M: the mode of multiplication. T: the stored type.
template <typename M, typename T>
struct LatentAttention {
  using Factor = typename M::Factor;

  const AttentionLayer& layer;
  const Step& step;
  const T* q;
  int64_t ldq;
  T* out;
  int64_t ldo;
  float* lse;

  Pool& pool;
  Tasks tasks;
  LatentPages<T> pages;
  RecordShape shape;
  Softmax softmax;
  int num_heads, head_dim, value_dim, num_steps;
  float* records;  // of split sequences

  LatentAttention(Pool& pool, const AttentionLayer& layer, const Step& step, const void* q,
                  int64_t ldq, void* out, int64_t ldo, float* lse)
      : layer(layer), step(step), q(static_cast<const T*>(q)), ldq(ldq), out(static_cast<T*>(out)),
        ldo(ldo), lse(lse), pool(pool), tasks(pool, layer, step, kLatentTasksPerThread),
        pages(layer), shape(layer.value_dim), softmax(layer), num_heads(layer.num_heads),
        head_dim(layer.head_dim), value_dim(layer.value_dim), num_steps(head_dim / M::kDepth) {
    records = static_cast<float*>(
        pool.shared(1, tasks.num_records * shape.size * int64_t(sizeof(float))));
  }

  // Threads take tasks in their order, so that the next tile is known.
  void run() {
    Shares shares(pool, kSharesSlot, tasks.num_tasks);
    const int64_t count = tasks.num_tasks;
    const int64_t most = pool.num_threads();
    pool.parallel(count < most ? count : most, [&](int64_t, int thread) {
      Worker worker{allocate(thread), {}, -1};
      shares.work(thread, [&](int64_t task) {
        for (int i = tasks.task_starts[task]; i < tasks.task_starts[task + 1]; ++i)
          attend_piece(i, worker);
      });
    });
    if (tasks.num_records) merge_all();
  }

  // Sixteen rows, with their data in the present tile.
  struct Group {
    SeenLanes seen;
    MergeFactors factors;
  };

  // The working data of a piece, in a thread's memory. G: groups of sixteen rows.
  struct Rows {
    int num_rows, num_groups;
    int packed;         // the segment that the queries belong to, or -1
    bool is_whole;
    Range* ranges;      // [16 G]
    float** records;    // [16 G]
    float* own_records;
    Factor* queries;    // [G][D / kDepth][16][kDepth]
    float* scores;      // [G][256][16]
    Factor* probs;      // [G][256 / kDepth][16][kDepth]
    Group* groups;      // [G]
    Factor* slice;      // [256 / kDepth][kSliceDims][kDepth]
    Factor* unit_room;  // [16][D]
    T* tile_room;       // [256][D]
  };

  // fetched: the piece whose first tile was prefetched into tiles[0]; or -1.
  struct Worker {
    Rows rows;
    LatentTile<T> tiles[2];
    int fetched;
  };

  Rows allocate(int thread) {
    const int64_t count = (tasks.most_rows + 15) / 16, rows = 16 * count, D = head_dim;
    const int64_t tile = kTileTokens;
    const int64_t num_bytes =
        rows * (sizeof(Range) + sizeof(float*) + shape.size * sizeof(float) + D * sizeof(Factor) +
                tile * (sizeof(float) + sizeof(Factor))) + count * sizeof(Group) +
        (tile * kSliceDims<M> + 16 * D) * sizeof(Factor) + tile * D * sizeof(T) + 1024;
    char* at = static_cast<char*>(pool.scratch(thread, num_bytes));
    Rows all{};
    all.packed = -1;
    all.ranges = take<Range>(at, rows);
    all.records = take<float*>(at, rows);
    all.own_records = take<float>(at, rows * shape.size);
    all.queries = take<Factor>(at, rows * D);
    all.scores = take<float>(at, rows * tile);
    all.probs = take<Factor>(at, rows * tile);
    all.groups = take<Group>(at, count);
    all.slice = take<Factor>(at, tile * kSliceDims<M>);
    all.unit_room = take<Factor>(at, 16 * D);
    all.tile_room = take<T>(at, tile * D);
    return all;
  }

  // While a tile is computed, the next one is fetched, even if it belongs to the following piece.
  void attend_piece(int index, Worker& worker) {
    const Piece& piece = tasks.pieces[index];
    auto& [rows, tiles, fetched] = worker;
    if (fetched != index) {
      find_tile(piece, piece.first_tile, tiles[0]);
      tiles[0].fetcher(pages).fetch_all();
    }
    set_rows(piece, rows);
    const bool is_last = index + 1 == tasks.num_pieces;
    for (int number = piece.first_tile; number < piece.end_tile; ++number) {
      const bool is_end = number + 1 == piece.end_tile;
      const Piece& then = tasks.pieces[is_end && !is_last ? index + 1 : index];
      if (!is_end || !is_last) find_tile(then, is_end ? then.first_tile : number + 1, tiles[1]);
      attend(rows, tiles[0], is_end && is_last ? nullptr : &tiles[1]);
      std::swap(tiles[0], tiles[1]);
    }
    fetched = is_last ? -1 : index + 1;
    const Segment& segment = tasks.segments[piece.segment];
    for (int row = 0; segment.is_whole && row < rows.num_rows; ++row)
      finish_row(segment.first_token + row / num_heads, row % num_heads, rows.records[row]);
  }

  void find_tile(const Piece& piece, int index, LatentTile<T>& tile) const {
    const KVGroupStep& group = step.groups[layer.group];
    const Segment& segment = tasks.segments[piece.segment];
    const int32_t* blocks = group.block_tables + step.rows[segment.sequence] * group.table_stride;
    tile.find(pages, blocks, index, tasks.range(segment));
  }

  void set_rows(const Piece& piece, Rows& rows) const {
    const Segment& segment = tasks.segments[piece.segment];
    const int num_tokens = segment.num_tokens + segment.num_run;
    rows.num_rows = num_tokens * num_heads;
    rows.num_groups = (rows.num_rows + 15) / 16;
    rows.is_whole = segment.is_whole;
    for (int i = 0; i < num_tokens; ++i) {
      if (segment.run) set_token(rows, i, segment.run[i], step.query_start[segment.run[i]], piece);
      else set_token(rows, i, segment.sequence, segment.first_token + i, piece);
    }
    const int num_lanes = 16 * rows.num_groups;
    for (int row = rows.num_rows; row < num_lanes && rows.packed != piece.segment; ++row)
      pack(rows, row, nullptr);
    rows.packed = piece.segment;
  }

  // Token `index` of a piece: `token` of the step, of sequence s.
  void set_token(Rows& rows, int index, int s, int token, const Piece& piece) const {
    const Range range = tasks.range(s, token);
    for (int head = 0; head < num_heads; ++head) {
      const int row = index * num_heads + head;
      rows.ranges[row] = range;
      rows.records[row] = rows.own_records + int64_t(row) * shape.size;
      if (rows.is_whole) shape.clear(rows.records[row]);
      else rows.records[row] = record(s, token, piece.first_tile, head);
      if (rows.packed != piece.segment) pack(rows, row, q + token * ldq + int64_t(head) * head_dim);
    }
  }

  // query: null: zeros.
  void pack(Rows& rows, int row, const T* query) const {
    Factor* to = rows.queries + int64_t(row / 16) * 16 * head_dim + row % 16 * M::kDepth;
    for (int d = 0; d < head_dim; d += M::kDepth, to += 16 * M::kDepth) {
      if (!query)
        std::memset(to, 0, M::kDepth * sizeof(Factor));
      else if constexpr (sizeof(T) == sizeof(Factor))
        std::memcpy(to, query + d, M::kDepth * sizeof(T));
      else
        *to = to_float(query[d]);
    }
  }

  // The record of one tile of a split sequence.
  float* record(int s, int token, int tile, int head) const {
    const SequenceTiles& tiles = tasks.sequences[s];
    const int64_t place =
        int64_t(token - step.query_start[s]) * (tiles.end_tile - tiles.first_tile) + tile -
        tiles.first_tile;
    return records + (tiles.first_record + place * num_heads + head) * shape.size;
  }

  // next: the tile to fetch meanwhile, or null.
  void attend(Rows& rows, LatentTile<T>& tile, const LatentTile<T>* next) const {
    tile.resolve(pages, rows.tile_room);
    bool is_seen = false;
    for (int g = 0; g < rows.num_groups; ++g) {
      SeenLanes& seen = rows.groups[g].seen;
      seen = SeenLanes::of(rows.ranges + 16 * g, rows_of(rows, g), tile.position);
      is_seen |= !seen.is_empty();
    }
    Fetcher fetcher = next ? next->fetcher(pages) : Fetcher{};
    const int64_t num_lines = fetcher.num_lines();
    if (is_seen) score(rows, tile, fetcher, num_lines * head_dim / (head_dim + value_dim));
    for (int g = 0; g < rows.num_groups; ++g) find_probs_of(rows, g);
    if (is_seen) add(rows, tile, fetcher, num_lines * value_dim / (head_dim + value_dim));
    for (int row = 0; !rows.is_whole && row < rows.num_rows; ++row)
      rows.records[row] += int64_t(num_heads) * shape.size;
  }

  static int rows_of(const Rows& rows, int g) { return smaller(rows.num_rows - 16 * g, 16); }

  void score(Rows& rows, const LatentTile<T>& tile, Fetcher& fetcher, int64_t num_lines) const {
    const int num_units = tile.end_unit - tile.first_unit;
    const int64_t calls = int64_t(num_units) * (16 / kLatentTokens) * rows.num_groups;
    fetcher.spread(num_lines, calls * num_steps);
    for (int u = tile.first_unit; u < tile.end_unit; ++u) {
      const Factor* vectors = unit_factors(tile.units[u], head_dim, rows.unit_room);
      for (int g = 0; g < rows.num_groups;) {
        const int count = smaller(rows.num_groups - g, kLatentGroups);
        bool is_seen = false;
        for (int i = g; i < g + count; ++i) {
          const SeenLanes& seen = rows.groups[i].seen;
          is_seen |= seen.begin < 16 * (u + 1) && seen.end > 16 * u;
        }
        if (is_seen) score_unit(rows, vectors, u, g, count, fetcher);
        g += count;
      }
    }
  }

  // `count` groups from g on.
  void score_unit(Rows& rows, const Factor* vectors, int u, int g, int count,
                  Fetcher& fetcher) const {
    const int64_t stride = int64_t(head_dim) * sizeof(Factor);
    const char* from = reinterpret_cast<const char*>(vectors);
    const Factor* queries = rows.queries + int64_t(g) * 16 * head_dim;
    float* to = rows.scores + (int64_t(g) * kTileTokens + 16 * u) * 16;
    const int at_once = count > 1 ? kLatentTokens / kLatentGroups : kLatentTokens;
    for (int t = 0; t < 16; t += at_once, from += at_once * stride, to += 16 * at_once) {
      if (count == 1)
        score_tokens<M, kLatentTokens, 1>(from, stride, queries, num_steps, to, fetcher);
      else
        score_tokens<M, kLatentTokens / kLatentGroups, kLatentGroups>(
            from, stride, queries, num_steps, to, fetcher);
    }
  }

  // Turns scores into probabilities, and updates the records except for their values.
  void find_probs_of(Rows& rows, int g) const {
    auto& [seen, factors] = rows.groups[g];
    float* const* records = rows.records + 16 * g;
    const int count = rows_of(rows, g);
    if (seen.is_empty()) {
      for (int r = 0; r < count && !rows.is_whole; ++r) shape.peak(records[r]) = kNever;
      return;
    }
    float* scores = rows.scores + int64_t(g) * kTileTokens * 16;
    const vf best = greatest_scores(scores, seen, softmax);
    const vf sums = find_row_probs<M>(scores, seen, best, softmax.factor,
                                      rows.probs + int64_t(g) * kTileTokens * 16);
    alignas(64) float old_peaks[16], new_peaks[16], totals[16], total[16] = {};
    for (int r = 0; r < 16; ++r) old_peaks[r] = r < count ? shape.peak(records[r]) : 0.0f;
    store(new_peaks, best);
    store(totals, sums);
    if (rows.is_whole) factors.find(old_peaks, new_peaks, softmax.factor);
    for (int r = 0; r < count; ++r) {
      total[0] = totals[r];
      float* lanes = shape.sums(records[r]);
      if (rows.is_whole) merge_lanes(lanes, total, 16, factors.keep[r], factors.add[r]);
      else store(lanes, load(total));
      shape.peak(records[r]) = rows.is_whole ? old_peaks[r] : new_peaks[r];
    }
  }

  void add(Rows& rows, const LatentTile<T>& tile, Fetcher& fetcher, int64_t num_lines) const {
    const int num_slices = (value_dim + kSliceDims<M> - 1) / kSliceDims<M>;
    const int64_t calls = int64_t(num_slices) * rows.num_groups * (16 / kLatentValueRows) *
                          (kSliceDims<M> / (16 * columns<kLatentValueRows>()));
    fetcher.spread(num_lines, calls * 16 * (tile.end_unit - tile.first_unit) / M::kDepth);
    for (int at = 0; at < value_dim; at += kSliceDims<M>) {
      const int count = smaller(value_dim - at, kSliceDims<M>);
      for (int u = tile.first_unit; u < tile.end_unit; ++u)
        fill_slice(M{}, tile.units[u], head_dim, at, count, rows.slice + 16 * u * kSliceDims<M>);
      const SliceWork<M> work{rows.slice, at, (count + 15) / 16 * 16, fetcher};
      for (int g = 0; g < rows.num_groups; ++g) {
        const auto& [seen, factors] = rows.groups[g];
        if (seen.is_empty()) continue;
        const float* keep = rows.is_whole ? factors.keep : nullptr;
        add_group<M>(work, rows.probs + int64_t(g) * kTileTokens * 16, seen.begin / M::kDepth,
                     (seen.end + M::kDepth - 1) / M::kDepth, rows_of(rows, g),
                     {rows.records + 16 * g, keep, factors.add});
      }
    }
  }

  // Merges the tiles of a split sequence's row, in ascending order, from records of their own.
  void merge(int s, int token, int head, float* merged) const {
    const SequenceTiles& tiles = tasks.sequences[s];
    shape.clear(merged);
    for (int tile = tiles.first_tile; tile < tiles.end_tile; ++tile)
      merge_record(merged, record(s, token, tile, head), softmax.factor, shape);
    finish_row(token, head, merged);
  }

  // All rows of split sequences, by threads: there may be many heads and many tiles.
  void merge_all() {
    const int64_t num_items = int64_t(step.num_sequences) * num_heads;
    share(pool, kSharesSlot, num_items, [this](int64_t item, int thread) {
      const int s = int(item / num_heads);
      if (!tasks.sequences[s].is_split) return;
      auto* merged = static_cast<float*>(pool.scratch(thread, shape.size * int64_t(sizeof(float))));
      for (int token = step.query_start[s]; token < step.query_start[s + 1]; ++token)
        merge(s, token, int(item % num_heads), merged);
    });
  }

  void finish_row(int token, int head, float* record) const {
    finish(record, shape, softmax, layer.sinks ? layer.sinks + head : nullptr, value_dim,
           out + token * ldo + int64_t(head) * value_dim,
           lse ? lse + int64_t(token) * num_heads + head : nullptr);
  }
};

template <typename T>
void write_all(Pool& pool, const AttentionLayer& layer, const Step& step, const T* k, int64_t ld) {
  const LatentPages<T> pages(layer);
  const int64_t* slots = step.groups[layer.group].slot_mapping;
  const int64_t num_tokens = step.num_tokens;
  pool.parallel((num_tokens + kTokensPerWrite - 1) / kTokensPerWrite, [&](int64_t task, int) {
    const int64_t first = task * kTokensPerWrite, left = num_tokens - first;
    for (int64_t t = first; t < first + (left < kTokensPerWrite ? left : kTokensPerWrite); ++t)
      std::memcpy(pages.token_of_slot(slots[t]), k + t * ld, layer.head_dim * sizeof(T));
  });
}

}  // namespace

void latent_attention(Pool& pool, const AttentionLayer& layer, const Step& step, const void* q,
                      int64_t ldq, void* out, int64_t ldo, float* lse) {
#if defined(__AVX512BF16__)
  using BF16 = DotMode;
#else
  using BF16 = FullMode;
#endif
  if (layer.dtype == kBF16)
    LatentAttention<BF16, uint16_t>(pool, layer, step, q, ldq, out, ldo, lse).run();
  else
    LatentAttention<FullMode, float>(pool, layer, step, q, ldq, out, ldo, lse).run();
}

void write_latents(Pool& pool, const AttentionLayer& layer, const Step& step, const void* k,
                   int64_t ld) {
  if (layer.dtype == kBF16) write_all(pool, layer, step, static_cast<const uint16_t*>(k), ld);
  else write_all(pool, layer, step, static_cast<const float*>(k), ld);
}

}  // namespace quire::QUIRE_ISA
