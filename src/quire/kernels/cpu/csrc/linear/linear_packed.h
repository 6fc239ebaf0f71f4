// Dense linears of three or more rows, with AVX2 and with AVX-512 that has no BF16.
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
#include "linear/panel_sums.h"
#include "linear/panel_task.h"

namespace quire::QUIRE_ISA {

// Other sets have registers for more rows, whose addresses cost less. With AVX-512 three rows are
// 1.3 times as fast if packed, 48 or 256 rows 1.02 times (bf16; Zen 4).
#if defined(__AVX512BF16__)
constexpr bool kPacksRows = false;
#else
constexpr bool kPacksRows = kRegisterLanes >= 8;
#endif
// Up to two rows have registers for a whole panel. With fp32 weights they are slower if packed (0.8
// to 0.95 of the speed; Zen 3), three rows are faster with all weights (1.3 to 1.9 times).
// Rows that meet fp8 codes are copied anyway, and GCC keeps the sums of one row in registers only if
// it is packed.
template <typename Step>
constexpr int64_t kMinPackedRows = kIsFloat8<Step> ? 1 : 3;

// 24 KiB of weights: with the inputs of a block, 9 KiB for bf16 weights, about a core's L1 cache.
// 128 or 256 steps are as fast within 3% (Zen 3). AVX-512 has blocks of twice as many rows.
constexpr int64_t kMaxPackedSteps = kRegisterLanes == 8 ? 192 : 128;

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) { return to_float(x); }

// to [K, R] = rows [R] of K numbers, as fp32, times `factor`.
template <int R, typename T>
void interleave(const T* const* rows, int64_t K, float factor, float* to) {
  const T* from[R];
  for (int r = 0; r < R; ++r) from[r] = rows[r];
  for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) to[k * R + r] = as_float(from[r][k]) * factor;
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
  constexpr float kFactor = input_factor<Step>();
  const int64_t K = call.any().num_inputs, ld = divide_up(K, Step::kInputs) * Step::kInputs;
  auto* const packed = static_cast<float*>(pool.shared(0, call.M * ld * int64_t(sizeof(float))));
  pool.parallel(divide_up(call.M, Step::kMaxRows), [&](int64_t task, int) {
    const Range block = block_at<Step>(task * Step::kMaxRows, call.M);
    const int64_t count = block.size();
    float* const to = packed + block.first * ld;
    const T* rows[Step::kMaxRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = call.row<T>(block.first + r);
    if (count == Step::kMaxRows)
      interleave<Step::kMaxRows>(rows, K, kFactor, to);
    else
      for (int64_t k = 0; k < K; ++k)
        for (int64_t r = 0; r < count; ++r) to[k * count + r] = as_float(rows[r][k]) * kFactor;
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
        linear_(linear) {}

  // rows: begin at a block. sums: sums_bytes
  void run(Range rows, int64_t panel, float* sums) const {
    sum_panel<Step>(linear_, panel, rows.size(), kMaxSteps, sums,
                    [&](Range steps, bool is_first, float* to, uint8_t* wide) {
                      multiply_chunk(rows, panel, steps, is_first, to, wide);
                    });
    finish_rows(output_, rows, panel, sums);
  }

 private:
  static constexpr int64_t kMaxSteps =
      kIsFloat8<Step> ? kMaxWideInputs / Step::kInputs : kMaxPackedSteps;

  void multiply_chunk(Range rows, int64_t panel, Range steps, bool is_first, float* sums,
                      uint8_t* wide) const {
    const uint8_t* const weights = step_of_panel<Step>(linear_, panel, steps.first);
    const int64_t num_blocks = divide_up(rows.size(), Step::kMaxRows);
    const int64_t num_lines = steps.size() * kStepBytes / kLineBytes;
    const auto multiply = [&](auto step, const uint8_t* read, int64_t num_steps) {
      for (int64_t i = 0; i < num_blocks; ++i) {
        const Range block = block_at<Step>(rows.first + i * Step::kMaxRows, rows.end);
        const Range lines = Range{0, num_lines}.part(i, num_blocks);
        const Prefetch prefetch(weights + (num_lines + lines.first) * kLineBytes, lines.size());
        choose<decltype(step), true>(block.size())(
            read, num_steps, x_.at(block, steps.first * Step::kInputs), 0, prefetch, is_first,
            sums + (block.first - rows.first) * kPanelOutputs);
      }
    };
    with_weights<Step>(weights, steps.size(), wide, multiply);
  }

  PackedRows x_;
  Output output_;
  const Weights& linear_;
};

// A call with one linear, whose x has elements T.
template <typename Step, typename T>
void linear_packed(Pool& pool, const LinearCall& call) {
  const PackedRows x = pack_rows<Step, T>(pool, call);
  // Twice as many rows meet codes that are made wider: 512 rows take 0.95 times as long (Zen 3).
  const int64_t row_bytes = x.ld * int64_t(sizeof(float)) / (kIsFloat8<Step> ? 2 : 1);
  share_panels<Step::kMaxRows>(
      pool, call, row_bytes,
      [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
        const Output output = make_output(call, group, rows, panel, thread);
        const PackedTask<Step> task(*group.linear, output, x);
        void* const memory = pool.scratch(thread, sums_bytes<Step>(rows.size()));
        task.run(rows, panel, static_cast<float*>(memory));
      });
}

}  // namespace quire::QUIRE_ISA
