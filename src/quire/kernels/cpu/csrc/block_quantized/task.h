// Divides the products of all forms of kBlockQuantized into tasks.
#pragma once
#include <utility>

#include "block_quantized/chunk.h"
#include "block_quantized/expanded_tile.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "block_quantized/paired_tile.h"
#endif
#include "block_quantized/quantize_groups.h"
#include "linear/epilogue.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

// Units of weights and some rows, as the innermost functions take them.
struct UnitProduct {
  const Weights& linear;
  const BlockQuantizedLayout& layout;
  const CodeTable& table;
  const uint8_t* unit;
  int64_t unit_bytes;  // from a unit to the next
  int64_t num_stretches;
  const uint8_t* x;  // of the first row
  int64_t ld;
  float* results;  // [rows, 32], from the first unit's on
};

using MultiplyUnits = void (*)(const UnitProduct&, Prefetch);

// Number of units that a function multiplies at once. Several rows take two, if a register is as
// wide as a unit: both use the loaded x (512 rows of Q8_0 took 1.3 times as long with one; Zen 5).
// A single row reads memory from first to last.
constexpr bool kHasWideRegisters = kIntLanes == kUnitOutputs;
constexpr int units_at_once(int num_rows) { return kHasWideRegisters && num_rows > 1 ? 2 : 1; }

// Number of registers of outputs that these functions take: of two units, unit_bytes apart, or of
// parts of one unit, as far as registers allow.
constexpr int registers_at_once(int num_rows) {
  if (kHasWideRegisters) return units_at_once(num_rows);
  if (kHasHalves) return 2;
  return kHas32Registers ? (num_rows == 1 ? 4 : 2) : 1;
}
template <int U>
constexpr int lanes_at_once = kHasWideRegisters ? kIntLanes : U * kIntLanes;

// The offset of register u.
inline int64_t unit_offset(int u, int64_t unit_bytes) {
  return kHasWideRegisters ? u * unit_bytes : 0;
}
constexpr int lane_offset(int u) { return kHasWideRegisters ? 0 : u * kIntLanes; }

// Up to kMaxStreamedRows rows read short units one after the other, and leave fetching to the
// processor, which keeps up there. Two rows of 1,536 x 512 then take 1.01 (Q8_0), 1.12 (Q4_K) and
// 1.02 (AWQ) times as long as one, instead of 1.12, 1.41 and 1.40; three rows of Q4_K 1.2 instead of
// 1.6. But with the longer units of 2,048 inputs they take 2.0 instead of 1.4 (one thread, Zen 4).
constexpr int kMaxStreamedRows = kHasWideRegisters ? 3 : 1;
constexpr int64_t kMaxStreamedBytes = 12 * 1024;

// The functions for 1 .. kMaxRows rows.
template <typename Form, int... kRs>
inline MultiplyUnits choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr MultiplyUnits kFunctions[] = {
      &Form::template multiply<kRs + 1, registers_at_once(kRs + 1)>...};
  return kFunctions[num_rows - 1];
}

// The same with one unit at once.
template <typename Form, int... kRs>
inline MultiplyUnits choose_streamed(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr MultiplyUnits kFunctions[] = {
      &Form::template multiply<kRs + 1, registers_at_once(1)>...};
  return kFunctions[num_rows - 1];
}

// As in linear_int4.cpp.
constexpr int64_t kMinFetchedRows = 2;
constexpr int64_t kAheadBytes = 8192;

// Whether one row, and streamed rows, prefetch weights too. With AVX2 one row takes 0.78 (Q4_K), 0.72
// (Q6_K) and 0.95 (Q8_0) times as long as without prefetches (one thread, Zen 3). With AVX-512 codes
// of 5 and 6 bits take 0.8 to 0.9 times as long, others 1.1 to 1.2 times (Zen 4).
//
// Each chunk prefetches its share of a stretch. Where a stretch prefetched all at once, reads waited
// for tens of prefetches: two rows of Q6_K took 1.3 times as long (AVX2, Zen 3), five rows of Q4_K,
// Q5_K and Q6_K 1.2 to 1.4 times (AVX-512, Zen 4).
inline bool fetches_always(const CodeFormat& code_format) {
  return kHasHalves || (kHasWideRegisters && code_format.width % 4 != 0);
}

// The chunks of U registers' outputs.
template <CodeKind kKind, int U>
struct UnitChunks {
  Chunk<kKind> units[U];
};

