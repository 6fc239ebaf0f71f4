// The table of kernels of one instruction set.
//
// Each file that implements some of them is compiled once per set, in a namespace of its own
// (QUIRE_ISA), and its functions are reached through this table alone. table.cpp fills it; api.cpp
// chooses among the tables by what the processor has.
//
// "T" below is the model's dtype, fp32 or bf16 (DType). Strides ("ld") count elements.
#pragma once
#include "library/abi.h"
#include "library/adapters_abi.h"
#include "library/experts_abi.h"
#include "library/state_abi.h"
#include "threads/pool.h"

namespace quire {

struct Op;

struct Kernels {
  const char* name;

  // linear.cpp: out[m, n] = epilogue(sum over k of x[m, k] w[n, k] + bias[n]).
  // x [M, ldx] in T; out [M, ldo] in out_dtype (T, or fp32 with kStore for logits). The adapter may
  // be null; else the M rows are the step's.
  void (*linear)(Pool&, const Weights&, DType, const void* x, int64_t ldx, int64_t M, void* out,
                 DType out_dtype, int64_t ldo, Epilogue, const AdapterLinear*);

  // rounding/: pack_rows of packing/pack.h for kInt8 and kInt4, by the calling thread. All
  // instruction sets store the same bytes.
  void (*round_int8)(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                     int64_t num_rows);
  void (*round_int4)(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                     int64_t num_rows);

  // rounding/compensate_int8.cpp: as round_int8, for rotated inputs whose blocks have 64 elements.
  // feedback: [K / 64][64][64], the share of each input's error that is subtracted from each later
  // input of its block.
  void (*compensate_int8)(const Weights&, const void* rows, DType rows_dtype, int64_t ld,
                          int64_t first, int64_t num_rows, const float* feedback);

  // attention.cpp: q [T, ldq] with Hq * D elements a token (rotated) -> out [T, ldo] with Hq *
  // output_dim(layer), in latent layers with Hq * value_dim. K and V of the step's tokens are in the
  // pages already. lse: [T, Hq] natural log-sum-exp, or null.
  void (*attention)(Pool&, const AttentionLayer&, const Step&, const void* q, int64_t ldq,
                    void* out, int64_t ldo, float* lse);
  // Stores k, v [T, ld] (Hkv * D elements a token) at the step's slots. v: null in latent layers.
  void (*write_kv)(Pool&, const AttentionLayer&, const Step&, const void* k, const void* v,
                   int64_t ld);

  // elementwise/rotary.cpp: normalises q and k per head where asked, rotates them, stores k and v.
  void (*rotate_and_write_kv)(Pool&, const Op&, const Step&);
  // elementwise/norms.cpp, scales.cpp: the operation over M tokens, as program.h says. out may be
  // in, or second.
  void (*rms_norm)(Pool&, const Op&, int64_t M);
  void (*layer_norm)(Pool&, const Op&, int64_t M);
  void (*scale)(Pool&, const Op&, int64_t M);
  // out [M, ldo] = table[indices], rows of `size` elements.
  void (*embed)(Pool&, DType, const void* table, const int64_t* indices, void* out, int64_t ldo,
                int64_t M, int64_t size);
  // elementwise/activations.cpp: out may be in where rows of both are equally long.
  void (*gated)(Pool&, const Op&, int64_t M);
  void (*activate)(Pool&, const Op&, int64_t M);
  void (*gate)(Pool&, const Op&, int64_t M);
  void (*soft_cap)(Pool&, const Op&, int64_t M);
  // elementwise/state_rows.cpp: likewise; out may be in, except in join_turned and if out is fp32.
  void (*join_turned)(Pool&, const Op&, const Step&);
  void (*gated_rms_norm)(Pool&, const Op&, int64_t M);
  void (*delta_decay)(Pool&, const Op&, int64_t M);
  void (*delta_step)(Pool&, const Op&, int64_t M);
  void (*widen)(Pool&, const Op&, int64_t M);
  void (*scale_columns)(Pool&, const Op&, int64_t M);

  // sample.cpp The largest logit of each line [R, ld] and its lowest index; a NaN counts as the
  // largest.
  void (*argmax)(Pool&, const float* logits, int64_t ld, int64_t R, int64_t V, int64_t* index,
                 float* largest);
  // A token for each line [R, ld], and the line's largest logit. If that is not finite, its token
  // is returned.
  void (*sample)(Pool&, const float* logits, int64_t ld, int64_t V, const SampleRow*, int64_t R,
                 int64_t* token_ids, float* largest);
  // The same under masks, which are applied to the logits in place, as `forbid` does. Line i has
  // the mask words[masks[i]]; -1: none. raw_largest: the largest logits before the masks.
  void (*sample_allowed)(Pool&, float* logits, int64_t ld, int64_t V, const SampleRow*,
                         const int64_t* masks, const uint32_t* words, int64_t width, int64_t R,
                         int64_t* token_ids, float* largest, float* raw_largest);

  // forbid.cpp: in N different lines of logits [ld], makes tokens impossible whose bit in the
  // line's mask is not set. Masks are words [N, width]; bit t % 32 of word t / 32 is token t's.
  void (*forbid)(Pool&, float* logits, int64_t ld, int64_t V, const int64_t* lines,
                 const uint32_t* words, int64_t width, int64_t N);

  // logprobs.cpp: for each of R rows the log-probability and the rank (from 1) of its token, then
  // log-probabilities and ids of the best num_top tokens: logprobs and tokens [R, width]. The first
  // is NaN, and only then, where the largest logit is not finite.
  void (*token_logprobs)(Pool&, const float* logits, int64_t ld, int64_t V, const LogprobRow*,
                         int64_t R, int64_t width, float* logprobs, int64_t* tokens);

  // gated_delta.cpp, mamba2.cpp, short_conv.cpp: the step's tokens through one layer's states,
  // which are read from their pages and written back. Tokens after the last sequence are ignored.
  void (*gated_delta)(Pool&, const StateLayer&, const StateStep&, const GatedDelta&);
  void (*mamba2)(Pool&, const StateLayer&, const StateStep&, const Mamba2&);
  void (*short_conv)(Pool&, const StateLayer&, const StateStep&, const ShortConv&);

  // xxh3.cpp: the 16 bytes of XXH3_128bits of more than 240 bytes, by one thread.
  void (*xxh3_128)(const uint8_t* input, int64_t num_bytes, uint8_t* digest);

  // experts/route.cpp: logits [M, ldx] in dtype (T, or fp32) -> a token's K experts, the largest
  // score first, then their weights, out [M, ldo].
  void (*route)(Pool&, const RouterLayer&, DType, const void* logits, int64_t ldx, int64_t M,
                RoutingWord* out, int64_t ldo);
  // experts/experts.cpp: x [M, ldx] in T -> the weighted sum of each token's experts, out [M, ldo];
  // routing [M, ldr] as `route` leaves it.
  void (*experts)(Pool&, const ExpertsLayer&, DType, const void* x, int64_t ldx,
                  const RoutingWord* routing, int64_t ldr, int64_t M, void* out, int64_t ldo);
  // out [M, ldo] in T: head h's columns from h * head_ldo on are the product of its linear with x's
  // columns from h * head_ldx on; x is [M, ldx].
  void (*linears_by_head)(Pool&, const LinearsByHead&, DType, const void* x, int64_t ldx,
                          int64_t head_ldx, int64_t M, void* out, int64_t ldo, int64_t head_ldo);
};

}  // namespace quire
