// Dispatches a linear to its format's kernel.
//
// Compiled once per instruction set.
#include "linear/linear.h"

#include "kernels_isa.h"

namespace quire::QUIRE_ISA {

void linear(Pool& pool, const Weights& linear, DType dtype, const void* x, int64_t ldx, int64_t M,
            void* out, DType out_dtype, int64_t ldo, Epilogue epilogue) {
  if (M == 0) return;
  const LinearCall call{linear, dtype, x, ldx, M, out, out_dtype, ldo, epilogue};
  switch (linear.format) {
    case kDenseF32:
      return linear_f32(pool, call);
    case kDenseBF16:
      return linear_bf16(pool, call);
    case kInt8:
      return linear_int8(pool, call);
    case kInt4:
      return linear_int4(pool, call);
  }
}

}  // namespace quire::QUIRE_ISA
