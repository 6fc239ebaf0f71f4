// The structures of recurrent layers that cross the C ABI; mirrored field by field in state_abi.py.
//
// Legend: T tokens of the step, S sequences of the step, Hk key heads, Hv value heads, dk and dv
// their sizes, H heads of Mamba-2, P their size, N state size, G groups, C channels, W width.
// Strides of tensors are in elements from a token to the next; the elements of a token are dense.
#pragma once
#include <cstdint>

namespace quire {

// The places of one layer's states: unit u of a row is in entry (first_unit + u) / units_per_page
// of its line of the table, at byte ((first_unit + u) % units_per_page) * unit_bytes of that page.
struct StateLayer {
  int32_t group;  // index into StateStep::tables
  int32_t first_unit;
  int32_t units_per_page;
  int32_t num_units;
  int64_t unit_bytes;
  uint8_t* pages;
  int64_t page_stride;  // bytes
};

struct StateTable {
  const int32_t* blocks;  // [rows, stride]
  int64_t stride;         // in entries
};

// One step. A sequence whose context after the step is as long as its tokens in it begins with
// zeros, whatever its pages hold.
struct StateStep {
  int64_t num_sequences;
  const int32_t* query_start;   // [S + 1]
  const int32_t* context_lens;  // [S]
  const int64_t* rows;          // [S] rows of the tables
  // [S]: the number of drafts at the end of a sequence's tokens. No state is stored after a draft;
  // null: no drafts.
  const int32_t* num_drafts;
  const StateTable* tables;
};

struct GatedDelta {
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t normalizes;
  int32_t dtype;  // DType of q, k, v and out
  const void* q;  // [T, Hk, dk]
  const void* k;
  const void* v;      // [T, Hv, dv]
  const float* g;     // [T, Hv] dense
  const float* beta;  // [T, Hv] dense
  void* out;          // [T, Hv, dv] dense
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
};

struct Mamba2 {
  int32_t num_heads;
  int32_t head_dim;
  int32_t state_size;
  int32_t num_groups;
  int32_t dtype;  // DType of x, b, c and out
  float min_step;
  float max_step;
  int32_t reserved;
  const void* x;  // [T, H, P]
  const void* b;  // [T, G, N]
  const void* c;
  const float* dt;       // [T, H] dense, before bias and softplus
  const float* a;        // [H]
  const float* d;        // [H]; null: zeros
  const float* dt_bias;  // [H]; null: zeros
  void* out;             // [T, H, P] dense
  int64_t x_stride;
  int64_t b_stride;
  int64_t c_stride;
};

struct ShortConv {
  int32_t num_channels;
  int32_t width;
  int32_t has_silu;
  int32_t dtype;         // DType of x and out
  int32_t weight_dtype;  // of weight and bias
  int32_t reserved;
  const void* x;       // [T, C]
  const void* weight;  // [C, W] dense
  const void* bias;    // [C]; null: zeros
  void* out;           // [T, C] dense
  int64_t x_stride;
};

}  // namespace quire
