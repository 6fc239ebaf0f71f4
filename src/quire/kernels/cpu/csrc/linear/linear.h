// Layouts of packed weights, and what the formats' linears share.
//
// A packing is the same for all instruction sets: a weight is packed once, whichever of them
// multiplies it.
//
// Legend: N outputs, K inputs, M rows of x.
//
// Outputs lie in panels of 32: two registers of sixteen lanes, a lane an output. N is padded with
// zeros to whole panels, K to whole units:
//
//   kDenseF32    [N/32 panels][K][32]           fp32
//   kDenseBF16   [N/32 panels][K/2][32][2]      bf16: inputs 2k, 2k+1 of an output are neighbours
//   kInt8, kInt4, kBlockQuantized, kFloat8: linear_int8.h, linear_int4.h,
//                block_quantized/layout.h, linear_float8.h
//
// so a panel is one contiguous run of bytes, read once per group of rows, from first to last.
//
// Weights::interleave = I > 0 (N = 2 I, gate and up of an MLP): panel p holds outputs 16p to 16p+15
// of gate in lanes 0 to 15 and those of up in lanes 16 to 31, each half padded by itself:
//
//   checkpoint:  g0 g1 .. g(I-1) u0 u1 .. u(I-1)
//   packed:      g0..g15 u0..u15 | g16..g31 u16..u31 | ..
//
// bias and scales per output have padded_outputs(linear) entries in the same order.
#pragma once
#include "library/abi.h"
#include "threads/pool.h"

namespace quire {

// Internal linkage throughout: these are compiled with several instruction sets.
static constexpr int64_t kPanelOutputs = 32;
static constexpr int64_t kUnitOutputs = 16;

// What is added to signed bytes of weights when they are stored: VNNI multiplies unsigned bytes by
// signed ones, ARM64 both signed. Sums make up for it by the sum of x.
#if defined(__aarch64__)
static constexpr int kByteBias = 0;
#else
static constexpr int kByteBias = 128;
#endif

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t num_panels(const Weights& linear) {
  return linear.interleave > 0 ? divide_up(linear.interleave, kUnitOutputs)
                               : divide_up(linear.num_outputs, kPanelOutputs);
}

static inline int64_t padded_outputs(const Weights& linear) {
  return num_panels(linear) * kPanelOutputs;
}

// Where the checkpoint's output n lies among the padded ones.
static inline int64_t packed_position(const Weights& linear, int64_t n) {
  if (linear.interleave == 0) return n;
  const int64_t is_up = n >= linear.interleave;
  const int64_t i = n - is_up * linear.interleave;
  return i / kUnitOutputs * kPanelOutputs + is_up * kUnitOutputs + i % kUnitOutputs;
}

// Columns of `out`.
static inline int64_t num_columns(const Weights& linear, Epilogue epilogue) {
  return epilogue == kSiluMul ? linear.interleave : linear.num_outputs;
}

}  // namespace quire

#if defined(QUIRE_ISA)
namespace quire::QUIRE_ISA {

// One linear of a call: rows [first, first + count) of those that the call gives go through it.
struct LinearGroup {
  const Weights* linear;
  int64_t first;
  int64_t count;
  void* out;  // [count, ldo]
};

struct AdapterCall;  // adapters/adapters.h

// Products of one kind: an ordinary linear is one group. All groups' linears have one format and one
// size. What an output element is summed from, and in which order, is the same in every call.
struct LinearCall {
  const LinearGroup* groups;
  int64_t num_groups;
  DType dtype;  // of x
  const void* x;
  int64_t ldx;
  const int64_t* offsets;  // [M] where each row begins, in elements; null: at m * ldx
  int64_t M;
  DType out_dtype;
  int64_t ldo;
  Epilogue epilogue;
  const AdapterCall* adapters = nullptr;  // of an ordinary linear, whose rows are the step's

  const Weights& any() const { return *groups->linear; }
  template <typename T>
  const T* row(int64_t m) const {
    return static_cast<const T*>(x) + (offsets != nullptr ? offsets[m] : m * ldx);
  }
};

void multiply_groups(Pool&, const LinearCall&);  // linear.cpp

void linear_f32(Pool&, const LinearCall&);   // linear_dense.cpp
void linear_bf16(Pool&, const LinearCall&);  // linear_dense.cpp
void linear_float8(Pool&, const LinearCall&);  // linear_dense.cpp
void linear_int8(Pool&, const LinearCall&);  // linear_int8.cpp
void linear_int4(Pool&, const LinearCall&);  // linear_int4.cpp
void linear_block_quantized(Pool&, const LinearCall&); // block_quantized/linear_block_quantized.cpp

}  // namespace quire::QUIRE_ISA
#endif
