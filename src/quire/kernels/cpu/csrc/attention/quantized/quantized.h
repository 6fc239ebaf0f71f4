// Attention over pages of int8 codes; compiled once for each instruction set.
#pragma once
#include "library/abi.h"
#include "threads/pool.h"

namespace quire::QUIRE_ISA {

void quantized_attention(Pool&, const AttentionLayer&, const Step&, const void* q, int64_t ldq,
                         void* out, int64_t ldo, float* lse);
void write_quantized_kv(Pool&, const AttentionLayer&, const Step&, const void* k, const void* v,
                        int64_t ld);

}  // namespace quire::QUIRE_ISA
