// A forward pass as a list of operations.
//
// Python writes the list once, and C++ runs it at each step: one call from Python, however many
// layers.
#pragma once
#include "library/kernels.h"
#include "library/state_abi.h"

namespace quire {

enum OpKind : int32_t {
  kOpEmbed = 0,
  kOpRmsNorm = 1,
  kOpLinear = 2,
  kOpRotateAndWriteKV = 3,  // in, second, third: heads of q, k, v; out: of q
  kOpAttention = 4,
  kOpOffsetRmsNorm = 5,  // weight + factor multiplies before the result is rounded
  kOpScale = 6,          // out = factor * in, or where second is not null second + factor * in
  kOpGated = 7,          // out = act(gate) * up, gate and up side by side in a row of in
  kOpActivate = 8,       // out = act(in)
  kOpGate = 9,           // out = in * act(second)
  kOpSoftCap = 10,       // out = factor * tanh(in / factor)
  kOpLayerNorm = 11,
  kOpRoute = 12,          // in: logits; out: rows of RoutingWord
  kOpExperts = 13,        // second: rows of RoutingWord
  kOpLinearsByHead = 14,  // a linear for each head
  kOpJoinTurned = 15,     // out = [in, second turned by the token's position]
  kOpWriteLatent = 16,    // in: the vectors of a latent layer
  kOpGatedDelta = 17,     // in: q; second, third: g and beta, fp32 dense
  kOpMamba2 = 18,         // in: x; second: dt, fp32 dense
  kOpShortConv = 19,
  kOpDeltaDecay = 20,    // out, fp32 = weight * softplus(in + bias)
  kOpDeltaStep = 21,     // out, fp32 = sigmoid(in), rounded to in's dtype
  kOpWiden = 22,         // out, fp32 = in
  kOpGatedRmsNorm = 23,  // out = norm(in) * silu(second), or with gates_first norm(in * silu(second))
  kOpScaleColumns = 24,  // out = in * weight
};

// Functions of single elements.
enum ActivationKind : int32_t {
  kActSilu = 0,
  kActGelu = 1,
  kActGeluTanh = 2,
  kActRelu = 3,
  kActReluSquared = 4,
  kActSigmoid = 5,
  kActIdentity = 6,
};

// The call by which an operation updates the states of a recurrent layer.
struct StateCall {
  const StateLayer* layer;
  const StateStep* step;
  const void* call;       // GatedDelta, Mamba2 or ShortConv, without what the operation's operands say
  int64_t second_offset;  // elements from in to k, or to b
  int64_t third_offset;   // elements from in to v, or to c
};

// Fields that an operation does not use are 0. Strides count elements. A token has num_heads rows
// of each operand, head_stride apart, in most operations one.
struct Op {
  int32_t kind;
  int32_t dtype;      // DType of in, second and third
  int32_t out_dtype;  // DType of out: kOpLinear may store fp32 where dtype is bf16
  int32_t epilogue;   // kOpLinear
  int32_t activation;  // kOpGated, kOpActivate, kOpGate
  int32_t by_position;  // kOpEmbed: 1: the tokens' positions are looked up, 0: their ids
  int32_t num_heads;  // 1 or more, but for kOpEmbed, kOpLinear and kOpAttention
  float eps;          // kOpRmsNorm, kOpOffsetRmsNorm, kOpLayerNorm
  float factor;       // kOpOffsetRmsNorm, kOpScale, kOpSoftCap; kOpGated: multiplies in the sigmoid
  float limit;        // kOpGated: bounds gate above, and up on both sides; 0: nothing does
  float up_offset;    // kOpGated: added to up
  int32_t gates_first;  // kOpGatedRmsNorm
  int64_t size;  // elements of a row of out, but for kOpLinear and attention
  int64_t second_size;  // kOpGate: elements of a row of second, size or 1; kOpJoinTurned: those of
                        // second; kOpGatedRmsNorm: from a head's weight to the next, size or 0
  int64_t in_stride;
  int64_t in_head_stride;
  int64_t second_stride;
  int64_t second_head_stride;
  int64_t third_stride;
  int64_t third_head_stride;
  int64_t out_stride;
  int64_t out_head_stride;
  const void* in;
  const void* second;
  const void* third;
  void* out;
  const void* weight;  // embedding table or norm weight; null: a norm without
  const void* bias;    // kOpLayerNorm: [size], or null
  const Weights* linear;  // also of an embedding that shares a packed head
  const AttentionLayer* layer;
  const Rotary* rotary;  // null: nothing is normed or turned
  const void* experts;   // RouterLayer, ExpertsLayer or LinearsByHead, as the kind says
  const StateCall* states;
  const AdapterLinear* adapter;  // kOpLinear; or null
};

// Runs one of the operations of layers with states or latents.
void run_state_op(const Kernels&, Pool&, const Op&, const Step&);

void run_program(const Kernels&, Pool&, const Op* ops, int64_t num_ops, const Step&);

}  // namespace quire
