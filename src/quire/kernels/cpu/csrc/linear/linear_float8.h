// The layout of kFloat8: a checkpoint's weights of 8 bits (e4m3), each as it is stored.
//
//   weights  [N/32 panels][K/4][32][4]   e4m3: a sign, 4 bits of exponent, 3 of mantissa
//   scales   [N/32 panels][groups][32]   fp32
//
// Of four inputs, the second and the third have changed places. K is a multiple of four, and so is
// Weights::group_size, the inputs of an output that share a scale; 0: all of them.
//
//   out[m, n] = sum over groups g of scale[g, n] * (sum over k in g of x[m, k] * weight[n, k])
//
// x keeps its dtype, and a weight becomes fp32 or bf16 without rounding. The sums are those of a
// dense linear of the wider weights; then each is scaled and added in the order of the groups.
//
// A code that stands for NaN makes its scale NaN, as all of its group's results would be.
#pragma once
#include "linear/linear.h"

namespace quire {

static inline int64_t float8_group_inputs(const Weights& linear) {
  return linear.group_size > 0 ? linear.group_size : linear.num_inputs;
}

static inline int64_t float8_groups(const Weights& linear) {
  return divide_up(linear.num_inputs, float8_group_inputs(linear));
}

// Of an output's input k, from its input 0 on.
static inline int64_t float8_offset(int64_t k) {
  constexpr int64_t kPlaces[] = {0, 2, 1, 3};
  return k / 4 * 4 * kPanelOutputs + kPlaces[k % 4];
}

static inline int64_t float8_panel_bytes(const Weights& linear) {
  return linear.num_inputs * kPanelOutputs;
}

}  // namespace quire

#if defined(QUIRE_ISA)
#include "linear/linear_tile.h"

namespace quire::QUIRE_ISA {

typedef int16_t RegisterShorts __attribute__((vector_size(kRegisterLanes * 4)));

// Two neighbouring inputs of a lane as pairs of bf16, each times 2^-120: seven bits move to where
// bf16 has the low bits of its exponent and the high ones of its mantissa. codes: of four inputs.
inline RegisterBits float8_pairs(const uint8_t* codes, bool is_second) {
  const auto stored = load_as<RegisterShorts>(codes);
  return (RegisterBits)(((is_second ? stored : stored << 8) >> 4) & int16_t(0x87f0));
}

inline Register first_of(RegisterBits pairs) { return (Register)(pairs << 16); }
inline Register second_of(RegisterBits pairs) { return (Register)(pairs & 0xffff0000u); }

// A step of four inputs, of fp32 or bf16 as Dense has them, the step of a dense linear.
//
// If kIsWide, codes become weights of Dense first, for many rows. Otherwise a few rows read them as
// they are: weights are 2^-120 times too small, and x is multiplied by 2^64, which rounds nothing
// unless |x| reaches 2^64. Wide weights of fp32 are 2^-56 times too small, and x stays as it is. So
// both have the same sums, 2^-56 times those of the formula. Pairs of bf16 have their own size,
// since their product takes numbers that are too small for zeros.
template <typename Dense, bool kIsWideStep>
struct Float8Step {
  using X = typename Dense::X;
  using Wide = Dense;
  static constexpr bool kIsPairs = Dense::kInputsAtOnce == 2, kIsWide = kIsWideStep;
  static constexpr int kInputs = 4, kInputsAtOnce = 1;
  static constexpr int kMaxRows = kIsWide ? Dense::kMaxRows : kMaxWidenedRows;
  static constexpr float kInputFactor = kIsWide ? 1.0f : 0x1p64f;
  static constexpr float kWideFactor = kIsPairs ? 0x1p120f : 0x1p64f;
  static constexpr float kScaleFactor = kIsPairs ? 1.0f : 0x1p56f;
  static_assert(kIsWide || !kIsPairs);

  template <int N>
  struct Weights : F32Step::Weights<N> {
    Weights(const uint8_t* w, int input) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        const RegisterBits pairs = float8_pairs(w + i * sizeof(Register), input >= 2);
        this->of[i] = input % 2 == 0 ? first_of(pairs) : second_of(pairs);
      }
    }
  };

  // to: [num_steps * 4 / Dense::kInputs] steps of Dense.
  static void widen(const uint8_t* from, int64_t num_steps, uint8_t* to) {
    for (int64_t i = 0; i < num_steps * 2; ++i, to += kStepBytes * (kIsPairs ? 1 : 2))
#pragma GCC unroll 8
      for (int64_t n = 0; n < kStepBytes; n += sizeof(Register)) {
        const RegisterBits pairs = float8_pairs(from + i / 2 * kStepBytes + n, i % 2 == 1);
        const Register first = first_of(pairs) * kWideFactor;
        const Register second = second_of(pairs) * kWideFactor;
        if constexpr (kIsPairs) {
          const RegisterBits both = (RegisterBits)first >> 16 | (RegisterBits)second;
          std::memcpy(to + n, &both, sizeof both);
        } else {
          std::memcpy(to + n, &first, sizeof first);
          std::memcpy(to + kStepBytes + n, &second, sizeof second);
        }
      }
  }
};

// Pairs of inputs take registers, too, beside the sums.
template <typename Dense>
constexpr int kMaxPanelRows<Float8Step<Dense, false>> = 1;

}  // namespace quire::QUIRE_ISA
#endif
