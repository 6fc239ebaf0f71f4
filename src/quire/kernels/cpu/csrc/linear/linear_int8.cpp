// Linears with int8 weights and int8 activations.
//
// Layout of weights: linear_int8.h; activations: quantize_rows.h. For a row m and an output n,
// group after group,
//
//   dot     = sum over the group of (byte[n, k] - kByteBias) q[m, k]     exact
//   sum    += dot * x_scale[m, g]                                  fp32, one rounding (fma)
//
// and the result is sum * scale[n].
#include "linear/linear_int8.h"

#include <utility>

#include "linear/amx_tiles.h"
#include "linear/row_sums.h"
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
constexpr int kQuadsPerStep = 8;

// result [R, a tile of 32] += R rows times the weights of inputs that share a scale, from quad
// `first` of a panel on. There are too few registers for the results beside the integers: they are
// in the L1 cache, and read and written once for each group. Not inlined, or GCC moves the sums
// from register to register in the loop (0.9 times as fast).
template <int R>
__attribute__((noinline)) void add_group(const uint8_t* weights, int64_t num_quads,
                                         const QuantizedRows& rows, int64_t group, int64_t first,
                                         Prefetch& prefetch, float* result) {
  const auto* x = (const uint8_t*)(rows.data + first * 4);
  const int64_t ld = rows.ld * int64_t(sizeof(DotElement));
  const auto load_quad = [&](int q, DotInts (&to)[2]) {
    load_registers(weights + q * kQuadBytes, to);
  };
  RowSums<R, 2, 4> sums;
  sums.start([&](int r) { return DotInts{} + rows.sums[r * rows.num_sums + group]; });
  int64_t quad = 0;
  for (; quad + kQuadsPerStep <= num_quads; quad += kQuadsPerStep) {
    prefetch.step();
    sums.template add<kQuadsPerStep>(load_quad, x, ld);
    weights += kQuadsPerStep * kQuadBytes;
    x += kQuadsPerStep * 4 * sizeof(DotElement);
  }
  for (; quad < num_quads; ++quad, weights += kQuadBytes, x += 4 * sizeof(DotElement))
    sums.template add<1>(load_quad, x, ld);
  sums.finish();
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const DotFloats scale = DotFloats{} + rows.scales[r * rows.num_scales + group];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      float* const at = result + r * kPanelOutputs + i * kIntLanes;
      const DotFloats before = group == 0 ? DotFloats{} : load_as<DotFloats>(at);
      const DotFloats after = fma(to_floats(sums.of[r][i]), scale, before);
      std::memcpy(at, &after, sizeof after);
    }
  }
}

// results [R, 32] = R rows times a panel.
template <int R>
void multiply(const uint8_t* panel, int64_t num_quads, int64_t group_quads,
              const QuantizedRows& rows, Prefetch prefetch, float* results) {
  prefetch.spread(num_quads / kQuadsPerStep * kTilesPerPanel);
  for (int tile = 0; tile < kTilesPerPanel; ++tile)
    for (int64_t first = 0, group = 0; first < num_quads; first += group_quads, ++group) {
      const int64_t left = num_quads - first;
      add_group<R>(panel + first * kQuadBytes + tile * kTileLanes * 4,
                   left < group_quads ? left : group_quads, rows, group, first, prefetch,
                   results + tile * kTileLanes);
    }
}

using Multiply = void (*)(const uint8_t*, int64_t, int64_t, const QuantizedRows&, Prefetch, float*);

// The functions of R = 1 .. kMaxTileRows.
template <int... kRs>
Multiply choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr Multiply kFunctions[] = {&multiply<kRs + 1>...};
  return kFunctions[num_rows - 1];
}

Multiply choose(int64_t num_rows) {
  return choose_among(num_rows, std::make_integer_sequence<int, kMaxTileRows>{});
}

#if defined(__AMX_INT8__)

// results [R, 32] += the sums of a group, times its scales of x.
inline void add_tile_sums(const int32_t* sums, int64_t num_rows, const QuantizedRows& rows,
                          int64_t group, float* results) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const DotInts start = DotInts{} + rows.sums[r * rows.num_sums + group];
    const DotFloats scale = DotFloats{} + rows.scales[r * rows.num_scales + group];
