// Dispatches a linear of block-quantized weights to the form of its scales.
#include "block_quantized/task.h"

namespace quire::QUIRE_ISA {

void linear_block_quantized(Pool& pool, const LinearCall& call) {
  if (call.any().code_format->block == 0)
    linear_flat(pool, call);
  else
    linear_two_level(pool, call);
}

}  // namespace quire::QUIRE_ISA
