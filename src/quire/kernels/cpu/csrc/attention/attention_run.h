// Attention of a step: tasks, threads, and the rows that each piece computes; see attention.cpp.
//
// M says how elements are stored and multiplied (attention_kernels.h, quantized/quantized_rows.h).
#pragma once
#include "attention/attention_tasks.h"

namespace quire::QUIRE_ISA {

// A thread's memory, one part after the other, each aligned to 64 bytes.
class Arena {
 public:
  explicit Arena(void* memory) : at_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }

 private:
  char* at_;
};

template <typename M>
struct Attention {
  using Element = typename M::Element;
  using Stored = typename M::Stored;
  using Factor = typename M::Factor;

  const AttentionLayer& layer;
  const Step& step;
  const Element* q;
  int64_t ldq;
  Element* out;
  int64_t ldo;
  float* lse;

  Pool& pool;
  Tasks tasks;
  KVPages<Stored> kv;
  RecordShape shape;
  Softmax softmax;
  int group_size;
  float* records;  // of split sequences

  Attention(Pool& pool, const AttentionLayer& layer, const Step& step, const void* q, int64_t ldq,
            void* out, int64_t ldo, float* lse)
      : layer(layer), step(step), q(static_cast<const Element*>(q)), ldq(ldq),
        out(static_cast<Element*>(out)), ldo(ldo), lse(lse), pool(pool),
        tasks(pool, layer, step), kv(layer), shape(layer.head_dim), softmax(layer),
        group_size(layer.num_heads / layer.num_kv_heads) {
    records = static_cast<float*>(
        pool.shared(1, tasks.num_records * shape.size * int64_t(sizeof(float))));
  }

  void run() {
    pool.parallel(tasks.num_tasks, [this](int64_t task, int thread) {
      run_task(tasks.task_starts[task], tasks.task_starts[task + 1], thread);
    });
  }

  // The working data of a piece, in a thread's memory.
  struct Rows {
    int num_rows;
    Factor* queries;
    typename M::QueryScale* query_scales;
    Range* ranges;
    float** records;
    float* own_records;  // of all tiles where the segment is whole
  };

  // Pieces [first, end) one after the other. The next tile is always found in advance, even if it
  // belongs to another piece.
  void run_task(int first, int end, int thread) {
    const int64_t num_rows = tasks.most_rows, query_size = M::query_size(layer.head_dim);
    const int64_t edge_elements = Tile<Stored>::edge_elements(kv.unit, kv.head_dim);
    const int64_t num_bytes =
        num_rows * (query_size * sizeof(Factor) + sizeof(typename M::QueryScale) + sizeof(Range) +
                    sizeof(float*) + shape.size * sizeof(float)) +
        2 * edge_elements * sizeof(Stored) + 1024;
    Arena arena(pool.scratch(thread, num_bytes));
    Rows rows{0,
              arena.take<Factor>(num_rows * query_size),
              arena.take<typename M::QueryScale>(num_rows),
              arena.take<Range>(num_rows),
              arena.take<float*>(num_rows),
              arena.take<float>(num_rows * shape.size)};
    Tile<Stored> tiles[2];
    for (auto& tile : tiles) tile.edges = arena.take<Stored>(edge_elements);
    Tile<Stored>*tile = &tiles[0], *next = &tiles[1];
    find_tile(tasks.pieces[first], tasks.pieces[first].first_tile, *tile);
    for (int i = first; i < end; ++i) {
      const Piece& piece = tasks.pieces[i];
      set_rows(piece, rows);
      for (int index = piece.first_tile; index < piece.end_tile; ++index) {
        const bool is_last = index + 1 == piece.end_tile;
        const bool has_next = !is_last || i + 1 < end;
        if (!is_last) find_tile(piece, index + 1, *next);
        else if (has_next) find_tile(tasks.pieces[i + 1], tasks.pieces[i + 1].first_tile, *next);
        tile->look_ahead(has_next ? next : nullptr);
        attend(piece, rows, *tile);
        Tile<Stored>* done = tile;
        tile = next;
        next = done;
      }
      finish_piece(piece, rows);
    }
  }

  void find_tile(const Piece& piece, int index, Tile<Stored>& tile) const {
    const KVGroupStep& group = step.groups[layer.group];
    const Segment& segment = tasks.segments[piece.segment];
    const int32_t* blocks = group.block_tables + step.rows[segment.sequence] * group.table_stride;
    tile.find({kv, blocks, piece.head}, index, tasks.range(segment));
  }

  void set_rows(const Piece& piece, Rows& rows) const {
    const Segment& segment = tasks.segments[piece.segment];
    const int num_tokens = segment.num_tokens + segment.num_run;
    rows.num_rows = num_tokens * group_size;
    for (int i = 0; i < num_tokens; ++i) {
      if (segment.run) set_token(rows, i, segment.run[i], step.query_start[segment.run[i]], piece);
      else set_token(rows, i, segment.sequence, segment.first_token + i, piece);
    }
  }