template <CodeKind kKind, int U>
inline UnitChunks<kKind, U> chunks_of(const uint8_t* first, int64_t unit_bytes,
                                      const CodeTable& table) {
  const auto chunk = [&](int u) {
    return Chunk<kKind>(first + unit_offset(u, unit_bytes) + lane_offset(u) * 4, table);
  };
  if constexpr (U == 1) return {{chunk(0)}};
  if constexpr (U == 2) return {{chunk(0), chunk(1)}};
  if constexpr (U == 4) return {{chunk(0), chunk(1), chunk(2), chunk(3)}};
}

// to: [R, 32], the lanes of the first register.
template <int R, int U>
inline void store_results(const DotFloats (&results)[R][U], float* to) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
      std::memcpy(to + r * kPanelOutputs + u * kIntLanes, &results[r][u], sizeof(DotFloats));
}

// sums [rows, 32] of a panel += the products of wide inputs, one after the other, each with one
// rounding (fma).
inline void add_wide(const Weights& linear, int64_t panel, const GroupedRows& x, Range rows,
                     float* sums) {
  if (linear.num_wide == 0) return;
  constexpr int kParts = int(kPanelOutputs) / kPartLanes;
  for (int64_t row = rows.first; row < rows.end; ++row, sums += kPanelOutputs) {
    const float* const inputs = x.wide_inputs(row);
    const float* weights = wide_weights(linear, panel);
    part results[kParts];
    for (int i = 0; i < kParts; ++i) results[i] = load_part(sums + i * kPartLanes);
    for (int64_t k = 0; k < linear.num_wide; ++k, weights += kPanelOutputs) {
      const part input = splat_part(inputs[k]);
      for (int i = 0; i < kParts; ++i)
        results[i] = fma(load_part(weights + i * kPartLanes), input, results[i]);
    }
    for (int i = 0; i < kParts; ++i) store(sums + i * kPartLanes, results[i]);
  }
}

// Requests a panel's weights of wide inputs, which are read after all its others.
inline void prefetch_wide(const Weights& linear, int64_t panel) {
  const int64_t num_bytes = linear.num_wide * kPanelOutputs * int64_t(sizeof(float));
  Prefetch prefetch((const uint8_t*)wide_weights(linear, panel), num_bytes / kLineBytes);
  prefetch.spread(1);
  prefetch.step();
}

// Form: kMaxRows and multiply<R, U>, a UnitProduct of R rows and U registers; kParts of a chunk,
// kLargest, its largest byte, and the Element of x. Where kExpands, also expand<Tile>, which writes
// a stretch of a unit to a tile.
template <typename Form>
struct BlockQuantizedTask {
  const Weights& linear;
  Output output;
  GroupedRows x;

  // Bytes of memory that run_expanded uses: a tile, then results.
  static int64_t expanded_bytes(Range rows) {
    const int64_t num_rows = rows.size() + kHasMatrixProducts;  // paired_tile.h
    return kMaxTileBytes + num_rows * kPanelOutputs * int64_t(sizeof(float));
  }

  void run_expanded(Range rows, int64_t panel, uint8_t* memory) const {
    constexpr int kParts = Form::kParts, kLargest = kHasByteSums ? Form::kLargest : 255;
    if (linear.code_format->has_offsets != 0)
      return expand_and_multiply<ExpandedTile<kParts, Seconds::kOffsets, kLargest>>(rows, panel,
                                                                                   memory);
    if constexpr (kHasByteSums && kParts == 1) {
      if (linear.code_format->has_zeros != 0)
        return expand_and_multiply<ExpandedTile<kParts, Seconds::kZeros, kLargest>>(rows, panel,
                                                                                   memory);
    }
    expand_and_multiply<ExpandedTile<kParts, Seconds::kNone, kLargest>>(rows, panel, memory);
  }

