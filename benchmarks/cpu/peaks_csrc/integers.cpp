// Products of integers in registers alone; peaks.h says how they are counted.
#include "linear/dot_codes.h"
#include "peaks.h"

using namespace quire::QUIRE_ISA;

namespace {

// As many sums as fit beside weights and x.
constexpr int kRows = kHas32Registers ? 8 : 5;

int64_t multiply_bytes(int64_t num_steps) {
  const DotWeights low(load_as<DotInts>(kNumbers.bytes));
  const DotWeights high(load_as<DotInts>(kNumbers.bytes + sizeof(DotInts)));
  const auto* x = reinterpret_cast<const DotElement*>(kNumbers.bytes);
  DotInts sums[kRows][2] = {};
  for (int64_t step = 0; step < num_steps; ++step) {
    x = read_again(x);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const DotInput input(x + 4 * r);
      sums[r][0] = dot(sums[r][0], low, input);
      sums[r][1] = dot(sums[r][1], high, input);
    }
  }
  for (auto& row : sums)
    for (auto& sum : row) keep(sum);
  return num_steps * kRows * 2 * kIntLanes * 4;
}

// Codes of 4 bits, where a set multiplies them by other instructions than bytes.
template <typename Dot>
int64_t multiply_codes(int64_t num_steps) {
  const DotInts codes{0x0f0e0d0c};
  const Dot low(codes), high(load_as<DotInts>(kNumbers.bytes) & 0x0f0f0f0f);
  const auto* x = reinterpret_cast<const CodeElement*>(kNumbers.bytes);
  DotInts sums[kRows][2] = {};
  for (int64_t step = 0; step < num_steps; ++step) {
    typename Dot::Sum parts[kRows][2];
#pragma GCC unroll 16
    for (int quad = 0; quad < Dot::kQuads; ++quad) {
      x = read_again(x);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename Dot::Input input(x + 4 * r);
        parts[r][0] = quad == 0 ? low.multiply(input) : low.add(parts[r][0], input);
        parts[r][1] = quad == 0 ? high.multiply(input) : high.add(parts[r][1], input);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) sums[r][i] = in_order(sums[r][i] + Dot::widen(parts[r][i]));
  }
  for (auto& row : sums)
    for (auto& sum : row) keep(sum);
  return num_steps * Dot::kQuads * kRows * 2 * kIntLanes * 4;
}

template <bool kByCodes>
int64_t multiply_halves(int64_t num_steps) {
  if constexpr (kByCodes) return multiply_codes<ByteDot<15>>(num_steps);
  return multiply_bytes(num_steps);
}

}  // namespace

extern "C" {

int64_t peak_int8(int64_t num_steps) { return multiply_bytes(num_steps); }

int64_t peak_int4(int64_t num_steps) { return multiply_halves<kHasByteSums>(num_steps); }

}  // extern "C"
