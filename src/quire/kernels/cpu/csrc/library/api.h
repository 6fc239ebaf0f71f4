// The functions that the library exports, documented in library.py.
#pragma once
#include <cstdint>

#define QUIRE_ABI_VERSION 20

namespace quire {
struct AdapterLinear;
struct AttentionLayer;
struct CodeRows;
struct ExpertsLayer;
struct GatedDelta;
struct LinearsByHead;
struct Mamba2;
struct ShortConv;
struct StateLayer;
struct StateStep;
struct Weights;
struct LogprobRow;
struct Op;
struct RouterLayer;
union RoutingWord;
struct SampleRow;
struct Step;
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {
int32_t quire_abi_version();
const char* quire_source_digest();
int32_t quire_num_isas();
const char* quire_isa_name(int32_t index);
int32_t quire_isa_supported(int32_t index);
// Whether the instruction set was optimized fully, and not compiled fast for tests.
int32_t quire_isa_optimized(int32_t index);
void* quire_create(int32_t isa, int32_t num_threads);
void quire_destroy(void* context);
void quire_run(void* context, const quire::Op* ops, int64_t num_ops, const quire::Step* step);
int64_t quire_packed_bytes(const quire::Weights* linear);
int64_t quire_num_scales(const quire::Weights* linear);
void quire_pack_rows(int32_t isa, const quire::Weights* linear, const void* rows,
                     int32_t rows_dtype, int64_t ld, int64_t first, int64_t num_rows);
void quire_compensate_int8(int32_t isa, const quire::Weights* linear, const void* rows,
                           int32_t rows_dtype, int64_t ld, int64_t first, int64_t num_rows,
                           const float* feedback);
void quire_pack_codes(const quire::Weights* linear, const quire::CodeRows* rows, int64_t first,
                      int64_t num_rows);
int32_t quire_pack_blocks(const quire::Weights* linear, int32_t type, const void* rows,
                          int64_t row_bytes, int64_t first, int64_t num_rows);
void quire_pack_wide(const quire::Weights* linear);
void quire_unpack_words(const uint32_t* words, int64_t ld, int64_t num_rows, int64_t num_columns,
                        int32_t width, const int32_t* order, uint8_t* codes);
void quire_pack_int8(const quire::Weights* linear, const void* rows, const float* scales,
                     int64_t first, int64_t num_rows);
void quire_clear_padding(const quire::Weights* linear);
void quire_unpack_rows(const quire::Weights* linear, const int64_t* outputs, int64_t num_rows,
                       void* rows, int64_t ld);
void quire_linear(void* context, const quire::Weights* linear, int32_t dtype, const void* x,
                  int64_t ldx, int64_t M, void* out, int32_t out_dtype, int64_t ldo,
                  int32_t epilogue, const quire::AdapterLinear* adapter);
void quire_route(void* context, const quire::RouterLayer* router, int32_t dtype, const void* logits,
                 int64_t ldx, int64_t M, quire::RoutingWord* out, int64_t ldo);
void quire_experts(void* context, const quire::ExpertsLayer* layer, int32_t dtype, const void* x,
                   int64_t ldx, const quire::RoutingWord* routing, int64_t ldr, int64_t M,
                   void* out, int64_t ldo);
void quire_linears_by_head(void* context, const quire::LinearsByHead* heads, int32_t dtype,
                           const void* x, int64_t ldx, int64_t head_ldx, int64_t M, void* out,
                           int64_t ldo, int64_t head_ldo);
void quire_attention(void* context, const quire::AttentionLayer* layer, const quire::Step* step,
                     const void* q, int64_t ldq, void* out, int64_t ldo, float* lse);
void quire_write_kv(void* context, const quire::AttentionLayer* layer, const quire::Step* step,
                    const void* k, const void* v, int64_t ld);
void quire_argmax(void* context, const float* logits, int64_t ld, int64_t R, int64_t V,
                  int64_t* index, float* largest);
void quire_sample(void* context, const float* logits, int64_t ld, int64_t V,
                  const quire::SampleRow* rows, int64_t R, int64_t* token_ids, float* largest);
void quire_sample_allowed(void* context, float* logits, int64_t ld, int64_t V,
                          const quire::SampleRow* rows, const int64_t* masks,
                          const uint32_t* words, int64_t width, int64_t R, int64_t* token_ids,
                          float* largest, float* raw_largest);
void quire_forbid(void* context, float* logits, int64_t ld, int64_t V, const int64_t* lines,
                  const uint32_t* words, int64_t width, int64_t N);
void quire_token_logprobs(void* context, const float* logits, int64_t ld, int64_t V,
                          const quire::LogprobRow* rows, int64_t R, int64_t width, float* logprobs,
                          int64_t* tokens);
void quire_gated_delta(void* context, const quire::StateLayer* layer,
                       const quire::StateStep* step, const quire::GatedDelta* call);
void quire_mamba2(void* context, const quire::StateLayer* layer, const quire::StateStep* step,
                  const quire::Mamba2* call);
void quire_short_conv(void* context, const quire::StateLayer* layer, const quire::StateStep* step,
                      const quire::ShortConv* call);
void quire_xxh3_128(int32_t isa, const void* input, int64_t num_bytes, void* digest);
int32_t quire_read_records(int32_t isa, int32_t descriptor, int64_t num_records,
                           const int64_t* places, const void* digests, void* are_sound);
}
#pragma GCC visibility pop
