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

// Where the results of a panel's two units go in a row of `out`, and how many are stored.
struct PanelColumns {
  int64_t lower;
  int64_t upper;
  int num_lower;
  int num_upper;

  PanelColumns(const Output& out, int64_t panel) {
    const bool is_gated = out.interleave > 0;
    lower = panel * (is_gated ? kUnitOutputs : kPanelOutputs);
    upper = lower + (is_gated ? out.interleave : kUnitOutputs);
    const bool is_split = is_gated && out.epilogue != kSiluMul;
    num_lower = clamp_lanes((is_split ? out.interleave : out.num_columns) - lower);
    num_upper = out.epilogue == kSiluMul ? kLanes : clamp_lanes(out.num_columns - upper);
  }

  bool are_whole() const { return num_lower == kLanes && num_upper == kLanes; }
};

// kIsPlain: without bias and deltas, and both units are stored whole. What holds for all rows is
// decided before the first of them.
template <typename T, Epilogue kEpilogue, bool kIsPlain, typename F>
__attribute__((noinline)) void finish_rows_as(const Output& out, Range rows, int64_t panel,
                                              const F& sums) {
  const PanelColumns columns(out, panel);
  const int num_lower = kIsPlain ? kLanes : columns.num_lower;
  const int num_upper = kIsPlain ? kLanes : columns.num_upper;
  const float* const bias = out.bias == nullptr ? nullptr : out.bias + panel * kPanelOutputs;
  for (int64_t row = rows.first; row < rows.end; ++row) {
    T* const line = static_cast<T*>(out.data) + row * out.ld;
    const int64_t ahead = row + kRowsAhead < rows.end ? kRowsAhead : 0;
    __builtin_prefetch(line + columns.lower + ahead * out.ld, 1, 3);
    const float* const delta = kIsPlain ? nullptr : out.delta(row);
    const auto result = [&](int lane) {
      part x = sums(row - rows.first, lane);
      if constexpr (kIsPlain) return x;
      if (bias != nullptr) x = x + load_part(bias + lane);
      return delta == nullptr ? x : rounded_part<T>(x) + load_part(delta + lane);
    };
    const auto upper = [&](int lane) { return result(lane + int(kUnitOutputs)); };
    if constexpr (kEpilogue == kSiluMul) {
      store_unit(line + columns.lower, num_lower, false, [&](int lane) {
        const part gate = rounded_part<T>(silu(rounded_part<T>(result(lane))));
        return gate * rounded_part<T>(upper(lane));
      });
    } else {
      constexpr bool kAdds = kEpilogue == kAddResidual;
      store_unit(line + columns.lower, num_lower, kAdds, result);
      store_unit(line + columns.upper, num_upper, kAdds, upper);
    }
  }
}

template <typename T, Epilogue kEpilogue, typename F>
inline void finish_rows_as(const Output& out, Range rows, int64_t panel, const F& sums) {
  if (out.bias == nullptr && out.deltas == nullptr && PanelColumns(out, panel).are_whole())
    finish_rows_as<T, kEpilogue, true>(out, rows, panel, sums);
  else
    finish_rows_as<T, kEpilogue, false>(out, rows, panel, sums);
}

template <typename T, typename F>
inline void finish_rows_as(const Output& out, Range rows, int64_t panel, const F& sums) {
  switch (out.epilogue) {
    case kStore:
      return finish_rows_as<T, kStore>(out, rows, panel, sums);
    case kAddResidual:
      return finish_rows_as<T, kAddResidual>(out, rows, panel, sums);
    case kSiluMul:
      return finish_rows_as<T, kSiluMul>(out, rows, panel, sums);
  }
}

// sums(i, lane): those of the ith row and a register of the panel, scales applied, bias not yet.
template <typename F>
inline void finish_rows_of(const Output& out, Range rows, int64_t panel, const F& sums) {
  if (out.dtype == kBF16)
    finish_rows_as<uint16_t>(out, rows, panel, sums);
  else
    finish_rows_as<float>(out, rows, panel, sums);
}

// sums [rows, 32]
inline void finish_rows(const Output& out, Range rows, int64_t panel, const float* sums) {
  finish_rows_of(out, rows, panel, [sums](int64_t i, int lane) {
    return load_part(sums + i * kPanelOutputs + lane);
  });
}

}  // namespace quire::QUIRE_ISA
