// A forward pass as a list of operations.
//
// Python writes the list once, and C++ runs it at each step: one call from Python, however many
// layers.
#pragma once
#include "library/kernels.h"

namespace quire {

enum OpKind : int32_t {
  kOpEmbed = 0,
  kOpRmsNorm = 1,
  kOpLinear = 2,
  kOpRotateAndWriteKV = 3,
  kOpAttention = 4,
  kOpOffsetRmsNorm = 5,  // weight + factor multiplies before the result is rounded
  kOpScale = 6,          // out = factor * in; with kAddResidual out = out + factor * in
  kOpGeluMul = 7,        // out = gelu(gate) * up, gate and up side by side in a row of in
};

// Fields that an operation does not use are 0. Strides count elements.
struct Op {
  int32_t kind;
  int32_t dtype;     // DType of in
  int32_t out_dtype; // DType of out: kOpLinear may store fp32 where dtype is bf16
  int32_t epilogue;  // kOpLinear, kOpScale
  float eps;         // kOpRmsNorm, kOpOffsetRmsNorm
  float factor;      // kOpOffsetRmsNorm, kOpScale
  int64_t size;      // elements of a row of out, but for kOpLinear and attention
  int64_t in_stride;
  int64_t out_stride;
  const void* in;
  void* out;
  const void* weight;            // embedding table or norm weight
  const Weights* linear;          // also of an embedding that shares a packed head
  const AttentionLayer* layer;
  const Rotary* rotary;
};

void run_program(const Kernels&, Pool&, const Op* ops, int64_t num_ops, const Step&);

}  // namespace quire
