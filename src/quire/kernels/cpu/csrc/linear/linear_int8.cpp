// Linears with int8 weights and int8 activations.
//
// Exact integer sums, then two scales. Layout and formula: linear_int8.h; activations:
// quantize_rows.h.
#include "linear/linear_int8.h"

#include <utility>

#include "linear/dot.h"
#include "linear/epilogue.h"
#include "linear/quantize_rows.h"
#include "linear/panel_task.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {
namespace {

// Fewer rows leave fetching to the processor, which keeps up, and which requests of ours disturb if
// they are some KiB ahead: two rows took 3.2 ms without them, 4.4 with. A loop that multiplies for
// longer between its reads needs them: eight rows took 7.0 ms without, 4.4 with. (All linears of
// a 160m model, one thread, Zen 4.)
constexpr int64_t kMinFetchedRows = 6;
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kQuadsPerStep = 8;

// sums [R, 32] = rows [R, ldx] times the panel's bytes.
template <int R>
void multiply(const uint8_t* panel, int64_t num_quads, const DotElement* rows, int64_t ldx,
              Prefetch prefetch, int32_t* results) {
  prefetch.spread(num_quads / kQuadsPerStep * kTilesPerPanel);
  for (int tile = 0; tile < kTilesPerPanel; ++tile) {
    DotInts sums[R][2] = {};
    const uint8_t* weights = panel + tile * kTileLanes * 4;
    const DotElement* x = rows;
    int64_t quad = 0;
    for (; quad + kQuadsPerStep <= num_quads; quad += kQuadsPerStep) {
      prefetch.step();
#pragma GCC unroll 8
      for (int i = 0; i < kQuadsPerStep; ++i)
        add_quad<R>(weights + i * kQuadBytes, x + i * 4, ldx, sums);
      weights += kQuadsPerStep * kQuadBytes;
      x += kQuadsPerStep * 4;
    }
    for (; quad < num_quads; ++quad, weights += kQuadBytes, x += 4)
      add_quad<R>(weights, x, ldx, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      std::memcpy(results + r * kPanelOutputs + tile * kTileLanes, sums[r], sizeof sums[r]);
  }
}

using Multiply = void (*)(const uint8_t*, int64_t, const DotElement*, int64_t, Prefetch, int32_t*);

// The functions of R = 1 .. kMaxTileRows.
template <int... kRs>
Multiply choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr Multiply kFunctions[] = {&multiply<kRs + 1>...};
  return kFunctions[num_rows - 1];
}

Multiply choose(int64_t num_rows) {
  return choose_among(num_rows, std::make_integer_sequence<int, kMaxTileRows>{});
}

struct Int8Task {
  const Weights& linear;
  Output output;
  QuantizedRows x;

  void run(Range rows, int64_t panel) const {
    const int64_t num_bytes = int8_panel_bytes(linear);
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), kMaxTileRows);
    const int64_t ahead = num_blocks == 1 ? kAheadBytes : num_bytes;
    const int64_t num_lines = rows.size() < kMinFetchedRows ? 0 : num_bytes / kLineBytes;
    alignas(64) int32_t sums[kMaxTileRows * kPanelOutputs];
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const Range lines = Range{0, num_lines}.part(i, num_blocks);
      const Prefetch prefetch(weights + ahead + lines.first * kLineBytes, lines.size());
      choose(block.size())(weights, int8_quads(linear), x.data + block.first * x.ld, x.ld, prefetch,
                           sums);
      for (int64_t m = block.first; m < block.end; ++m)
        finish(m, panel, sums + (m - block.first) * kPanelOutputs);
    }
  }

  void finish(int64_t m, int64_t panel, const int32_t* sums) const {
    const vi offset = vi{} + x.totals[m] * 128;
    const vf scale = splat(x.scales[m]);
    vf results[2];
#pragma GCC unroll 2
    for (int unit = 0; unit < 2; ++unit) {
      const vi exact = load_as<vi>(sums + unit * kUnitOutputs) - offset;
      const float* scales = linear.scales + panel * kPanelOutputs + unit * kUnitOutputs;
      results[unit] = __builtin_convertvector(exact, vf) * scale * load(scales);
    }
    finish_panel(output, m, panel, results[0], results[1]);
  }
};

}  // namespace

void linear_int8(Pool& pool, const LinearCall& call) {
  const int64_t padded = divide_up(call.any().num_inputs, kLanes) * kLanes;
  const QuantizedRows x = quantize_rows(pool, call, padded, 0);
  const int64_t row_bytes = x.ld * int64_t(sizeof(DotElement));
  share_panels(pool, call, row_bytes,
               [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
                 const Int8Task task{*group.linear, make_output(call, group, rows, panel, thread),
                                     x.from(group.first)};
                 task.run(rows, panel);
               });
}

}  // namespace quire::QUIRE_ISA
