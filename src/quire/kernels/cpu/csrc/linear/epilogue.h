// What follows a linear's sums: bias, rounding, residual or gate.
//
// It is done while the accumulators are in registers. Every stored intermediate is rounded where
// torch, operator by operator, would store it:
//
//   kStore        out = round(acc + bias)
//   kAddResidual  out = round(out + round(acc + bias))
//   kSiluMul      out = round(round(silu(round(gate))) * round(up)), gate and up = acc + bias
//
// where acc + bias of a row with an adapter is round(acc + bias) + delta. round is to out's dtype:
// to bf16, or nothing at all (an fp32 `out` of a bf16 model, the logits, keeps the accumulators as
// they are).
#pragma once
#include "adapters/adapters.h"
#include "elementwise/activation_math.h"
#include "linear/linear.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Sixteen results for out[0..15], of which the first n are stored.
template <typename T>
inline void store_unit(T* out, vf result, int n, bool adds) {
  if (n == kLanes) {
    if (adds) result = load(out) + rounded<T>(result);
    store(out, result);
  } else if (n > 0) {
    if (adds) result = load_n(out, n) + rounded<T>(result);
    store_n(out, result, n);
  }
}

inline int clamp_lanes(int64_t n) { return n < 0 ? 0 : n < kLanes ? int(n) : kLanes; }

// `out` [M, ldo] and what happens on the way there.
struct Output {
  void* data;
  int64_t ld;
  int64_t num_columns;
  int64_t interleave;  // kStore gives all of gate, then all of up
  const float* bias;   // [padded outputs], or null
  DType dtype;
  Epilogue epilogue;
  const AdapterCall* adapters;  // or null
  const float* deltas;          // of one item's rows, from first_row on, or null
  int64_t first_row;

  // Of a row of that item, or null.
  const float* delta(int64_t row) const {
    const bool is_there = deltas != nullptr && adapters->has_delta(row);
    return is_there ? deltas + (row - first_row) * kPanelOutputs : nullptr;
  }
};

// Of one item of a call's work.
inline Output make_output(const LinearCall& call, const LinearGroup& group, Range rows,
                          int64_t panel, int thread) {
  const Weights& linear = *group.linear;
  const float* deltas =
      call.adapters == nullptr ? nullptr : panel_deltas(*call.adapters, rows, panel, thread);
  return {group.out, call.ldo, num_columns(linear, call.epilogue), linear.interleave, linear.bias,
          call.out_dtype, call.epilogue, call.adapters, deltas, rows.first};
}

template <typename T>
inline void finish_as(const Output& out, int64_t row, int64_t panel, vf low, vf high) {
  if (const float* delta = out.delta(row)) {
    low = rounded<T>(low) + load(delta);
    high = rounded<T>(high) + load(delta + kUnitOutputs);
  }
  T* line = static_cast<T*>(out.data) + row * out.ld;
  if (out.epilogue == kSiluMul) {
    const int64_t column = panel * kUnitOutputs;
    const vf gate = rounded<T>(silu(rounded<T>(low)));
    const int n = clamp_lanes(out.num_columns - column);
    store_unit(line + column, gate * rounded<T>(high), n, false);
    return;
  }
  const bool adds = out.epilogue == kAddResidual;
  const bool is_gated = out.interleave > 0;
  const int64_t column = panel * (is_gated ? kUnitOutputs : kPanelOutputs);
  const int64_t end = is_gated ? out.interleave : out.num_columns;
  store_unit(line + column, low, clamp_lanes(end - column), adds);
  const int64_t next = column + (is_gated ? out.interleave : kUnitOutputs);
  store_unit(line + next, high, clamp_lanes(out.num_columns - next), adds);
}

// The 32 sums of one row and panel (scales applied, bias not yet): lanes 0..15, lanes 16..31.
inline void finish_panel(const Output& out, int64_t row, int64_t panel, vf low, vf high) {
  if (out.bias != nullptr) {
    low = low + load(out.bias + panel * kPanelOutputs);
    high = high + load(out.bias + panel * kPanelOutputs + kUnitOutputs);
  }
  if (out.dtype == kBF16)
    finish_as<uint16_t>(out, row, panel, low, high);
  else
    finish_as<float>(out, row, panel, low, high);
}

}  // namespace quire::QUIRE_ISA
