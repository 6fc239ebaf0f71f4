// The structures that cross the C ABI.
//
// They are mirrored field by field in abi.py (a test compares the offsets).
//
// Legend: T tokens of the step, S sequences of the step, M rows of an activation, K inputs and N
// outputs of a linear, Hq query heads, Hkv KV heads, D head size, B block size.
#pragma once
#include <cstdint>

namespace quire {

enum DType : int32_t { kF32 = 0, kBF16 = 1 };

// K and V are stored in the model's dtype, or as codes with a scale for each token and head.
enum KVFormat : int32_t { kPlainKV = 0, kInt8KV = 1 };

enum WeightLayout : int32_t {
  kDenseF32 = 0,
  kDenseBF16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kBlockQuantized = 4,
  kFloat8 = 5,
};

// The operation on a linear's result before it is stored.
enum Epilogue : int32_t {
  kStore = 0,
  kAddResidual = 1,  // out = out + result: the residual stream is updated in place
  kSiluMul = 2,      // result holds gate and up, interleaved by the packing: out = silu(gate) * up
};

// The format of a checkpoint's block-quantized weights; block_quantized/layout.h has the formula.
struct CodeFormat {
  int32_t width;        // bits of a code: 4, 5, 6 or 8
  int32_t zero;         // what is subtracted from each code's value
  int32_t block;        // inputs that share factors: 256, or 0 where groups have 16-bit numbers
  int32_t has_bf16;     // these are bf16, else fp16
  int32_t has_zeros;    // groups have a zero each, instead of `zero`
  int32_t has_offsets;  // groups have an offset each
  int32_t row_dtype;    // DType of rows that are unpacked
  int32_t reserved;
  const int8_t* table;         // [16] values of codes of 4 bits, or null
  const int32_t* input_order;  // [K] the input of x that meets input k of ours; null: as they come
};

// Rows of a checkpoint's codes, [R, K], to be packed; G groups and B blocks of 256 a row.
struct CodeRows {
  const uint8_t* codes;
  const void* scales;       // [R, G] of 16 bits; int8 where there are factors; kFloat8: fp32
  const void* seconds;      // [R, G] zeros or offsets of 16 bits; uint8 offsets, or null
  const uint16_t* factors;  // [R, B, 2] fp16, of scales and of offsets, or null
};

// A linear's weights as the kernels read them; linear.h describes the layout.
struct Weights {
  int32_t format;       // WeightLayout
  int32_t num_outputs;  // N, as packed: gate and up together for kSiluMul
  int32_t num_inputs;   // K
  int32_t group_size;   // inputs that share a scale; kInt8: those of x, or 0; kFloat8: 0: all
  int32_t interleave;   // outputs of gate, then as many of up, alternate in the packing; 0: no
  int32_t num_wide;     // kInt4: inputs of eight bits, a multiple of 4; kBlockQuantized: those
                        // that are multiplied without being rounded; else 0
  const void* weights;
  const float* scales;   // kInt8: [N]; kInt4, kFloat8: as linear_int4.h and linear_float8.h say;
                         // kBlockQuantized: weights of the wide inputs, block_quantized/layout.h
  const int32_t* wide_inputs;  // [num_wide], in rising order; kBlockQuantized: of the packed inputs
  const float* bias;     // [N] in the packed order, or null
  // kBlockQuantized; kFloat8, and kInt8 with unpacked rows: row_dtype alone.
  const CodeFormat* code_format;
};

// One layer's attention: what it computes, and where its K and V lie.
struct AttentionLayer {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t dtype;   // DType of q, k, v and of the output, and of pages that are not quantized
  int32_t group;   // index of the layer's KV group in Step::groups
  int32_t window;  // keys that a query sees, itself included; 0: all before it
  int32_t causal;
  float scale;
  float soft_cap;  // 0: none
  const float* sinks;    // [Hq], or null
  uint8_t* pages;        // first byte of this layer's part of block 0
  int64_t page_stride;   // bytes from a block to the next
  int32_t value_dim;     // of a latent layer, whose V is a part of K; 0: V is stored
  int32_t kv_format;     // KVFormat of the pages
  int32_t v_head_dim;    // elements of a head of v and of the result, stored as D with zeros; 0: D
  int32_t sees_ahead;    // 1, in causal layers: keys end where Step::visible_ends says
};

inline int32_t output_dim(const AttentionLayer& layer) {
  return layer.v_head_dim != 0 ? layer.v_head_dim : layer.head_dim;
}

// The memory of one KV group in a step.
struct KVGroupStep {
  const int32_t* block_tables;  // [rows, table_stride]
  int64_t table_stride;         // in entries
  const int64_t* slot_mapping;  // [T] block * B + offset
};

// Decoding sequences whose tables name the same blocks in tiles [first_tile, end_tile).
struct SharedRun {
  int32_t group;
  int32_t num_sequences;
  int32_t first_tile;
  int32_t end_tile;
  const int32_t* sequences;  // [num_sequences] indices into the step's sequences
};

// One step. Decoding sequences, of one token each, come first.
struct Step {
  int32_t num_tokens;
  int32_t num_sequences;
  int32_t num_decodes;
  int32_t num_groups;
  int32_t num_shared_runs;
  int32_t reserved;
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T]
  const int32_t* query_start;   // [S + 1]
  const int32_t* context_lens;  // [S]
  const int64_t* rows;          // [S] rows of the block tables
  const KVGroupStep* groups;
  const SharedRun* shared_runs;
  const int32_t* visible_ends;  // [T], ascending in a sequence: positions after a query's last key
                                // in layers that see ahead; null: after its own token
};

// The rotation of q and k, and what precedes it.
struct Rotary {
  const float* table;    // [positions, R]: R/2 cosines, then R/2 sines; null where R is 0
  const void* q_norm;    // [D] in the model's dtype: each head of q is normalised first; or null
  const void* k_norm;    // the same for k
  float norm_eps;
  int32_t rotary_dim;    // R, even, at most D: the first elements of a head rotate, no others
  int32_t offsets_norm;  // 1: weight + norm_offset multiplies before the quotient is rounded
  float norm_offset;
};

// The options by which one line of logits becomes a token; see quire/sampling/choice.py.
struct SampleRow {
  uint64_t stream;    // seed and branch
  int64_t position;   // of the token to choose
  double top_p;       // 1: none
  int64_t top_k;      // 0: none
  float temperature;  // 0: the largest logit
  float log_min_p;    // -infinity: none
};

// A request for log-probabilities of one line of logits.
struct LogprobRow {
  int64_t line;
  int64_t token_id;
  int64_t num_top;
};

}  // namespace quire