  // Token `index` of a piece: `token` of the step, of sequence s.
  void set_token(Rows& rows, int index, int s, int token, const Piece& piece) const {
    const Range range = tasks.range(s, token);
    const bool is_whole = tasks.segments[piece.segment].is_whole;
    for (int g = 0; g < group_size; ++g) {
      const int row = index * group_size + g;
      rows.ranges[row] = range;
      rows.records[row] = rows.own_records + int64_t(row) * shape.size;
      if (is_whole) shape.clear(rows.records[row]);
      else rows.records[row] = record(s, token, piece.first_tile, piece.head, g);
      // The group of rows that are computed at once, see attend_tile.
      int first = 0, count = rows_at_once(rows.num_rows);
      while (row >= first + count) {
        first += count;
        count = rows_at_once(rows.num_rows - first);
      }
      const int64_t query_head = piece.head * group_size + g;
      const Element* query = q + token * ldq + query_head * layer.head_dim;
      rows.query_scales[row] = pack_query<M>(query, layer.head_dim, row - first, count,
                                             rows.queries + first * M::query_size(layer.head_dim));
    }
  }

  // The record of one tile of a split sequence.
  float* record(int s, int token, int tile, int head, int g) const {
    const SequenceTiles& tiles = tasks.sequences[s];
    const int64_t place =
        int64_t(token - step.query_start[s]) * (tiles.end_tile - tiles.first_tile) + tile -
        tiles.first_tile;
    const int64_t index = tiles.first_record + place * layer.num_heads + head * group_size + g;
    return records + index * shape.size;
  }

  void attend(const Piece& piece, Rows& rows, Tile<Stored>& tile) const {
    const bool is_whole = tasks.segments[piece.segment].is_whole;
    const RowBlock<M> block{rows.num_rows,    is_whole,    rows.queries,
                            rows.query_scales, rows.ranges, rows.records};
    RowScratch<M> scratch;
    attend_tile(block, tile, softmax, layer.head_dim, scratch);
    for (int row = 0; !is_whole && row < rows.num_rows; ++row)
      rows.records[row] += int64_t(layer.num_heads) * shape.size;
  }

  void finish_piece(const Piece& piece, const Rows& rows) {
    const Segment& segment = tasks.segments[piece.segment];
    for (int row = 0; segment.is_whole && row < rows.num_rows; ++row)
      finish_row(segment.first_token + row / group_size, piece.head, row % group_size,
                 rows.own_records + int64_t(row) * shape.size);
    if (segment.is_whole) return;
    for (int i = 0; i < segment.num_run; ++i) give_back(segment.run[i], piece, rows.own_records);
    if (!segment.run) give_back(segment.sequence, piece, rows.own_records);
  }

  // Called when a piece of a split sequence is done. The thread that finishes the last piece merges
  // the tiles, in memory for the records of one token.
  void give_back(int s, const Piece& piece, float* room) {
    int32_t* left = tasks.tiles_left + s * layer.num_kv_heads + piece.head;
    const int32_t count = piece.end_tile - piece.first_tile;
    if (__atomic_sub_fetch(left, count, __ATOMIC_ACQ_REL) > 0) return;
    const SequenceTiles& tiles = tasks.sequences[s];
    for (int token = step.query_start[s]; token < step.query_start[s + 1]; ++token)
      for (int g = 0; g < group_size; ++g) {
        float* merged = room + int64_t(g) * shape.size;
        shape.clear(merged);
        for (int tile = tiles.first_tile; tile < tiles.end_tile; ++tile)
          merge_record(merged, record(s, token, tile, piece.head, g), softmax.factor, shape);
        finish_row(token, piece.head, g, merged);
      }
  }

  void finish_row(int token, int head, int g, float* record) const {
    const int query_head = head * group_size + g, size = output_dim(layer);
    finish(record, shape, softmax, layer.sinks ? layer.sinks + query_head : nullptr, size,
           out + token * ldo + int64_t(query_head) * size,
           lse ? lse + int64_t(token) * layer.num_heads + query_head : nullptr);
  }
};

constexpr int64_t kTokensPerWrite = 16;

// Stores k, v [T, ld] of a step.
template <typename Stored, typename T>
void write_all(Pool& pool, const AttentionLayer& layer, const Step& step, const T* k, const T* v,
               int64_t ld) {
  const KVPages<Stored> kv(layer);
  const int64_t* slots = step.groups[layer.group].slot_mapping;
  const int64_t num_tokens = step.num_tokens;
  pool.parallel((num_tokens + kTokensPerWrite - 1) / kTokensPerWrite, [&](int64_t task, int) {
    const int64_t first = task * kTokensPerWrite, left = num_tokens - first;
    for (int64_t t = first; t < first + (left < kTokensPerWrite ? left : kTokensPerWrite); ++t)
      for (int head = 0; head < layer.num_kv_heads; ++head) {
        store_k(kv, slots[t], head, k + t * ld + int64_t(head) * layer.head_dim);
        store_v(kv, slots[t], head, v + t * ld + int64_t(head) * layer.head_dim);
      }
  });
}

}  // namespace quire::QUIRE_ISA
