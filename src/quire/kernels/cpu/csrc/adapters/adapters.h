// What adapters add to a linear's outputs (library/adapters_abi.h).
//
// The inner columns of all rows are computed before the linear, and the deltas of a panel's outputs
// with the panel, so that they are added while its sums are in registers. A of the linear that
// follows is fetched meanwhile, rather than waited for. Every number is summed in one order that
// depends on the adapter's own sizes alone; a row reads nothing of another.
#pragma once
#include "library/abi.h"
#include "library/adapters_abi.h"
#include "linear/panel_task.h"
#include "threads/pool.h"

namespace quire::QUIRE_ISA {

// What a linear of this step gets. inner: null where no row gets anything.
struct AdapterCall {
  const AdapterLinear* adapter;
  const Weights* linear;
  DType dtype;         // of A and B
  const void* inner;   // [num_rows, ld] of dtype, in the order of AdapterRows::order
  int64_t ld;
  float* deltas;       // [threads][most_rows][32]
  int64_t most_rows;   // of a group that is multiplied with one panel after another

  const AdapterSlot& slot(int32_t index) const { return adapter->slots[index]; }
  bool has_delta(int64_t row) const {
    const int32_t index = adapter->rows->slots[row];
    return index >= 0 && slot(index).num_columns > 0;
  }
};

// x [M, ldx], the step's rows. Uses the pool's shared memory, slots 4 to 6, until the linear ends.
AdapterCall compute_inner(Pool&, const AdapterLinear&, const Weights&, DType, const void* x,
                          int64_t ldx, int64_t M);

// The deltas of one panel's outputs, [rows, 32], written for rows that have one; null where no row
// of the step has. Valid until the thread's next call.
const float* panel_deltas(const AdapterCall&, Range rows, int64_t panel, int thread);

}  // namespace quire::QUIRE_ISA
