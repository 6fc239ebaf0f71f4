// The innermost loop of dense linears.
//
// It multiplies R rows of x by one panel of weights, over all of K.
//
// An output element has one accumulator, to which its products are added in the order of K, one
// instruction after another, whatever R: so a row's results do not depend on its neighbours. With
// AVX-512 BF16, and with the BF16 extension of ARM64, an instruction adds a pair of products.
#pragma once
#include <utility>

#include "linear/linear.h"
#include "linear/panel_task.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// A register, how many of them are a tile's width, and how many rows of accumulators fit beside
// the weights and what is broadcast.
#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16, kTileRegisters = 2, kMaxTileRows = 14;
constexpr int kMaxWidenedRows = 12;  // bf16 weights become two registers of fp32 each
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8, kTileRegisters = 4, kMaxTileRows = 6, kMaxWidenedRows = 6;
#elif defined(__aarch64__)
constexpr int kRegisterLanes = 4, kTileRegisters = 4, kMaxTileRows = 6, kMaxWidenedRows = 6;
#else
constexpr int kRegisterLanes = 4, kTileRegisters = 4, kMaxTileRows = 2, kMaxWidenedRows = 2;
#endif
typedef float Register __attribute__((vector_size(kRegisterLanes * 4)));
typedef uint32_t RegisterBits __attribute__((vector_size(kRegisterLanes * 4)));
// With AVX2 one or two rows take a whole panel at once, which gives them enough independent sums and
// reads the panel from first to last. More rows have registers for half of it.
template <typename Step>
constexpr int kMaxPanelRows = 2;
template <typename Step>
constexpr int tile_registers(int num_rows) {
  return kRegisterLanes == 8 && num_rows > kMaxPanelRows<Step> ? 2 : kTileRegisters;
}

// One step of the loop: kInputs inputs of a row of x, read as X. Of these, kInputsAtOnce meet their
// weights, N registers for an input, before the next rows do.
struct F32Step {
  using X = float;
  static constexpr int kInputs = 1, kInputsAtOnce = 1, kMaxRows = kMaxTileRows;

  template <int N>
  struct Weights {
    Register of[N];

    Weights() = default;
    Weights(const uint8_t* w, int) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) of[i] = load_as<Register>(w + i * sizeof(Register));
    }
    void add(Register (&sums)[N], const float* x) const {
      const Register value = splat_part(*x);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sums[i] = fma(of[i], value, sums[i]);
    }
  };
};

#if defined(__AVX512BF16__)
struct BF16Step {
  using X = uint16_t;
  static constexpr int kInputs = 2, kInputsAtOnce = 2, kMaxRows = kMaxTileRows;

  template <int N>
  struct Weights {
    __m512bh of[N];

    Weights(const uint8_t* w, int) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) of[i] = load_as<__m512bh>(w + i * sizeof(__m512bh));
    }
    void add(Register (&sums)[N], const uint16_t* x) const {
      const auto pair = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x));
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
        sums[i] = (Register)_mm512_dpbf16_ps((__m512)sums[i], of[i], pair);
    }
  };
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct BF16Step {
  using X = uint16_t;
  static constexpr int kInputs = 2, kInputsAtOnce = 2, kMaxRows = kMaxTileRows;

  template <int N>
  struct Weights {
    bfloat16x8_t of[N];

    Weights(const uint8_t* w, int) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) of[i] = load_as<bfloat16x8_t>(w + i * sizeof(bfloat16x8_t));
    }
    void add(Register (&sums)[N], const uint16_t* x) const {
      const bfloat16x4_t pair = vcreate_bf16(load_as<uint32_t>(x));
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sums[i] = (Register)vbfdotq_lane_f32(sums[i], of[i], pair, 0);
    }
  };
};
#else
struct BF16Step {
  using X = float;
  static constexpr int kInputs = 2, kInputsAtOnce = 1, kMaxRows = kMaxWidenedRows;

  template <int N>
  struct Weights : F32Step::Weights<N> {
    // The even inputs are the low halves of words, the odd ones the high halves.
    Weights(const uint8_t* w, int input) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const auto pairs = load_as<RegisterBits>(w + i * sizeof(RegisterBits));
        this->of[i] = (Register)(input == 0 ? pairs << 16 : pairs & 0xffff0000u);
      }
    }
  };
};
#endif

constexpr int64_t kStepBytes = kPanelOutputs * 4;
constexpr int64_t kStepsPerGroup = 8;

