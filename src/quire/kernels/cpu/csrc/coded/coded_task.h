// What the products of all forms of kCoded share: how they are divided into tasks.
#pragma once
#include <utility>

#include "coded/chunk.h"
#include "coded/quantize_groups.h"
#include "linear/epilogue.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

// A unit of weights and some rows, as the innermost functions take them.
struct UnitProduct {
  const Weights& linear;
  const CodedLayout& layout;
  const CodeTable& table;
  const uint8_t* unit;
  int64_t num_stretches;
  const uint8_t* x;  // of the first row
  int64_t ld;
  float* results;  // [rows, 32], the unit's sixteen of them
};

using MultiplyUnit = void (*)(const UnitProduct&, Prefetch);

// The functions for 1 .. kMaxRows rows.
template <typename Form, int... kRs>
inline MultiplyUnit choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr MultiplyUnit kFunctions[] = {&Form::template multiply<kRs + 1>...};
  return kFunctions[num_rows - 1];
}

// As in linear_int4.cpp.
constexpr int64_t kMinFetchedRows = 4;
constexpr int64_t kAheadBytes = 8192;

// Form: kMaxRows, and multiply<R>: a UnitProduct of R rows.
template <typename Form>
struct CodedTask {
  const Weights& linear;
  Output output;
  GroupedRows x;

  void run(Range rows, int64_t panel) const {
    const CodedLayout layout(linear);
    const CodeTable table(linear.coding->table);
    const int64_t unit_bytes = coded_unit_bytes(linear), num_bytes = 2 * unit_bytes;
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), Form::kMaxRows);
    const int64_t ahead = num_blocks == 1 ? kAheadBytes : num_bytes;
    const int64_t num_lines = rows.size() < kMinFetchedRows ? 0 : num_bytes / kLineBytes;
    alignas(64) float results[Form::kMaxRows * kPanelOutputs];
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const auto multiply = choose_among<Form>(
          block.size(), std::make_integer_sequence<int, Form::kMaxRows>{});
      for (int unit = 0; unit < 2; ++unit) {
        const Range lines = Range{0, num_lines}.part(i * 2 + unit, num_blocks * 2);
        multiply({linear, layout, table, weights + unit * unit_bytes, coded_stretches(linear),
                  x.data + block.first * x.ld, x.ld, results + unit * kUnitOutputs},
                 Prefetch(weights + ahead + lines.first * kLineBytes, lines.size()));
      }
      for (int64_t m = block.first; m < block.end; ++m) {
        const float* result = results + (m - block.first) * kPanelOutputs;
        finish_panel(output, m, panel, load(result), load(result + kUnitOutputs));
      }
    }
  }
};

template <typename Form>
inline void multiply_coded(Pool& pool, const LinearCall& call) {
  const GroupedRows x = quantize_groups(pool, call);
  share_panels(pool, call, x.ld,
               [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
                 const GroupedRows own{x.data + group.first * x.ld, x.ld};
                 const Output output = make_output(call, group, rows, panel, thread);
                 CodedTask<Form>{*group.linear, output, own}.run(rows, panel);
               });
}

void linear_flat(Pool&, const LinearCall&);       // linear_flat.cpp
void linear_two_level(Pool&, const LinearCall&);  // linear_two_level.cpp

}  // namespace quire::QUIRE_ISA
