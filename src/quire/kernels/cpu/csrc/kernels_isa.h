// Declares the functions that are compiled once per instruction set.
//
// Signatures are as in kernels.h.
#pragma once
#include "library/abi.h"
#include "library/adapters_abi.h"
#include "library/experts_abi.h"
#include "library/state_abi.h"
#include "threads/pool.h"

namespace quire {
struct Op;
}

namespace quire::QUIRE_ISA {

void linear(Pool&, const Weights&, DType, const void* x, int64_t ldx, int64_t M, void* out,
            DType out_dtype, int64_t ldo, Epilogue, const AdapterLinear*);
void round_int8(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                int64_t num_rows);
void round_int4(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                int64_t num_rows);
void compensate_int8(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                     int64_t num_rows, const float* feedback);
void attention(Pool&, const AttentionLayer&, const Step&, const void* q, int64_t ldq, void* out,
               int64_t ldo, float* lse);
void write_kv(Pool&, const AttentionLayer&, const Step&, const void* k, const void* v, int64_t ld);
void rotate_and_write_kv(Pool&, const Op&, const Step&);
void rms_norm(Pool&, const Op&, int64_t M);
void layer_norm(Pool&, const Op&, int64_t M);
void scale(Pool&, const Op&, int64_t M);
void embed(Pool&, DType, const void* table, const int64_t* indices, void* out, int64_t ldo,
           int64_t M, int64_t size);
void gated(Pool&, const Op&, int64_t M);
void activate(Pool&, const Op&, int64_t M);
void gate(Pool&, const Op&, int64_t M);
void soft_cap(Pool&, const Op&, int64_t M);
void join_turned(Pool&, const Op&, const Step&);
void gated_rms_norm(Pool&, const Op&, int64_t M);
void delta_decay(Pool&, const Op&, int64_t M);
void delta_step(Pool&, const Op&, int64_t M);
void widen(Pool&, const Op&, int64_t M);
void scale_columns(Pool&, const Op&, int64_t M);
void argmax(Pool&, const float* logits, int64_t ld, int64_t R, int64_t V, int64_t* index,
            float* largest);
void sample(Pool&, const float* logits, int64_t ld, int64_t V, const SampleRow*, int64_t R,
            int64_t* token_ids, float* largest);
void sample_allowed(Pool&, float* logits, int64_t ld, int64_t V, const SampleRow*,
                    const int64_t* masks, const uint32_t* words, int64_t width, int64_t R,
                    int64_t* token_ids, float* largest, float* raw_largest);
void forbid(Pool&, float* logits, int64_t ld, int64_t V, const int64_t* lines,
            const uint32_t* words, int64_t width, int64_t N);
void token_logprobs(Pool&, const float* logits, int64_t ld, int64_t V, const LogprobRow*, int64_t R,
                    int64_t width, float* logprobs, int64_t* tokens);
void gated_delta(Pool&, const StateLayer&, const StateStep&, const GatedDelta&);
void mamba2(Pool&, const StateLayer&, const StateStep&, const Mamba2&);
void short_conv(Pool&, const StateLayer&, const StateStep&, const ShortConv&);
void xxh3_128(const uint8_t* input, int64_t num_bytes, uint8_t* digest);
void route(Pool&, const RouterLayer&, DType, const void* logits, int64_t ldx, int64_t M,
           RoutingWord* out, int64_t ldo);
void experts(Pool&, const ExpertsLayer&, DType, const void* x, int64_t ldx,
             const RoutingWord* routing, int64_t ldr, int64_t M, void* out, int64_t ldo);
void linears_by_head(Pool&, const LinearsByHead&, DType, const void* x, int64_t ldx,
                     int64_t head_ldx, int64_t M, void* out, int64_t ldo, int64_t head_ldo);

}  // namespace quire::QUIRE_ISA
