// Finds the states, and cuts a step into pieces for the recurrent kernels.
//
// States move token by token and each element in one fixed order of operations, so that no result
// depends on how a prompt was cut in chunks, on other sequences or on the number of threads. Units
// are independent of each other; a task is one piece and the units of one head.
#pragma once
#include <cstring>

#include "kernels_isa.h"
#include "library/state_abi.h"
#include "simd.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {

// Tokens that are prepared at once: their q and k of a head stay in the second cache.
constexpr int64_t kChunkTokens = 256;
constexpr int64_t kPreparedTokens = 4;  // by one task
// Registers that one pass works on, side by side: they share what is broadcast.
constexpr int kVectors = 2;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tokens [first, end) of one sequence. Those from `kept` on are drafts: the state is stored as it is
// before them.
struct Piece {
  int64_t first;
  int64_t kept;
  int64_t end;
  const int32_t* blocks;  // the row's line of the table
  bool is_fresh;          // the state before is zeros
};

// The place of a unit, the same for each row: an entry of the row's line, and an offset in bytes.
struct UnitPlace {
  int64_t entry;
  int64_t offset;

  float* of(const StateLayer& layer, const int32_t* blocks) const {
    return reinterpret_cast<float*>(layer.pages + blocks[entry] * layer.page_stride + offset);
  }
};

inline UnitPlace place_of(const StateLayer& layer, int64_t unit) {
  const auto place = uint32_t(layer.first_unit + unit), per_page = uint32_t(layer.units_per_page);
  return {place / per_page, place % per_page * layer.unit_bytes};
}

// The pieces of a step's tokens [first, end) in `pieces`; returns how many.
inline int64_t find_pieces(const StateLayer& layer, const StateStep& step, int64_t first,
                           int64_t end, Piece* pieces) {
  int64_t count = 0;
  const StateTable& table = step.tables[layer.group];
  for (int64_t s = 0; s < step.num_sequences; ++s) {
    const int64_t begin = step.query_start[s], stop = step.query_start[s + 1];
    const int64_t from = begin > first ? begin : first, to = smaller(stop, end);
    if (from >= to || step.context_lens[s] == 0) continue;
    const int64_t kept = smaller(to, step.num_drafts ? stop - step.num_drafts[s] : stop);
    pieces[count++] = {from, kept > from ? kept : from, to,
                       table.blocks + step.rows[s] * table.stride,
                       from == begin && step.context_lens[s] == stop - begin};
  }
  return count;
}

// The end of a chunk that begins with token `first`. It is not between two drafts of a sequence,
// because the state after the first of them would be lost.
inline int64_t chunk_end(const StateStep& step, int64_t first) {
  const int64_t end = smaller(step.query_start[step.num_sequences], first + kChunkTokens);
  if (step.num_drafts == nullptr) return end;
  for (int64_t s = 0; s < step.num_sequences; ++s) {
    const int64_t stop = step.query_start[s + 1], kept = stop - step.num_drafts[s];
    if (kept < end && end < stop) return kept > first ? kept : stop;
  }
  return end;
}

// The most tokens of a chunk.
inline int64_t longest_chunk(const StateStep& step) {
  int64_t longest = smaller(step.query_start[step.num_sequences], kChunkTokens);
  for (int64_t s = 0; step.num_drafts && s < step.num_sequences; ++s)
    if (step.num_drafts[s] > longest) longest = step.num_drafts[s];
  return longest;
}

template <typename T>
inline void widen_row(const T* x, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i));
  if (i < size) store_n(out + i, load_n(x + i, int(size - i)), int(size - i));
}

// The inputs of the heads from a chunk's tokens, in fp32.
struct Prepared {
  float* vectors;  // [groups][tokens][2][size]: q and k, or B and C
  float* gates;    // [heads][tokens][2]: decay, and beta or dt
  int64_t num_tokens;
  int64_t size;

  float* vectors_of(int64_t group, int64_t token) const {
    return vectors + (group * num_tokens + token) * 2 * size;
  }
  float* gates_of(int64_t head, int64_t token) const {
    return gates + (head * num_tokens + token) * 2;
  }
};

// A layer whose state is a matrix for each head, cut in units of 16 columns.
template <typename T>
struct Heads {
  int64_t num_heads;
  int64_t num_groups;  // head h reads the vectors of group h * num_groups / num_heads
  int64_t size;        // rows of a unit
  int64_t columns;     // of a head
  const T* in;         // [tokens][heads][columns], in_stride elements from token to token
  int64_t in_stride;
  T* out;  // dense
};

// The tokens of a piece, for some columns of a head.
template <typename T>
struct HeadTokens {
  const float* vectors;  // [tokens][2][size]
  const float* gates;    // [tokens][2]
  int64_t num_tokens;
  int64_t size;
  const T* in;
  int64_t in_stride;
  T* out;
  int64_t out_stride;

  // `count` of the tokens, from token `from` on.
  HeadTokens part(int64_t from, int64_t count) const {
    return {vectors + from * 2 * size, gates + from * 2,       count,
            size,                      in + from * in_stride,  in_stride,
            out + from * out_stride,   out_stride};
  }
};

// Columns that are moved side by side, [size][16] for each register, and the place of the next
// columns. In decoding a unit is read from memory and moved once, so the next one is fetched
// meanwhile.
template <int V>
struct Columns {
  float* s[V];
  const float* next[V];

