// How the sums of a panel are made of chunks of its inputs, whatever the dense linear's weights.
//
// A chunk is multiplied with all blocks of rows before the next one is. Sums rest in memory between
// chunks, so the order of an output's sum does not depend on how many rows there are.
#pragma once
#include "linear/linear_float8.h"
#include "linear/linear_tile.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

template <typename Step>
constexpr bool kIsFloat8 = false;
template <typename Dense, bool kIsWide>
constexpr bool kIsFloat8<Float8Step<Dense, kIsWide>> = true;

template <typename Step>
constexpr bool kIsWide = false;
template <typename Dense>
constexpr bool kIsWide<Float8Step<Dense, true>> = true;

// What x is multiplied by when it is copied for a step.
template <typename Step>
constexpr float input_factor() {
  if constexpr (kIsFloat8<Step>) return Step::kInputFactor;
  return 1.0f;
}

// Widened codes take 16 KiB of fp32 weights, half of a core's L1 cache.
constexpr int64_t kMaxWideInputs = 128;

// Of the sums of `num_rows` rows, with what else is needed to make them.
template <typename Step>
int64_t sums_bytes(int64_t num_rows) {
  const int64_t line_bytes = kPanelOutputs * int64_t(sizeof(float));
  return kIsFloat8<Step> ? (2 * num_rows + kMaxWideInputs) * line_bytes : num_rows * line_bytes;
}

// totals [rows, 32] (+)= sums times factor times the scales of a group's outputs.
inline void add_scaled(const float* sums, const float* scales, float factor, int64_t num_rows,
                       bool is_first, float* totals) {
  for (int64_t n = 0; n < kPanelOutputs; n += kPartLanes) {
    const part scale = load_part(scales + n) * factor;
    for (int64_t i = n; i < num_rows * kPanelOutputs; i += kPanelOutputs)
      store(totals + i,
            fma(load_part(sums + i), scale, is_first ? part{} : load_part(totals + i)));
  }
}

// memory: sums_bytes. Its first part becomes the sums [rows, 32] of a panel.
// multiply_chunk(steps, is_first, sums, wide) adds the products of some steps of the panel, `wide`
// being room for kMaxWideInputs inputs.
template <typename Step, typename F>
void sum_panel(const Weights& linear, int64_t panel, int64_t num_rows, int64_t max_steps,
               float* memory, F&& multiply_chunk) {
  const auto multiply = [&](Range steps, float* sums, uint8_t* wide) {
    const int64_t num_chunks = divide_up(steps.size(), max_steps);
    for (int64_t i = 0; i < num_chunks; ++i)
      multiply_chunk(steps.part(i, num_chunks), i == 0, sums, wide);
  };
  const int64_t num_steps = divide_up(linear.num_inputs, Step::kInputs);
  if constexpr (!kIsFloat8<Step>) {
    multiply({0, num_steps}, memory, nullptr);
  } else {
    float* const sums = memory + num_rows * kPanelOutputs;
    auto* const wide = reinterpret_cast<uint8_t*>(sums + num_rows * kPanelOutputs);
    const int64_t group_steps = float8_group_inputs(linear) / Step::kInputs;
    const float* scales = linear.scales + panel * float8_groups(linear) * kPanelOutputs;
    for (int64_t first = 0; first < num_steps; first += group_steps) {
      const int64_t end = first + group_steps < num_steps ? first + group_steps : num_steps;
      multiply({first, end}, sums, wide);
      add_scaled(sums, scales, Step::kScaleFactor, num_rows, first == 0, memory);
      scales += kPanelOutputs;
    }
  }
}

// Where a step of a panel begins.
template <typename Step>
const uint8_t* step_of_panel(const Weights& linear, int64_t panel, int64_t step) {
  const int64_t num_steps = divide_up(linear.num_inputs, Step::kInputs);
  return static_cast<const uint8_t*>(linear.weights) + (panel * num_steps + step) * kStepBytes;
}

// f(step, weights, num_steps): an object of the type of step that blocks of rows read, and the
// weights of `num_steps` steps of Step, which begin at `stored`, in steps of that type.
template <typename Step, typename F>
void with_weights(const uint8_t* stored, int64_t num_steps, uint8_t* wide, F&& f) {
  if constexpr (kIsWide<Step>) {
    Step::widen(stored, num_steps, wide);
    f(typename Step::Wide{}, wide, num_steps * Step::kInputs / Step::Wide::kInputs);
  } else {
    f(Step{}, stored, num_steps);
  }
}

}  // namespace quire::QUIRE_ISA
