// Attention over the paged KV cache.
//
// Decoding and prefill are one call, which reads straight from the blocks:
//
//   out = sum over visible keys of p * value / sum of p,   p = exp(cap(scale * q·k) - peak)
//
// after "Online normalizer calculation for softmax" (Milakov, Gimelshein, 2018) and
// "FlashAttention" (Dao et al., 2022), with two differences. Keys are taken in tiles of 256 at
// absolute positions, each with a peak of its own, and tiles are merged in ascending order: so a
// row's result is the same whether its tiles were computed one after the other (prefill), by many
// threads (decoding a long context) or for many rows at once (a shared prefix), to the bit. And
// heads that share a KV head are rows of one product: keys are read once for all of them.
#include "attention/attention_run.h"
#include "attention/quantized/quantized.h"
#include "attention/latent.h"
#include "kernels_isa.h"

namespace quire::QUIRE_ISA {
void attention(Pool& pool, const AttentionLayer& layer, const Step& step, const void* q,
               int64_t ldq, void* out, int64_t ldo, float* lse) {
  if (layer.kv_format == kInt8KV)
    quantized_attention(pool, layer, step, q, ldq, out, ldo, lse);
  else if (layer.value_dim) latent_attention(pool, layer, step, q, ldq, out, ldo, lse);
  else if (layer.dtype == kBF16)
    Attention<BF16Mode>(pool, layer, step, q, ldq, out, ldo, lse).run();
  else
    Attention<FullMode>(pool, layer, step, q, ldq, out, ldo, lse).run();
}

void write_kv(Pool& pool, const AttentionLayer& layer, const Step& step, const void* k,
              const void* v, int64_t ld) {
  if (layer.kv_format == kInt8KV)
    write_quantized_kv(pool, layer, step, k, v, ld);
  else if (layer.value_dim) write_latents(pool, layer, step, k, ld);
  else if (layer.dtype == kBF16)
    write_all<uint16_t>(pool, layer, step, static_cast<const uint16_t*>(k),
                        static_cast<const uint16_t*>(v), ld);
  else
    write_all<float>(pool, layer, step, static_cast<const float*>(k),
                     static_cast<const float*>(v), ld);
}

}  // namespace quire::QUIRE_ISA