  void fetch_next(int64_t row) const {
    for (int v = 0; v < V; ++v)
      if (v * kPartLanes % kLanes == 0) __builtin_prefetch(next[v] + row * kLanes);
  }

  // The same columns, of `size` rows, in other memory: kVectors * kLanes * size floats.
  Columns copied(int64_t size, float* to) const {
    Columns copy = *this;
    for (int v = 0; v < V; ++v) {
      copy.s[v] = to + v * kPartLanes / kLanes * size * kLanes + v * kPartLanes % kLanes;
      for (int64_t i = 0; i < size; ++i)
        store(copy.s[v] + i * kLanes, load_part(s[v] + i * kLanes));
    }
    return copy;
  }
};

// All units of the pieces, in the order in which they are moved.
struct UnitOrder {
  const StateLayer& layer;
  const Piece* pieces;
  int64_t count;  // of units

  // A column of a unit or of a later one. Columns after the last unit are found in that unit.
  float* at(int64_t unit, int64_t column) const {
    const int64_t index = smaller(unit + column / kLanes, count - 1);
    const auto from = uint32_t(index), per_piece = uint32_t(layer.num_units);
    return place_of(layer, from % per_piece).of(layer, pieces[from / per_piece].blocks) +
           column % kLanes;
  }
};

// V registers' worth of a head's columns from `column` on, through the tokens of a piece; the
// head's first unit is `unit`. Drafts change a copy, for which scratch() has the memory.
template <int V, typename T, typename Move, typename Scratch>
inline void move_columns(const UnitOrder& order, int64_t unit, int64_t column, const Piece& piece,
                         HeadTokens<T> tokens, Move&& move, Scratch&& scratch) {
  Columns<V> columns;
  for (int v = 0; v < V; ++v) {
    columns.s[v] = order.at(unit, column + v * kPartLanes);
    columns.next[v] = order.at(unit, column + (V + v) * kPartLanes);
    if (piece.is_fresh)
      for (int64_t i = 0; i < tokens.size; ++i) store(columns.s[v] + i * kLanes, part{});
  }
  tokens.in += column;
  tokens.out += column;
  if (piece.kept == piece.end) return move(columns, tokens);
  const int64_t num_kept = piece.kept - piece.first;
  if (num_kept > 0) move(columns, tokens.part(0, num_kept));
  move(columns.copied(tokens.size, scratch()), tokens.part(num_kept, piece.end - piece.kept));
}

// Moves all states of a layer through a step. prepare(token, row, prepared): into line `row`;
// move(columns, tokens, head): some columns of that head.
template <typename T, typename Prepare, typename Move>
void move_states(Pool& pool, const StateLayer& layer, const StateStep& step, const Heads<T>& heads,
                 Prepare&& prepare, Move&& move) {
  const int64_t num_tokens = step.query_start[step.num_sequences];
  const int64_t longest = longest_chunk(step), num_heads = heads.num_heads;
  auto* pieces = static_cast<Piece*>(pool.shared(0, longest * sizeof(Piece)));
  const int64_t vectors_size = longest * heads.num_groups * 2 * heads.size;
  const int64_t gates_size = longest * num_heads * 2;
  auto* memory = static_cast<float*>(pool.shared(1, (vectors_size + gates_size) * sizeof(float)));
  const int64_t num_units = heads.columns / kLanes, out_stride = num_heads * heads.columns;
  for (int64_t first = 0, end; first < num_tokens; first = end) {
    end = chunk_end(step, first);
    const Prepared prepared{memory, memory + vectors_size, end - first, heads.size};
    pool.parallel((end - first + kPreparedTokens - 1) / kPreparedTokens, [&](int64_t task, int) {
      const int64_t from = first + task * kPreparedTokens;
      for (int64_t t = from; t < smaller(end, from + kPreparedTokens); ++t)
        prepare(t, t - first, prepared);
    });
    const int64_t num_pieces = find_pieces(layer, step, first, end, pieces);
    const UnitOrder order{layer, pieces, num_pieces * layer.num_units};
    share(pool, 2, num_pieces * num_heads, [&](int64_t item, int thread) {
      const Piece& piece = pieces[item / num_heads];
      const int64_t h = item % num_heads, column = h * heads.columns;
      const int64_t group = h * heads.num_groups / num_heads, row = piece.first - first;
      const HeadTokens<T> tokens{prepared.vectors_of(group, row), prepared.gates_of(h, row),
                                 piece.end - piece.first,         heads.size,
                                 heads.in + piece.first * heads.in_stride + column,
                                 heads.in_stride,
                                 heads.out + piece.first * out_stride + column, out_stride};
      const auto run = [&](const auto& columns, const HeadTokens<T>& part) {
        move(columns, part, h);
      };
      const auto scratch = [&] {
        const int64_t size = kVectors * kLanes * heads.size;
        return static_cast<float*>(pool.scratch(thread, size * int64_t(sizeof(float))));
      };
      int64_t at = 0;
      // In decoding nothing is gained by sharing broadcasts, and two units at once are read up to
      // 12% slower than one after the other (Zen 5).
      const int64_t strip = kVectors * kPartLanes;
      const bool is_paired = tokens.num_tokens > 1 || strip <= kLanes;
      for (; is_paired && at + strip <= heads.columns; at += strip)
        move_columns<kVectors>(order, item * num_units, at, piece, tokens, run, scratch);
      for (; at < heads.columns; at += kPartLanes)
        move_columns<1>(order, item * num_units, at, piece, tokens, run, scratch);
    });
  }
}

}  // namespace quire::QUIRE_ISA
