// Where states lie, and how a step is cut in pieces for the recurrent kernels.
//
// States move token by token and each element in one fixed order of operations, so that no result
// depends on how a prompt was cut in chunks, on other sequences or on the number of threads. Units
// are independent of each other; a task is one piece and the units of one head.
#pragma once
#include <cstring>

#include "kernels_isa.h"
#include "library/state_abi.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Tokens that are prepared at once: their q and k of a head stay in the second cache.
constexpr int64_t kChunkTokens = 256;
// Units that one pass works on: they share what is broadcast.
constexpr int kPairedUnits = kRegisterBytes == 64 ? 2 : 1;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tokens [first, end) of one sequence.
struct Piece {
  int64_t first;
  int64_t end;
  const int32_t* blocks;  // the row's line of the table
  bool is_fresh;          // the state before is zeros
};

inline float* unit_at(const StateLayer& layer, const int32_t* blocks, int64_t unit) {
  const int64_t place = layer.first_unit + unit;
  return reinterpret_cast<float*>(layer.pages +
                                  blocks[place / layer.units_per_page] * layer.page_stride +
                                  place % layer.units_per_page * layer.unit_bytes);
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
    pieces[count++] = {from, to, table.blocks + step.rows[s] * table.stride,
                       from == begin && step.context_lens[s] == stop - begin};
  }
  return count;
}

template <typename T>
inline void widen_row(const T* x, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i));
  if (i < size) store_n(out + i, load_n(x + i, int(size - i)), int(size - i));
}

// f(task, thread) for the tokens [first, end) in runs of so many.
template <typename F>
inline void for_tokens(Pool& pool, int64_t first, int64_t end, int64_t run, F&& f) {
  pool.parallel((end - first + run - 1) / run, [&](int64_t task, int) {
    const int64_t stop = smaller(end, first + (task + 1) * run);
    for (int64_t t = first + task * run; t < stop; ++t) f(t);
  });
}

}  // namespace quire::QUIRE_ISA
