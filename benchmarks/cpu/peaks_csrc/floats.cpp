// Products of floats in registers alone; peaks.h says how they are counted.
#include "linear/linear_tile.h"
#include "peaks.h"

using namespace quire::QUIRE_ISA;

namespace {

// As many sums as fit beside weights and x.
constexpr int kRows = kMaxTileRows > 6 ? 8 : 5;

template <typename Step>
int64_t multiply(int64_t num_steps) {
  const typename Step::template Weights<2> weights(kNumbers.bytes, 0);
  const auto* x = reinterpret_cast<const typename Step::X*>(kNumbers.bytes);
  Register sums[kRows][2] = {};
  for (int64_t step = 0; step < num_steps; ++step) {
    x = read_again(x);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) weights.add(sums[r], x + Step::kInputs * r);
  }
  for (auto& row : sums)
    for (auto& sum : row) keep(sum);
  return num_steps * kRows * 2 * kRegisterLanes * Step::kInputsAtOnce;
}

}  // namespace

extern "C" {

int64_t peak_fp32(int64_t num_steps) { return multiply<F32Step>(num_steps); }

int64_t peak_bf16(int64_t num_steps) { return multiply<BF16Step>(num_steps); }

}  // extern "C"
