// Linears with fp32, bf16 and fp8 weights.
//
// An item of work is a panel times a group of rows, which pass through it in blocks of up to
// Step::kMaxRows, their sums in registers. One block alone waits for nothing but memory: it
// prefetches weights a little ahead. Several blocks read a chunk of the panel from the L2 cache,
// one after another, and meanwhile all of them prefetch the next chunk, which follows it in memory:
// so reading and multiplying overlap however many rows there are. Where kPacksRows, linear_packed.h
// multiplies three or more rows of one linear instead. linear_float8.h describes weights of fp8.
#include "linear/epilogue.h"
#include "linear/linear.h"
#include "linear/linear_packed.h"
#include "linear/linear_tile.h"
#include "linear/panel_sums.h"
#include "linear/panel_task.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {
namespace {

// 128 KiB of weights: with the next chunk and the rows, what a core's L2 cache holds.
constexpr int64_t kMaxChunkSteps = 1024;
// With up to five rows the processor's own reading ahead does better than any prefetch (Zen 4);
// with more it falls behind, and weights must come early enough, but not before there is room. With
// AVX2 it keeps up with six rows too (0.53 ms without prefetching, 0.63 with; Zen 3).
constexpr int64_t kMinRowsToPrefetch = kRegisterLanes == 8 ? 7 : 6;
constexpr int64_t kAheadBytes = 7168;

template <typename X>
struct Rows {
  const X* data;
  int64_t ld;

  Rows from(int64_t m) const { return {data + m * ld, ld}; }
};

// Rows apart by a multiple of this many bytes meet in one set of the L1 cache, which has 8 ways: a
// block of 14 runs at 70% of its speed (Zen 4), and copying is cheaper.
constexpr int64_t kConflictBytes = 4096;
constexpr int64_t kCacheWays = 8;

template <typename X>
Rows<X> copy_layout(int64_t K) {
  const int64_t ld = divide_up(K, 64) * 64;
  return {nullptr, ld * int64_t(sizeof(X)) % kConflictBytes == 0 ? ld + 64 : ld};
}

template <typename Step, typename X, typename T>
void copy_row(const T* from, X* to, int64_t K, int64_t padded) {
  constexpr float kFactor = input_factor<Step>();
  int64_t k = 0;
  if constexpr (sizeof(X) == sizeof(T) && kFactor == 1.0f) {
    std::memcpy(to, from, K * sizeof(T));
    k = K;
  } else {
    for (; k + kLanes <= K; k += kLanes) store(to + k, load(from + k) * kFactor);
    for (; k < K; ++k) to[k] = as_float(from[k]) * kFactor;
  }
  for (; k < padded; ++k) to[k] = 0;
}

// x as the tiles read it: of type X, times the step's factor, whole steps of inputs, rows that
// don't fight for the cache.
template <typename Step, typename T>
Rows<typename Step::X> prepare(Pool& pool, const LinearCall& call) {
  using X = typename Step::X;
  const int64_t K = call.any().num_inputs, padded = divide_up(K, Step::kInputs) * Step::kInputs;
  const bool conflicts = call.M > kCacheWays && call.ldx * int64_t(sizeof(X)) % kConflictBytes == 0;
  if constexpr (sizeof(X) == sizeof(T) && input_factor<Step>() == 1.0f)
    if (K == padded && !conflicts && call.offsets == nullptr)
      return {static_cast<const T*>(call.x), call.ldx};
  Rows<X> rows = copy_layout<X>(K);
  auto* copy = static_cast<X*>(pool.shared(0, call.M * rows.ld * sizeof(X)));
  constexpr int64_t kRows = 16;
  pool.parallel(divide_up(call.M, kRows), [&](int64_t task, int) {
    const int64_t end = call.M < (task + 1) * kRows ? call.M : (task + 1) * kRows;
    for (int64_t m = task * kRows; m < end; ++m)
      copy_row<Step, X, T>(call.row<T>(m), copy + m * rows.ld, K, padded);
  });
  rows.data = copy;
  return rows;
}

template <typename Step>
class DenseTask {
 public:
  // x: the group's rows.
  DenseTask(const LinearGroup& group, const Output& output, Rows<typename Step::X> x)
      : x_(x),
        output_(output),
        linear_(*group.linear) {}