// Rows of x, [R, ldx], or if kIsPacked [inputs, R]: a packed block is one stream of memory, which
// the loop addresses with one register. (GCC keeps six rows' distances on the stack, and loads one
// for almost every number that it broadcasts.)
template <typename Step, int R, int N, bool kIsPacked>
inline void add_steps(const uint8_t*& weights, const typename Step::X*& x, int64_t ldx,
                      int num_steps, Register (&sums)[R][N]) {
#pragma GCC unroll 8
  for (int step = 0; step < num_steps; ++step)
#pragma GCC unroll 4
    for (int input = 0; input < Step::kInputs; input += Step::kInputsAtOnce) {
      const typename Step::template Weights<N> now(weights + step * kStepBytes, input);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        if constexpr (kIsPacked)
          now.add(sums[r], x + (step * Step::kInputs + input) * R + r);
        else
          now.add(sums[r], x + r * ldx + step * Step::kInputs + input);
    }
  weights += num_steps * kStepBytes;
  x += num_steps * Step::kInputs * (kIsPacked ? R : 1);
}

// Sums between memory, in lines of a panel's outputs, and registers.
//
// Sums of packed rows move register by register, as they do once in a chunk: GCC copies a whole
// array by way of the stack (0.92 to 0.98 times the speed with 16 and 128 rows; Zen 3).
template <bool kIsPacked, int R, int N>
inline void read_sums(const float* results, Register (&sums)[R][N]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const float* const line = results + r * kPanelOutputs;
    if constexpr (kIsPacked) {
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sums[r][i] = load_as<Register>(line + i * kRegisterLanes);
    } else {
      std::memcpy(sums[r], line, sizeof sums[r]);
    }
  }
}

template <bool kIsPacked, int R, int N>
inline void write_sums(const Register (&sums)[R][N], float* results) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* const line = results + r * kPanelOutputs;
    if constexpr (kIsPacked) {
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const Register sum = sums[r][i];
        std::memcpy(line + i * kRegisterLanes, &sum, sizeof sum);
      }
    } else {
      std::memcpy(line, sums[r], sizeof sums[r]);
    }
  }
}

// sums [R, 32] += x [R, ldx] times `num_steps` steps of a panel; starts from zero if `is_first`.
// kIsPacked: x is [inputs, R].
template <typename Step, int R, bool kIsPacked = false>
void multiply(const uint8_t* panel, int64_t num_steps, const typename Step::X* rows, int64_t ldx,
              Prefetch prefetch, bool is_first, float* results) {
  constexpr int kRegisters = tile_registers<Step>(R), kTileLanes = kRegisterLanes * kRegisters;
  constexpr int kTilesPerPanel = int(kPanelOutputs) / kTileLanes;
  const int64_t num_groups = num_steps / kStepsPerGroup;
  prefetch.spread(num_groups * kTilesPerPanel);
  for (int tile = 0; tile < kTilesPerPanel; ++tile) {
    float* const result = results + tile * kTileLanes;
    Register sums[R][kRegisters] = {};
    if (!is_first) read_sums<kIsPacked>(result, sums);
    const uint8_t* weights = panel + tile * kTileLanes * 4;
    const typename Step::X* x = rows;
    for (int64_t group = 0; group < num_groups; ++group) {
      prefetch.step();
      add_steps<Step, R, kRegisters, kIsPacked>(weights, x, ldx, kStepsPerGroup, sums);
    }
    for (int64_t step = num_groups * kStepsPerGroup; step < num_steps; ++step)
      add_steps<Step, R, kRegisters, kIsPacked>(weights, x, ldx, 1, sums);
    write_sums<kIsPacked>(sums, result);
  }
}

template <typename Step>
using Multiply = void (*)(const uint8_t*, int64_t, const typename Step::X*, int64_t, Prefetch, bool,
                          float*);

// The functions of R = 1 .. Step::kMaxRows.
template <typename Step, bool kIsPacked, int... kRs>
Multiply<Step> choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr Multiply<Step> kFunctions[] = {&multiply<Step, kRs + 1, kIsPacked>...};
  return kFunctions[num_rows - 1];
}

template <typename Step, bool kIsPacked = false>
Multiply<Step> choose(int64_t num_rows) {
  constexpr auto kAll = std::make_integer_sequence<int, Step::kMaxRows>{};
  return choose_among<Step, kIsPacked>(num_rows, kAll);
}

}  // namespace quire::QUIRE_ISA
