// Runs a forward pass, operation by operation.

#include "library/program.h"

#include "packing/pack.h"

namespace quire {
namespace {

// Tokens of a packed head that are gathered by one task.
constexpr int64_t kTokensPerTask = 8;

void embed(const Kernels& kernels, Pool& pool, const Op& op, const Step& step) {
  const int64_t T = step.num_tokens;
  if (op.linear == nullptr) {
    kernels.embed(pool, DType(op.dtype), op.weight, step.token_ids, op.out, T, op.size);
    return;
  }
  const int64_t row_bytes = op.out_stride * (op.dtype == kF32 ? 4 : 2);
  pool.parallel((T + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    const int64_t first = task * kTokensPerTask;
    const int64_t count = T - first < kTokensPerTask ? T - first : kTokensPerTask;
    unpack_rows(*op.linear, step.token_ids + first, count,
                static_cast<char*>(op.out) + first * row_bytes, op.out_stride);
  });
}

void run_op(const Kernels& kernels, Pool& pool, const Op& op, const Step& step) {
  const auto dtype = static_cast<DType>(op.dtype);
  const int64_t T = step.num_tokens;
  switch (op.kind) {
    case kOpEmbed:
      embed(kernels, pool, op, step);
      break;
    case kOpRmsNorm:
    case kOpOffsetRmsNorm:
      kernels.rms_norm(pool, dtype, op.in, op.in_stride, op.weight, op.eps,
                       op.kind == kOpOffsetRmsNorm ? &op.factor : nullptr, op.out, op.out_stride, T,
                       op.size);
      break;
    case kOpScale:
      kernels.scale(pool, dtype, op.in, op.in_stride, op.factor, op.epilogue == kAddResidual,
                    op.out, op.out_stride, T, op.size);
      break;
    case kOpGeluMul:
      kernels.gelu_mul(pool, dtype, op.in, op.in_stride, op.out, op.out_stride, T, op.size);
      break;
    case kOpLinear:
      kernels.linear(pool, *op.linear, dtype, op.in, op.in_stride, T, op.out,
                     static_cast<DType>(op.out_dtype), op.out_stride,
                     static_cast<Epilogue>(op.epilogue));
      break;
    case kOpRotateAndWriteKV:
      kernels.rotate_and_write_kv(pool, *op.layer, *op.rotary, step, op.out, op.out_stride);
      break;
    case kOpAttention:
      kernels.attention(pool, *op.layer, step, op.in, op.in_stride, op.out, op.out_stride, nullptr);
      break;
  }
}

}  // namespace

void run_program(const Kernels& kernels, Pool& pool, const Op* ops, int64_t num_ops,
                 const Step& step) {
  for (int64_t i = 0; i < num_ops; ++i) run_op(kernels, pool, ops[i], step);
}

}  // namespace quire
