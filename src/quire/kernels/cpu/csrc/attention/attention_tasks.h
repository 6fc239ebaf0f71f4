// Divides a layer's attention into tasks for the threads.
//
// Nothing here can change a result: a row's tiles are merged in ascending order by the thread that
// finishes the last of them.
//
//   wide      a chunk of many queries: blocks of its tokens, each over all tiles that they see
//   narrow    few queries (decoding: one): its tiles are cut into ranges where there are many
//   run       narrow sequences that read the same tiles: these are read once for all of them
#pragma once
#include "attention/attention_rows.h"
#include "threads/pool.h"

namespace quire::QUIRE_ISA {

constexpr int kNarrowRows = 16;
constexpr int kBlockRows = 96;  // of queries that a tile is read for; more leave the L2 cache

// The costs of tasks. The unit is sixteen keys times one row; reading the keys costs kReadCost
// (sixteen keys of 64 dimensions in bf16: 0.02 us a row, 4 KiB at 24 GB/s; Zen 4).
constexpr int64_t kReadCost = 8;
constexpr int64_t kLeastTaskCost = 256;
constexpr int kTasksPerThread = 16;

// Queries of a sequence, or of a run of them, against tiles [first_tile, end_tile).
struct Segment {
  int32_t sequence;  // whose block table is read
  int32_t first_token, num_tokens;  // of the step; of a run: 0, 0
  const int32_t* run;               // the run's sequences, or null
  int32_t num_run;
  int32_t first_tile, end_tile;
  bool is_whole;  // all tiles that its rows see
  int64_t cost;   // of one KV head
};

// A task: one KV head of a segment, tiles [first_tile, end_tile).
struct Piece {
  int32_t segment, head, first_tile, end_tile;
};

// The tiles of a sequence.
struct SequenceTiles {
  int32_t first_tile, end_tile;    // that its queries see
  int32_t first_shared, end_shared;  // tiles that runs read; empty where equal
  bool is_narrow, is_split;
  int64_t first_record;  // is_split: of [tokens][tiles][Hq]
};

class Tasks {
 public:
  // tasks_per_thread: about this many tasks of narrow segments. With fewer, sequences are split.
  Tasks(Pool& pool, const AttentionLayer& layer, const Step& step,
        int tasks_per_thread = kTasksPerThread)
      : layer_(layer), step_(step), group_size_(layer.num_heads / layer.num_kv_heads),
        tasks_per_thread_(tasks_per_thread) {
    block_tokens_ = larger(1, kBlockRows / group_size_);
    allocate(pool);
    for (int s = 0; s < step.num_sequences; ++s) sequences[s] = tiles_of(s);
    for (int i = 0; i < step.num_shared_runs; ++i) mark_run(step.shared_runs[i]);
    for (int s = 0; s < step.num_sequences; ++s)
      if (!sequences[s].is_narrow) add_wide(s);
    const int num_wide = num_segments;
    for (int i = 0; i < step.num_shared_runs; ++i) add_run(step.shared_runs[i]);
    for (int s = 0; s < step.num_sequences; ++s)
      if (sequences[s].is_narrow) add_narrow(s);
    cut(num_wide, pool.num_threads());
  }

  SequenceTiles* sequences;
  Segment* segments;
  Piece* pieces;
  int32_t* task_starts;      // [num_tasks + 1] in pieces
  int32_t* tiles_left;       // [S, Hkv] of split sequences
  int num_segments = 0, num_pieces = 0, num_tasks = 0;
  int64_t num_records = 0;
  int most_rows = 0;  // of a piece

  int query_len(int s) const { return step_.query_start[s + 1] - step_.query_start[s]; }

  // The range of keys that the query of a token of sequence s sees.
  Range range(int s, int token) const {
    const int context = step_.context_lens[s];
    const int position = context - step_.query_start[s + 1] + token;
    const int window = layer_.window;
    Range seen{window ? larger(0, position - window + 1) : 0, context};
    if (layer_.causal)
      seen.high = layer_.sees_ahead && step_.visible_ends ? step_.visible_ends[token] : position + 1;
    else if (window) seen.high = smaller(context, position + window);
    return seen;
  }

  // The range of keys that any query of a segment sees.
  Range range(const Segment& segment) const {
    if (segment.run) return {segment.first_tile * kTileTokens, segment.end_tile * kTileTokens};
    const int last_token = segment.first_token + segment.num_tokens - 1;
    return {range(segment.sequence, segment.first_token).low,
            range(segment.sequence, last_token).high};
  }

