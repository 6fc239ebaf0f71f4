// Attention of latent layers; attention.cpp passes them on.
#pragma once
#include "library/abi.h"
#include "threads/pool.h"

namespace quire::QUIRE_ISA {

// As `attention` and `write_kv` of kernels.h; out has Hq * value_dim elements a token.
void latent_attention(Pool&, const AttentionLayer&, const Step&, const void* q, int64_t ldq,
                      void* out, int64_t ldo, float* lse);
void write_latents(Pool&, const AttentionLayer&, const Step&, const void* k, int64_t ld);

}  // namespace quire::QUIRE_ISA
