// Dispatches a linear to its format's kernel.
//
// Compiled once per instruction set.
#include "linear/linear.h"

#include "adapters/adapters.h"
#include "kernels_isa.h"

namespace quire::QUIRE_ISA {

void multiply_groups(Pool& pool, const LinearCall& call) {
  switch (call.any().format) {
    case kDenseF32:
      return linear_f32(pool, call);
    case kDenseBF16:
      return linear_bf16(pool, call);
    case kInt8:
      return linear_int8(pool, call);
    case kInt4:
      return linear_int4(pool, call);
    case kBlockQuantized:
      return linear_block_quantized(pool, call);
    case kFloat8:
      return linear_float8(pool, call);
  }
}

void linear(Pool& pool, const Weights& linear, DType dtype, const void* x, int64_t ldx, int64_t M,
            void* out, DType out_dtype, int64_t ldo, Epilogue epilogue,
            const AdapterLinear* adapter) {
  if (M == 0) return;
  const LinearGroup all{&linear, 0, M, out};
  LinearCall call{&all, 1, dtype, x, ldx, nullptr, M, out_dtype, ldo, epilogue};
  if (adapter == nullptr || adapter->rows->num_groups == 0) return multiply_groups(pool, call);
  const AdapterCall adapters = compute_inner(pool, *adapter, linear, dtype, x, ldx, M);
  call.adapters = &adapters;
  multiply_groups(pool, call);
}

}  // namespace quire::QUIRE_ISA