 private:
  const AttentionLayer& layer_;
  const Step& step_;
  int group_size_, tasks_per_thread_, block_tokens_;
  int64_t narrow_cost_ = 0;

  int stack_size() const { return larger(1, kBlockRows / group_size_); }

  // Room for as many of everything as there can be.
  void allocate(Pool& pool) {
    int64_t most_segments = 2 * int64_t(step_.num_sequences);
    for (int s = 0; s < step_.num_sequences; ++s) most_segments += query_len(s) / block_tokens_;
    for (int i = 0; i < step_.num_shared_runs; ++i)
      most_segments += step_.shared_runs[i].num_sequences / stack_size() + 1;
    const int64_t heads = layer_.num_kv_heads, num_sequences = step_.num_sequences;
    const int64_t most_parts = most_segments + tasks_per_thread_ * pool.num_threads() + 1;
    const int64_t most_pieces = most_parts * heads;
    const int64_t num_bytes = num_sequences * sizeof(SequenceTiles) +
                              most_segments * sizeof(Segment) + most_pieces * sizeof(Piece) +
                              (most_pieces + 1 + num_sequences * heads) * sizeof(int32_t);
    char* at = static_cast<char*>(pool.shared(0, num_bytes));
    sequences = take<SequenceTiles>(at, num_sequences);
    segments = take<Segment>(at, most_segments);
    pieces = take<Piece>(at, most_pieces);
    task_starts = take<int32_t>(at, most_pieces + 1);
    tiles_left = take<int32_t>(at, num_sequences * heads);
  }

  template <typename T>
  static T* take(char*& at, int64_t count) {
    T* taken = reinterpret_cast<T*>(at);
    at += count * sizeof(T);
    return taken;
  }

  SequenceTiles tiles_of(int s) const {
    const int low = range(s, step_.query_start[s]).low;
    const int high = range(s, step_.query_start[s + 1] - 1).high;
    const int first = low / kTileTokens, end = (high + kTileTokens - 1) / kTileTokens;
    const int num_queries = query_len(s);
    const bool is_narrow = num_queries == 1 || num_queries * group_size_ <= kNarrowRows;
    return {first, end, first, first, is_narrow, false, 0};
  }

  // The first of a run's tiles that all of its sequences see completely; the end if there is none.
  // Nested runs still follow each other without a gap.
  int first_visible_tile(const SharedRun& run) const {
    if (run.group != layer_.group) return run.end_tile;
    int low = run.first_tile * kTileTokens;
    for (int i = 0; layer_.window && i < run.num_sequences; ++i)
      low = larger(low, range(run.sequences[i], step_.query_start[run.sequences[i]]).low);
    return smaller((low + kTileTokens - 1) / kTileTokens, run.end_tile);
  }

  void mark_run(const SharedRun& run) {
    const int first_tile = first_visible_tile(run);
    if (first_tile == run.end_tile) return;
    for (int i = 0; i < run.num_sequences; ++i) {
      SequenceTiles& tiles = sequences[run.sequences[i]];
      const bool is_first = !tiles.is_split;
      tiles.is_split = true;
      if (is_first || first_tile < tiles.first_shared) tiles.first_shared = first_tile;
      if (is_first || run.end_tile > tiles.end_shared) tiles.end_shared = run.end_tile;
    }
  }

  Segment& add_segment(int sequence, int first_tile, int end_tile) {
    Segment& segment = segments[num_segments++];
    segment = Segment{};
    segment.sequence = sequence;
    segment.first_tile = first_tile;
    segment.end_tile = end_tile;
    return segment;
  }

  // The last blocks come first, since they see the most keys.
  void add_wide(int s) {
    const int start = step_.query_start[s], end = step_.query_start[s + 1];
    for (int token = start + (end - start - 1) / block_tokens_ * block_tokens_; token >= start;
         token -= block_tokens_) {
      const int num_tokens = smaller(block_tokens_, end - token);
      const int low = range(s, token).low, high = range(s, token + num_tokens - 1).high;
      Segment& segment = add_segment(s, low / kTileTokens, (high + kTileTokens - 1) / kTileTokens);
      segment.first_token = token;
      segment.num_tokens = num_tokens;
      segment.is_whole = true;
    }
  }

