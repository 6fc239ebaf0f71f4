// Runs the operations of layers with states or latents.

#include "library/program.h"

namespace quire {
namespace {

// The address `count` numbers of the operation's dtype after in.
const void* behind(const Op& op, int64_t count) {
  return static_cast<const char*>(op.in) + count * (op.dtype == kF32 ? 4 : 2);
}

void gated_delta(const Kernels& kernels, Pool& pool, const Op& op, const StateCall& states) {
  auto call = *static_cast<const GatedDelta*>(states.call);
  call.dtype = op.dtype;
  call.q = op.in;
  call.k = behind(op, states.second_offset);
  call.v = behind(op, states.third_offset);
  call.q_stride = call.k_stride = call.v_stride = op.in_stride;
  call.g = static_cast<const float*>(op.second);
  call.beta = static_cast<const float*>(op.third);
  call.out = op.out;
  kernels.gated_delta(pool, *states.layer, *states.step, call);
}

void mamba2(const Kernels& kernels, Pool& pool, const Op& op, const StateCall& states) {
  auto call = *static_cast<const Mamba2*>(states.call);
  call.dtype = op.dtype;
  call.x = op.in;
  call.b = behind(op, states.second_offset);
  call.c = behind(op, states.third_offset);
  call.x_stride = call.b_stride = call.c_stride = op.in_stride;
  call.dt = static_cast<const float*>(op.second);
  call.out = op.out;
  kernels.mamba2(pool, *states.layer, *states.step, call);
}

void short_conv(const Kernels& kernels, Pool& pool, const Op& op, const StateCall& states) {
  auto call = *static_cast<const ShortConv*>(states.call);
  call.dtype = op.dtype;
  call.x = op.in;
  call.x_stride = op.in_stride;
  call.out = op.out;
  kernels.short_conv(pool, *states.layer, *states.step, call);
}

}  // namespace

void run_state_op(const Kernels& kernels, Pool& pool, const Op& op, const Step& step) {
  const int64_t T = step.num_tokens;
  switch (op.kind) {
    case kOpJoinTurned:
      kernels.join_turned(pool, op, step);
      break;
    case kOpWriteLatent:
      kernels.write_kv(pool, *op.layer, step, op.in, nullptr, op.in_stride);
      break;
    case kOpGatedDelta:
      gated_delta(kernels, pool, op, *op.states);
      break;
    case kOpMamba2:
      mamba2(kernels, pool, op, *op.states);
      break;
    case kOpShortConv:
      short_conv(kernels, pool, op, *op.states);
      break;
    case kOpDeltaDecay:
      kernels.delta_decay(pool, op, T);
      break;
    case kOpDeltaStep:
      kernels.delta_step(pool, op, T);
      break;
    case kOpWiden:
      kernels.widen(pool, op, T);
      break;
    case kOpScaleColumns:
      kernels.scale_columns(pool, op, T);
      break;
    case kOpGatedRmsNorm:
      kernels.gated_rms_norm(pool, op, T);
      break;
  }
}

}  // namespace quire
