// The innermost loop of dense linears.
//
// It multiplies R rows of x by one panel of weights, over all of K.
//
// An output element has one accumulator, to which its products are added in the order of K, one
// instruction after another, whatever R: so a row's results do not depend on its neighbours. With
// AVX-512 BF16 an instruction adds a pair of products.
#pragma once
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
constexpr int kRegisterLanes = 8, kTileRegisters = 4, kMaxTileRows = 3, kMaxWidenedRows = 3;
#else
constexpr int kRegisterLanes = 4, kTileRegisters = 4, kMaxTileRows = 2, kMaxWidenedRows = 2;
#endif
typedef float Register __attribute__((vector_size(kRegisterLanes * 4)));
typedef uint32_t RegisterBits __attribute__((vector_size(kRegisterLanes * 4)));
constexpr int kTileLanes = kRegisterLanes * kTileRegisters;
constexpr int kTilesPerPanel = int(kPanelOutputs) / kTileLanes;

template <typename T>
inline T load_as(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// One step of the loop: the weights of kInputs inputs in registers, and how a row of x, read as X,
// meets them.
struct F32Step {
  using X = float;
  static constexpr int kInputs = 1, kMaxRows = kMaxTileRows;
  Register weights[kTileRegisters];

  explicit F32Step(const uint8_t* w) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i)
      weights[i] = load_as<Register>(w + i * sizeof(Register));
  }
  void add(Register (&sums)[kTileRegisters], const float* x) const {
    const Register value = Register{} + *x;
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i) sums[i] = multiply_add(weights[i], value, sums[i]);
  }
};

#if defined(__AVX512BF16__)
struct BF16Step {
  using X = uint16_t;
  static constexpr int kInputs = 2, kMaxRows = kMaxTileRows;
  __m512bh weights[kTileRegisters];

  explicit BF16Step(const uint8_t* w) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i)
      weights[i] = load_as<__m512bh>(w + i * sizeof(__m512bh));
  }
  void add(Register (&sums)[kTileRegisters], const uint16_t* x) const {
    const auto pair = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x));
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i)
      sums[i] = (Register)_mm512_dpbf16_ps((__m512)sums[i], weights[i], pair);
  }
};
#else
struct BF16Step {
  using X = float;
  static constexpr int kInputs = 2, kMaxRows = kMaxWidenedRows;
  Register even[kTileRegisters], odd[kTileRegisters];

  explicit BF16Step(const uint8_t* w) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i) {
      const auto pairs = load_as<RegisterBits>(w + i * sizeof(RegisterBits));
      even[i] = (Register)(pairs << 16);
      odd[i] = (Register)(pairs & 0xffff0000u);
    }
  }
  void add(Register (&sums)[kTileRegisters], const float* x) const {
    const Register first = Register{} + x[0], second = Register{} + x[1];
#pragma GCC unroll 8
    for (int i = 0; i < kTileRegisters; ++i)
      sums[i] = multiply_add(odd[i], second, multiply_add(even[i], first, sums[i]));
  }
};
#endif

constexpr int64_t kStepBytes = kPanelOutputs * 4;
constexpr int64_t kStepsPerGroup = 8;

template <typename Step, int R>
inline void add_steps(const uint8_t*& weights, const typename Step::X*& x, int64_t ldx,
                      int num_steps, Register (&sums)[R][kTileRegisters]) {
#pragma GCC unroll 8
  for (int step = 0; step < num_steps; ++step) {
    const Step now(weights + step * kStepBytes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) now.add(sums[r], x + r * ldx + step * Step::kInputs);
  }
  weights += num_steps * kStepBytes;
  x += num_steps * Step::kInputs;
}

// sums [R, 32] += x [R, ldx] times `num_steps` steps of a panel; starts from zero if `is_first`.
template <typename Step, int R>
void multiply(const uint8_t* panel, int64_t num_steps, const typename Step::X* rows, int64_t ldx,
              Prefetch prefetch, bool is_first, float* results) {
  const int64_t num_groups = num_steps / kStepsPerGroup;
  prefetch.spread(num_groups * kTilesPerPanel);
  for (int tile = 0; tile < kTilesPerPanel; ++tile) {
    float* const result = results + tile * kTileLanes;
    Register sums[R][kTileRegisters] = {};
    if (!is_first)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) std::memcpy(sums[r], result + r * kPanelOutputs, sizeof sums[r]);
    const uint8_t* weights = panel + tile * kTileLanes * 4;
    const typename Step::X* x = rows;
    for (int64_t group = 0; group < num_groups; ++group) {
      prefetch.step();
      add_steps<Step, R>(weights, x, ldx, kStepsPerGroup, sums);
    }
    for (int64_t step = num_groups * kStepsPerGroup; step < num_steps; ++step)
      add_steps<Step, R>(weights, x, ldx, 1, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) std::memcpy(result + r * kPanelOutputs, sums[r], sizeof sums[r]);
  }
}

}  // namespace quire::QUIRE_ISA