  void add_run(const SharedRun& run) {
    const int first_tile = first_visible_tile(run);
    if (first_tile == run.end_tile) return;
    for (int i = 0; i < run.num_sequences; i += stack_size()) {
      Segment& segment = add_segment(run.sequences[i], first_tile, run.end_tile);
      segment.run = run.sequences + i;
      segment.num_run = smaller(stack_size(), run.num_sequences - i);
      set_cost(segment, segment.num_run, (run.end_tile - first_tile) * kTileTokens);
    }
  }

  void add_narrow(int s) {
    const SequenceTiles& tiles = sequences[s];
    if (tiles.first_tile < tiles.first_shared)
      add_part(s, tiles.first_tile, tiles.first_shared, false);
    const int first = tiles.is_split ? tiles.end_shared : tiles.first_tile;
    if (first < tiles.end_tile) add_part(s, first, tiles.end_tile, !tiles.is_split);
  }

  void add_part(int s, int first_tile, int end_tile, bool is_whole) {
    Segment& segment = add_segment(s, first_tile, end_tile);
    segment.first_token = step_.query_start[s];
    segment.num_tokens = query_len(s);
    segment.is_whole = is_whole;
    const Range seen = range(segment);
    set_cost(segment, segment.num_tokens, smaller(seen.high, end_tile * kTileTokens) -
                                              larger(seen.low, first_tile * kTileTokens));
  }

  void set_cost(Segment& segment, int num_tokens, int num_keys) {
    const int64_t num_rows = int64_t(num_tokens) * group_size_;
    segment.cost = (num_rows > kReadCost ? num_rows : kReadCost) * ((num_keys + 15) / 16);
    narrow_cost_ += segment.cost;
  }

  // Wide segments: a piece for each block and head. Narrow segments: tasks of about the same cost,
  // each a part of one segment or several whole segments.
  void cut(int num_wide, int num_threads) {
    for (int i = 0; i < num_wide; ++i)
      for (int head = 0; head < layer_.num_kv_heads; ++head) {
        task_starts[num_tasks++] = num_pieces;
        pieces[num_pieces++] = {i, head, segments[i].first_tile, segments[i].end_tile};
      }
    const int64_t wanted = narrow_cost_ * layer_.num_kv_heads / (tasks_per_thread_ * num_threads);
    const int64_t task_cost = wanted > kLeastTaskCost ? wanted : kLeastTaskCost;
    int64_t room = 0;
    for (int i = num_wide; i < num_segments; ++i) cut_narrow(i, task_cost, room);
    task_starts[num_tasks] = num_pieces;
    for (int i = 0; i < num_segments; ++i)
      most_rows = larger(most_rows, (segments[i].num_tokens + segments[i].num_run) * group_size_);
    count_tiles();
  }

  // room: the cost that the last task can still take.
  void cut_narrow(int index, int64_t task_cost, int64_t& room) {
    Segment& segment = segments[index];
    const int num_tiles = segment.end_tile - segment.first_tile;
    const int num_parts = smaller(num_tiles, int((segment.cost + task_cost - 1) / task_cost));
    if (num_parts > 1 && segment.is_whole) {
      segment.is_whole = false;
      sequences[segment.sequence].is_split = true;
    }
    for (int head = 0; head < layer_.num_kv_heads; ++head)
      for (int part = 0; part < num_parts; ++part) {
        if (room <= 0) {
          task_starts[num_tasks++] = num_pieces;
          room = task_cost;
        }
        room -= segment.cost / num_parts;
        pieces[num_pieces++] = {index, head, segment.first_tile + num_tiles * part / num_parts,
                                segment.first_tile + num_tiles * (part + 1) / num_parts};
      }
  }

  void count_tiles() {
    for (int s = 0; s < step_.num_sequences; ++s) {
      SequenceTiles& tiles = sequences[s];
      if (!tiles.is_split) continue;
      const int num_tiles = tiles.end_tile - tiles.first_tile;
      tiles.first_record = num_records;
      num_records += int64_t(query_len(s)) * num_tiles * layer_.num_heads;
      for (int head = 0; head < layer_.num_kv_heads; ++head)
        tiles_left[s * layer_.num_kv_heads + head] = num_tiles;
    }
  }
};

}  // namespace quire::QUIRE_ISA
