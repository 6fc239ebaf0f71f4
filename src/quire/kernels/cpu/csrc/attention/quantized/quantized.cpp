// Attention over int8 codes of K and V, and their writing.
//
// Tasks, tiles and merging are as in attention.cpp. quantized_page.h has the layout of pages, and
// quantized_rows.h the arithmetic.
#include "attention/quantized/quantized.h"

#include "attention/quantized/quantized_rows.h"
// After the rows, whose pack_query it calls.
#include "attention/attention_run.h"

namespace quire::QUIRE_ISA {

void quantized_attention(Pool& pool, const AttentionLayer& layer, const Step& step, const void* q,
                         int64_t ldq, void* out, int64_t ldo, float* lse) {
  if (layer.dtype == kBF16)
    Attention<QuantizedMode<uint16_t>>(pool, layer, step, q, ldq, out, ldo, lse).run();
  else
    Attention<QuantizedMode<float>>(pool, layer, step, q, ldq, out, ldo, lse).run();
}

void write_quantized_kv(Pool& pool, const AttentionLayer& layer, const Step& step, const void* k,
                        const void* v, int64_t ld) {
  if (layer.dtype == kBF16)
    write_all<uint8_t>(pool, layer, step, static_cast<const uint16_t*>(k),
                       static_cast<const uint16_t*>(v), ld);
  else
    write_all<uint8_t>(pool, layer, step, static_cast<const float*>(k),
                       static_cast<const float*>(v), ld);
}

}  // namespace quire::QUIRE_ISA
