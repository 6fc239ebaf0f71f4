// Dense linears of three or more rows, with AVX2.
//
// Blocks of rows are packed in the order in which a tile reads them: so a tile has one address for
// all its rows, and the processor reads x ahead as one stream. A panel is multiplied in chunks that
// stay in the L1 cache, with a block's inputs, while all blocks pass; sums rest in memory between
// chunks, so the order of an output's sum is that of every other call. Each block prefetches a part
// of the next chunk.
#pragma once
#include "linear/epilogue.h"
#include "linear/linear.h"
#include "linear/linear_tile.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

// Other sets have registers for more rows, whose addresses cost less.
constexpr bool kPacksRows = kRegisterLanes == 8;
// Up to two rows have registers for a whole panel. With fp32 weights they are slower if packed (0.8
// to 0.95 of the speed; Zen 3), three rows are faster with all weights (1.3 to 1.9 times).
constexpr int64_t kMinPackedRows = 3;

// 24 KiB of weights: with the inputs of a block, 9 KiB for bf16 weights, about a core's L1 cache.
// 128 or 256 steps are as fast within 3% (Zen 3).
constexpr int64_t kMaxPackedSteps = 192;

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) { return to_float(x); }

// to [K, R] = rows [R] of K numbers, as fp32.
template <int R, typename T>
void interleave(const T* const* rows, int64_t K, float* to) {
  const T* from[R];
  for (int r = 0; r < R; ++r) from[r] = rows[r];
  for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) to[k * R + r] = as_float(from[r][k]);
}

// The rows of a call as blocks of kMaxRows, of which the last may have fewer: a block is [ld, its
// rows], zeros behind the inputs, and begins at ld times the number of its first row.
struct PackedRows {
  const float* data;
  int64_t ld;  // inputs, padded to whole steps

  const float* at(Range block, int64_t input) const {
    return data + block.first * ld + input * block.size();
  }
};

// The block that begins at `first`, of rows that end at `end`.
template <typename Step>
Range block_at(int64_t first, int64_t end) {
  return {first, first + Step::kMaxRows < end ? first + Step::kMaxRows : end};
}

// Uses the pool's shared memory, slot 0.
template <typename Step, typename T>
PackedRows pack_rows(Pool& pool, const LinearCall& call) {
  const int64_t K = call.any().num_inputs, ld = divide_up(K, Step::kInputs) * Step::kInputs;
  auto* const packed = static_cast<float*>(pool.shared(0, call.M * ld * int64_t(sizeof(float))));
  pool.parallel(divide_up(call.M, Step::kMaxRows), [&](int64_t task, int) {
    const Range block = block_at<Step>(task * Step::kMaxRows, call.M);
    const int64_t count = block.size();
    float* const to = packed + block.first * ld;
    const T* rows[Step::kMaxRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = call.row<T>(block.first + r);
    if (count == Step::kMaxRows)
      interleave<Step::kMaxRows>(rows, K, to);
    else
      for (int64_t k = 0; k < K; ++k)
        for (int64_t r = 0; r < count; ++r) to[k * count + r] = as_float(rows[r][k]);
    for (int64_t i = K * count; i < ld * count; ++i) to[i] = 0;
  });
  return {packed, ld};
}

template <typename Step>
class PackedTask {
 public:
  PackedTask(const Weights& linear, const Output& output, PackedRows x)
      : x_(x),
        output_(output),
        weights_(static_cast<const uint8_t*>(linear.weights)),
        steps_{0, divide_up(linear.num_inputs, Step::kInputs)} {}

  // rows: begin at a block. sums: [rows, 32]
  void run(Range rows, int64_t panel, float* sums) const {
    const int64_t num_chunks = divide_up(steps_.size(), kMaxPackedSteps);
    for (int64_t i = 0; i < num_chunks; ++i)
      multiply_chunk(rows, panel, steps_.part(i, num_chunks), sums);
    for (int64_t row = rows.first; row < rows.end; ++row) {
      const float* line = sums + (row - rows.first) * kPanelOutputs;
      finish_panel(output_, row, panel, load(line), load(line + kUnitOutputs));
    }
  }

 private:
  void multiply_chunk(Range rows, int64_t panel, Range steps, float* sums) const {
    const uint8_t* const weights = weights_ + (panel * steps_.end + steps.first) * kStepBytes;
    const int64_t num_blocks = divide_up(rows.size(), Step::kMaxRows);
    const int64_t num_lines = steps.size() * kStepBytes / kLineBytes;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = block_at<Step>(rows.first + i * Step::kMaxRows, rows.end);
      const Range lines = Range{0, num_lines}.part(i, num_blocks);
      const Prefetch prefetch(weights + (num_lines + lines.first) * kLineBytes, lines.size());
      choose<Step, true>(block.size())(weights, steps.size(),
                                       x_.at(block, steps.first * Step::kInputs), 0, prefetch,
                                       steps.first == 0,
                                       sums + (block.first - rows.first) * kPanelOutputs);
    }
  }

  PackedRows x_;
  Output output_;
  const uint8_t* weights_;
  Range steps_;
};

// A call with one linear, whose x has elements T.
template <typename Step, typename T>
void linear_packed(Pool& pool, const LinearCall& call) {
  const PackedRows x = pack_rows<Step, T>(pool, call);
  share_panels<Step::kMaxRows>(
      pool, call, x.ld * int64_t(sizeof(float)),
      [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
        const int64_t num_bytes = rows.size() * kPanelOutputs * int64_t(sizeof(float));
        const Output output = make_output(call, group, rows, panel, thread);
        const PackedTask<Step> task(*group.linear, output, x);
        task.run(rows, panel, static_cast<float*>(pool.scratch(thread, num_bytes)));
      });
}

}  // namespace quire::QUIRE_ISA