  // sums: sums_bytes
  void run(Range rows, int64_t panel, float* sums) const {
    sum_panel<Step>(linear_, panel, rows.size(), kMaxSteps, sums,
                    [&](Range steps, bool is_first, float* to, uint8_t* wide) {
                      multiply_chunk(rows, panel, steps, is_first, to, wide);
                    });
    finish_rows(output_, rows, panel, sums);
  }

 private:
  static constexpr int64_t kMaxSteps =
      kIsFloat8<Step> ? kMaxWideInputs / Step::kInputs : kMaxChunkSteps;

  void multiply_chunk(Range rows, int64_t panel, Range steps, bool is_first, float* sums,
                      uint8_t* wide) const {
    const uint8_t* weights = step_of_panel<Step>(linear_, panel, steps.first);
    const int64_t num_blocks = divide_up(rows.size(), Step::kMaxRows);
    const int64_t num_lines = steps.size() * kStepBytes / kLineBytes;
    const int64_t ahead = num_blocks > 1 ? num_lines * kLineBytes : kAheadBytes;
    const bool prefetches = rows.size() >= kMinRowsToPrefetch;
    const auto multiply = [&](auto step, const uint8_t* read, int64_t num_steps) {
      for (int64_t i = 0; i < num_blocks; ++i) {
        const Range block = rows.part(i, num_blocks);
        const Range lines = Range{0, prefetches ? num_lines : 0}.part(i, num_blocks);
        const Prefetch prefetch(weights + ahead + lines.first * kLineBytes, lines.size());
        choose<decltype(step)>(block.size())(
            read, num_steps, x_.data + block.first * x_.ld + steps.first * Step::kInputs, x_.ld,
            prefetch, is_first, sums + (block.first - rows.first) * kPanelOutputs);
      }
    };
    with_weights<Step>(weights, steps.size(), wide, multiply);
  }

  Rows<typename Step::X> x_;
  Output output_;
  const Weights& linear_;
};

template <typename Step, typename T>
void linear_dense(Pool& pool, const LinearCall& call) {
  if constexpr (kPacksRows)
    if (call.M >= kMinPackedRows<Step> && call.num_groups == 1 && call.groups->first == 0 &&
        call.groups->count == call.M)
      return linear_packed<Step, T>(pool, call);
  const Rows<typename Step::X> x = prepare<Step, T>(pool, call);
  const int64_t row_bytes = x.ld * int64_t(sizeof *x.data);
  share_panels(pool, call, row_bytes, [&](const LinearGroup& group, Range rows, int64_t panel,
                                          int thread) {
    const Output output = make_output(call, group, rows, panel, thread);
    const DenseTask<Step> task(group, output, x.from(group.first));
    void* const memory = pool.scratch(thread, sums_bytes<Step>(rows.size()));
    task.run(rows, panel, static_cast<float*>(memory));
  });
}

// Codes are made wider only if a group of rows passes through them in several blocks.
template <typename Dense, typename T>
void linear_float8_as(Pool& pool, const LinearCall& call) {
  if constexpr (Dense::kInputsAtOnce == 1) {
    bool are_few = true;
    for (int64_t g = 0; g < call.num_groups; ++g)
      are_few = are_few && call.groups[g].count <= Float8Step<Dense, false>::kMaxRows;
    if (are_few) return linear_dense<Float8Step<Dense, false>, T>(pool, call);
  }
  linear_dense<Float8Step<Dense, true>, T>(pool, call);
}

}  // namespace

void linear_f32(Pool& pool, const LinearCall& call) { linear_dense<F32Step, float>(pool, call); }

void linear_bf16(Pool& pool, const LinearCall& call) {
  linear_dense<BF16Step, uint16_t>(pool, call);
}

void linear_float8(Pool& pool, const LinearCall& call) {
  // Products of bf16 are faster than those of fp32 only if an instruction adds a pair of them.
  using BF16 = std::conditional_t<BF16Step::kInputsAtOnce == 2, BF16Step, F32Step>;
  if (call.dtype == kBF16)
    linear_float8_as<BF16, uint16_t>(pool, call);
  else
    linear_float8_as<F32Step, float>(pool, call);
}

}  // namespace quire::QUIRE_ISA
