// What follows a linear's sums: bias, rounding, residual or gate.
//
// Every stored intermediate is rounded where torch, operator by operator, would store it:
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
#include "linear/panel_task.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Sixteen results for out[0..15], of which the first n are stored. result(lane): those of a register,
// from the lane on. (g++ 12 copies values of several registers in pieces, which is slow.)
template <typename T, typename F>
inline void store_unit(T* out, int n, bool adds, F&& result) {
#pragma GCC unroll 4
  for (int lane = 0; lane < kLanes; lane += kPartLanes) {
    const int count = n - lane;
    if (count <= 0) return;
    part x = result(lane);
    if (count >= kPartLanes) {
      if (adds) x = load_part(out + lane) + rounded_part<T>(x);
      store(out + lane, x);
    } else {
      if (adds) x = load_part_n(out + lane, count) + rounded_part<T>(x);
      store_n(out + lane, x, count);
    }
  }
}

inline int clamp_lanes(int64_t n) { return n < 0 ? 0 : n < kLanes ? int(n) : kLanes; }

// Rows are often a multiple of 4 KiB apart, so few of their lines stay in the L1 cache: a line is
// requested so many rows before it is written.
constexpr int64_t kRowsAhead = 6;

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

  // Requests the line of a row's first results of a panel.
  void prefetch(int64_t row, int64_t panel) const {
    const int64_t column = panel * (interleave > 0 ? kUnitOutputs : kPanelOutputs);
    const int64_t size = dtype == kBF16 ? 2 : 4;
    __builtin_prefetch(static_cast<const char*>(data) + (row * ld + column) * size, 1, 3);
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
inline void finish_as(const Output& out, int64_t row, int64_t panel, const float* sums) {
  const float* const bias = out.bias == nullptr ? nullptr : out.bias + panel * kPanelOutputs;
  const float* const delta = out.delta(row);
  const auto result = [&](int lane) {
    part x = load_part(sums + lane);
    if (bias != nullptr) x = x + load_part(bias + lane);
    return delta == nullptr ? x : rounded_part<T>(x) + load_part(delta + lane);
  };
  const auto upper = [&](int lane) { return result(lane + int(kUnitOutputs)); };
  T* line = static_cast<T*>(out.data) + row * out.ld;
  if (out.epilogue == kSiluMul) {
    const int64_t column = panel * kUnitOutputs;
    const int n = clamp_lanes(out.num_columns - column);
    store_unit(line + column, n, false, [&](int lane) {
      const part gate = rounded_part<T>(silu(rounded_part<T>(result(lane))));
      return gate * rounded_part<T>(upper(lane));
    });
    return;
  }
  const bool adds = out.epilogue == kAddResidual;
  const bool is_gated = out.interleave > 0;
  const int64_t column = panel * (is_gated ? kUnitOutputs : kPanelOutputs);
  const int64_t end = is_gated ? out.interleave : out.num_columns;
  store_unit(line + column, clamp_lanes(end - column), adds, result);
  const int64_t next = column + (is_gated ? out.interleave : kUnitOutputs);
  store_unit(line + next, clamp_lanes(out.num_columns - next), adds, upper);
}

// The 32 sums of one row and panel (scales applied, bias not yet).
inline void finish_panel(const Output& out, int64_t row, int64_t panel, const float* sums) {
  if (out.dtype == kBF16)
    finish_as<uint16_t>(out, row, panel, sums);
  else
    finish_as<float>(out, row, panel, sums);
}

// Of rows [rows, 32], one after the other.
inline void finish_rows(const Output& out, Range rows, int64_t panel, const float* sums) {
  for (int64_t row = rows.first; row < rows.end; ++row, sums += kPanelOutputs) {
    out.prefetch(row + kRowsAhead < rows.end ? row + kRowsAhead : row, panel);
    finish_panel(out, row, panel, sums);
  }
}

}  // namespace quire::QUIRE_ISA