  template <typename Tile>
  void expand_and_multiply(Range rows, int64_t panel, uint8_t* memory) const {
    using Element = typename Form::Element;
    const BlockQuantizedLayout layout(linear);
    const CodeTable table(*linear.code_format);
    const int64_t unit_bytes = quantized_unit_bytes(linear);
    const int64_t num_stretches = quantized_stretches(linear);
    const uint8_t* unit = static_cast<const uint8_t*>(linear.weights) + panel * 2 * unit_bytes;
    auto* results = (float*)(memory + kMaxTileBytes);
    const int64_t num_chunks = layout.inputs / kChunkInputs;  // of a stretch
    const int64_t step = Tile::kMaxInputs / layout.inputs;
    for (int64_t first = 0; first < num_stretches; first += step) {
      const int64_t count = num_stretches - first < step ? num_stretches - first : step;
      for (int64_t i = 0; i < count; ++i)
        for (int u = 0; u < 2; ++u)
          Form::template expand<Tile>(
              linear, layout, table, unit + u * unit_bytes + (first + i) * layout.bytes,
              memory + i * num_chunks * Tile::kBytes + u * kVectorBytes);
      const uint8_t* of_tile = x.data + rows.first * x.ld +
                               first * num_chunks * kChunkRowBytes<Form::kParts, Element>;
      // Behind a panel's last tile, the next panel's first.
      const bool is_last = first + count == num_stretches;
      const uint8_t* next =
          is_last ? unit + 2 * unit_bytes : unit + (first + count) * layout.bytes;
      const NextTile next_tile{{next, next + unit_bytes}, step * layout.bytes / kLineBytes};
#if defined(__ARM_FEATURE_MATMUL_INT8)
      constexpr auto kMultiply = &multiply_paired_tile<Tile>;
#else
      constexpr auto kMultiply = &multiply_tile<Tile>;
#endif
      kMultiply(memory, count * num_chunks, of_tile, x.ld, rows.size(), first == 0, next_tile,
                results);
    }
    finish(rows, panel, results);
  }

  void run(Range rows, int64_t panel) const {
    const BlockQuantizedLayout layout(linear);
    const CodeTable table(*linear.code_format);
    const int64_t unit_bytes = quantized_unit_bytes(linear), num_bytes = 2 * unit_bytes;
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), Form::kMaxRows);
    const bool is_streamed = rows.size() <= kMaxStreamedRows && unit_bytes <= kMaxStreamedBytes;
    // Units that are read side by side are not what lies ahead of either.
    const bool is_sequential = num_blocks == 1 && units_at_once(int(rows.size())) == 1;
    const int64_t ahead = is_sequential ? kAheadBytes : num_bytes;
    const bool is_fetched = fetches_always(*linear.code_format) ||
                            (rows.size() >= kMinFetchedRows && !is_streamed);
    const int64_t num_lines = is_fetched ? num_bytes / kLineBytes : 0;
    alignas(64) float results[Form::kMaxRows * kPanelOutputs];
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const auto multiply =
          is_streamed ? choose_streamed<Form>(
                            block.size(), std::make_integer_sequence<int, kMaxStreamedRows>{})
                      : choose_among<Form>(block.size(),
                                           std::make_integer_sequence<int, Form::kMaxRows>{});
      const int units = is_streamed ? 1 : units_at_once(int(block.size()));
      for (int unit = 0; unit < 2; unit += units) {
        const int64_t num_parts = 2 / units;
        const Range lines =
            Range{0, num_lines}.part(i * num_parts + unit, num_blocks * num_parts);
        multiply({linear, layout, table, weights + unit * unit_bytes, unit_bytes,
                  quantized_stretches(linear), x.data + block.first * x.ld, x.ld,
                  results + unit * kUnitOutputs},
                 Prefetch(weights + ahead + lines.first * kLineBytes, lines.size()));
      }
      finish(block, panel, results);
    }
  }

 private:
  void finish(Range rows, int64_t panel, float* sums) const {
    add_wide(linear, panel, x, rows, sums);
    finish_rows(output, rows, panel, sums);
  }
};

template <typename Form>
inline void multiply_block_quantized(Pool& pool, const LinearCall& call) {
  const GroupedRows x = quantize_groups<Form::kParts, typename Form::Element>(pool, call);
  share_panels(pool, call, x.ld,
               [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
                 prefetch_wide(*group.linear, panel);
                 const GroupedRows own{x.data + group.first * x.ld, x.ld, x.wide};
                 const Output output = make_output(call, group, rows, panel, thread);
                 const BlockQuantizedTask<Form> task{*group.linear, output, own};
                 if constexpr (Form::kExpands) {
                   if (rows.size() >= kMinExpandedRows<Form::kLargest> &&
                       can_expand(*group.linear->code_format)) {
                     void* memory = pool.scratch(thread, task.expanded_bytes(rows));
                     return task.run_expanded(rows, panel, static_cast<uint8_t*>(memory));
                   }
                 }
                 task.run(rows, panel);
               });
}

void linear_flat(Pool&, const LinearCall&);       // linear_flat.cpp
void linear_two_level(Pool&, const LinearCall&);  // linear_two_level.cpp

}  // namespace quire::QUIRE_ISA
