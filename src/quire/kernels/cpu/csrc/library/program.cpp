// Runs a forward pass, operation by operation.

#include "library/program.h"

#include "packing/pack.h"

namespace quire {
namespace {

// Tokens of a packed head that are gathered by one task.
constexpr int64_t kTokensPerTask = 8;

void embed(const Kernels& kernels, Pool& pool, const Op& op, const Step& step) {
  const int64_t T = step.num_tokens;
  const int64_t* indices = op.by_position ? step.positions : step.token_ids;
  if (op.linear == nullptr) {
    kernels.embed(pool, DType(op.out_dtype), op.weight, indices, op.out, op.out_stride, T, op.size);
    return;
  }
  const int64_t row_bytes = op.out_stride * (op.out_dtype == kF32 ? 4 : 2);
  pool.parallel((T + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    const int64_t first = task * kTokensPerTask;
    const int64_t count = T - first < kTokensPerTask ? T - first : kTokensPerTask;
    unpack_rows(*op.linear, indices + first, count,
                static_cast<char*>(op.out) + first * row_bytes, op.out_stride);
  });
}

void run_op(const Kernels& kernels, Pool& pool, const Op& op, const Step& step) {
  const int64_t T = step.num_tokens;
  switch (op.kind) {
    case kOpEmbed:
      embed(kernels, pool, op, step);
      break;
    case kOpRmsNorm:
    case kOpOffsetRmsNorm:
      kernels.rms_norm(pool, op, T);
      break;
    case kOpLayerNorm:
      kernels.layer_norm(pool, op, T);
      break;
    case kOpScale:
      kernels.scale(pool, op, T);
      break;
    case kOpGated:
      kernels.gated(pool, op, T);
      break;
    case kOpActivate:
      kernels.activate(pool, op, T);
      break;
    case kOpGate:
      kernels.gate(pool, op, T);
      break;
    case kOpSoftCap:
      kernels.soft_cap(pool, op, T);
      break;
    case kOpLinear:
      kernels.linear(pool, *op.linear, DType(op.dtype), op.in, op.in_stride, T, op.out,
                     DType(op.out_dtype), op.out_stride, Epilogue(op.epilogue), op.adapter);
      break;
    case kOpRoute:
      kernels.route(pool, *static_cast<const RouterLayer*>(op.experts), DType(op.dtype), op.in,
                    op.in_stride, T, static_cast<RoutingWord*>(op.out), op.out_stride);
      break;
    case kOpExperts:
      kernels.experts(pool, *static_cast<const ExpertsLayer*>(op.experts), DType(op.dtype), op.in,
                      op.in_stride, static_cast<const RoutingWord*>(op.second), op.second_stride, T,
                      op.out, op.out_stride);
      break;
    case kOpLinearsByHead:
      kernels.linears_by_head(pool, *static_cast<const LinearsByHead*>(op.experts),
                              DType(op.dtype), op.in, op.in_stride, op.in_head_stride, T, op.out,
                              op.out_stride, op.out_head_stride);
      break;
    case kOpRotateAndWriteKV:
      kernels.rotate_and_write_kv(pool, op, step);
      break;
    case kOpAttention:
      kernels.attention(pool, *op.layer, step, op.in, op.in_stride, op.out, op.out_stride, nullptr);
      break;
    default:
      run_state_op(kernels, pool, op, step);
  }
}

}  // namespace

void run_program(const Kernels& kernels, Pool& pool, const Op* ops, int64_t num_ops,
                 const Step& step) {
  for (int64_t i = 0; i < num_ops; ++i) run_op(kernels, pool, ops[i], step);
}

}  // namespace quire
