// Dispatches a linear of coded weights to the form of its scales.
#include "coded/coded_task.h"

namespace quire::QUIRE_ISA {

void linear_coded(Pool& pool, const LinearCall& call) {
  if (call.any().coding->block == 0)
    linear_flat(pool, call);
  else
    linear_two_level(pool, call);
}

}  // namespace quire::QUIRE_ISA