#pragma GCC unroll 2
    for (int64_t n = r * kPanelOutputs; n < (r + 1) * kPanelOutputs; n += kIntLanes) {
      const DotFloats before = group == 0 ? DotFloats{} : load_as<DotFloats>(results + n);
      const DotFloats after = fma(to_floats(load_as<DotInts>(sums + n) + start), scale, before);
      std::memcpy(results + n, &after, sizeof after);
    }
  }
}

// As `multiply` for up to kMaxAmxRows rows. The quads of a group are a multiple of kAmxQuads.
inline void multiply_tiles(const AmxTiles& tiles, const uint8_t* panel, int64_t num_quads,
                           int64_t group_quads, int64_t num_rows, const QuantizedRows& rows,
                           Prefetch& prefetch, float* results) {
  alignas(64) int32_t sums[kMaxAmxRows * kPanelOutputs];
  prefetch.spread(divide_up(num_quads, group_quads));
  for (int64_t first = 0, group = 0; first < num_quads; first += group_quads, ++group) {
    const int64_t left = num_quads - first;
    prefetch.step();
    tiles.multiply(panel + first * kQuadBytes, left < group_quads ? left : group_quads,
                   rows.data + first * 4, rows.ld, sums);
    add_tile_sums(sums, num_rows, rows, group, results);
  }
}

#endif

struct Int8Task {
  const Weights& linear;
  Output output;
  QuantizedRows x;

  void run(Range rows, int64_t panel) const {
#if defined(__AMX_INT8__)
    const bool is_tiled = int8_quads(linear) % kAmxQuads == 0 && group_quads() % kAmxQuads == 0;
    if (is_tiled && rows.size() > kMaxTileRows) return run_tiles(rows, panel);
#endif
    const int64_t num_bytes = int8_panel_bytes(linear);
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), kMaxTileRows);
    const int64_t ahead = num_blocks == 1 ? kAheadBytes : num_bytes;
    const int64_t num_lines = rows.size() < kMinFetchedRows ? 0 : num_bytes / kLineBytes;
    alignas(64) float results[kMaxTileRows * kPanelOutputs];
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const Range lines = Range{0, num_lines}.part(i, num_blocks);
      const Prefetch prefetch(weights + ahead + lines.first * kLineBytes, lines.size());
      choose(block.size())(weights, int8_quads(linear), group_quads(), x.from(block.first), prefetch,
                           results);
      finish(block, panel, results);
    }
  }

 private:
  int64_t group_quads() const {
    return linear.group_size > 0 ? linear.group_size / 4 : int8_quads(linear);
  }

#if defined(__AMX_INT8__)
  void run_tiles(Range rows, int64_t panel) const {
    const int64_t num_bytes = int8_panel_bytes(linear);
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), kMaxAmxRows);
    alignas(64) float results[kMaxAmxRows * kPanelOutputs];
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const Range lines = Range{0, num_bytes / kLineBytes}.part(i, num_blocks);
      Prefetch prefetch(weights + num_bytes + lines.first * kLineBytes, lines.size());
      const AmxTiles tiles(block.size());
      multiply_tiles(tiles, weights, int8_quads(linear), group_quads(), block.size(),
                     x.from(block.first), prefetch, results);
      finish(block, panel, results);
    }
  }
#endif

  void finish(Range block, int64_t panel, const float* results) const {
    const float* scales = linear.scales + panel * kPanelOutputs;
    finish_rows_of(output, block, panel, [=](int64_t i, int lane) {
      return load_part(results + i * kPanelOutputs + lane) * load_part(scales + lane);
    });
  }
};

}  // namespace

void linear_int8(Pool& pool, const LinearCall& call) {
  const Weights& linear = call.any();
  const int64_t padded = divide_up(linear.num_inputs, kLanes) * kLanes;
  const int64_t group = linear.group_size > 0 ? linear.group_size : padded;
  const QuantizedRows x = quantize_rows(pool, call, {group, padded, int8_rotation(linear)});
  const int64_t row_bytes = x.ld * int64_t(sizeof(DotElement));
  share_panels(pool, call, row_bytes,
               [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
                 const Int8Task task{*group.linear, make_output(call, group, rows, panel, thread),
                                     x.from(group.first)};
                 task.run(rows, panel);
               });
}

}  // namespace quire::QUIRE_ISA
