// The structures of adapters (LoRA) that cross the C ABI; mirrored in adapters/adapters_abi.py.
//
// A linear's slots hold resident adapters; each row of a step uses one of them, or none.
//
//   h = round(scale * (A x))               [C]: the inner columns of all parts of a linear
//   out = epilogue(round(W x + b) + B h)   B h of each part in fp32
//
// where round is to the model's dtype. Legend: T rows of the step, K inputs and N outputs of the
// linear, r rank, C columns: the ranks of its parts together, each made even in bf16.
#pragma once
#include <cstdint>

namespace quire {

// Rows of a step that use the same slot: order[first] .. order[first + count - 1].
struct AdapterGroup {
  int32_t slot;
  int32_t first;
  int32_t count;
  int32_t reserved;
};

// What all linears are told of a step.
struct AdapterRows {
  int32_t num_tokens;  // T
  int32_t num_groups;
  int32_t num_rows;  // that use a slot
  int32_t reserved;
  const int32_t* slots;         // [T] the slot of each row, -1: none
  const int32_t* order;         // [num_rows] rows by slot, ascending within one
  const AdapterGroup* groups;   // [num_groups]
};

// What a slot adds to one part of a linear. Units of 16 outputs are those of the packing
// (linear.h): in an interleaved linear unit i of a part is in panel i; else a part has the units
// that it has outputs in, and zeros for those of other parts.
struct AdapterPart {
  int32_t rank;    // 0: nothing
  int32_t column;  // of the first of its inner columns
  const void* b;   // [units][r/2][16][2] bf16, or [units][r][16] fp32, padded with zeros
};

struct AdapterSlot {
  int32_t num_columns;  // C; 0: the slot adds nothing here
  int32_t reserved;
  const void* a;         // [C/16][K/2][16][2] bf16, or [C/16][K][16] fp32, padded with zeros
  const float* scales;   // [C]
  const AdapterPart* parts;
};

struct AdapterLinear {
  int32_t num_parts;
  int32_t max_columns;  // of any slot, in whole units of 16
  const int32_t* starts;  // [num_parts + 1] first output of each part, then N
  const AdapterRows* rows;
  const AdapterSlot* slots;
  const AdapterLinear* next;  // that follows in a step, as a rule, or null
  int32_t num_inputs;  // K
  int32_t reserved;
};

}  // namespace quire
