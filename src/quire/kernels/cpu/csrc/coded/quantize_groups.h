// Quantizes activations to int8, with a scale for each group of inputs.
//
// x[m, k] ~ scale * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even, and
// scale = max |x[m, k]| / 127 over the inputs that share it: a group in flat forms, 256 inputs in
// two-level ones. Inputs whose largest is next to nothing have the scale 0; those with an infinity
// or a NaN have the scale NaN, and q = 0, so that their row's results are NaN.
//
// A row is one run of bytes: what belongs to a number of inputs, then their q.
#pragma once
#include "coded/coded.h"
#include "linear/dot.h"
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

// Of a group in flat forms, before its q.
struct FlatHeader {
  float scale;
  int32_t correction;  // -zero * (sum of q)
  float sum;           // of q; times the scale where groups have offsets
  int32_t reserved;
};

// Of 256 inputs in two-level forms, before their q.
template <int kGroup>
struct BlockHeader {
  static constexpr int kGroups = int(kBlockInputs) / kGroup;
  float scale;
  int32_t reserved[3];
  int32_t corrections[kGroups];  // -zero * (sum of a group's q)
  int16_t sums[kGroups];         // of a group's q
};

static_assert(sizeof(FlatHeader) % 16 == 0 && sizeof(BlockHeader<16>) % 16 == 0 &&
              sizeof(BlockHeader<32>) % 16 == 0);

// What is subtracted from a code's byte: bytes of a table are 128 more than its values.
inline int32_t byte_zero(const CodeFormat& coding) {
  if (coding.has_zeros != 0) return 0;
  return coding.zero + (coding.table != nullptr ? 128 : 0);
}

// Rounds runs of inputs that share a scale.
class RunQuantizer {
 public:
  // Finds the scale of `count` inputs, of which the first `known` are given and the rest zero.
  template <typename T>
  RunQuantizer(const T* x, int64_t known) {
    const float largest = known > 0 ? largest_magnitude(x, known) : 0.0f;
    const bool is_finite = largest <= 3.4028235e38f;
    // Below, 1 / scale would overflow; next to a model's numbers this is nothing.
    is_rounded_ = is_finite && largest >= 1e-30f;
    scale_ = !is_finite ? __builtin_nanf("") : is_rounded_ ? largest / 127.0f : 0.0f;
    factor_ = is_rounded_ ? 127.0f / largest : 0.0f;
  }

  float scale() const { return scale_; }

  // Stores the q of `count` inputs, of which `known` are given, and returns their sum.
  template <typename T>
  int32_t round(const T* x, int64_t known, int64_t count, DotElement* to) const {
    if (!is_rounded_) {
      std::memset(to, 0, count * sizeof(DotElement));
      return 0;
    }
    vi sums{};
    for (int64_t k = 0; k < count; k += kLanes) {
      const int64_t left = known - k;
      const vf values = left >= kLanes ? load(x + k) : load_n(x + k, left > 0 ? int(left) : 0);
      // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
      const vi q = (vi)(values * splat(factor_) + splat(12582912.0f)) - 0x4b400000;
      store_elements(to + k, q);
      sums += q;
    }
    return sum_of(sums);
  }

 private:
  float scale_, factor_;
  bool is_rounded_;
};

template <typename T>
inline void quantize_flat(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  const int64_t K = linear.num_inputs, G = linear.group_size;
  const bool has_offsets = linear.coding->has_offsets != 0;
  const int32_t zero = byte_zero(*linear.coding);
  for (int64_t k = 0; k < padded; k += G) {
    const int64_t known = K - k < G ? (K > k ? K - k : 0) : G;
    const RunQuantizer run(x + k, known);
    const int32_t sum = run.round(x + k, known, G, (DotElement*)(to + sizeof(FlatHeader)));
    const float wide = float(sum);
    const FlatHeader header{run.scale(), -zero * sum, has_offsets ? run.scale() * wide : wide, 0};
    std::memcpy(to, &header, sizeof header);
    to += sizeof header + G * sizeof(DotElement);
  }
}

template <int kGroup, typename T>
inline void quantize_blocks(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  const int64_t K = linear.num_inputs;
  const int32_t zero = byte_zero(*linear.coding);
  for (int64_t k = 0; k < padded; k += kBlockInputs) {
    const int64_t known = K - k < kBlockInputs ? K - k : kBlockInputs;
    const RunQuantizer run(x + k, known);
    BlockHeader<kGroup> header{};
    header.scale = run.scale();
    auto* q = (DotElement*)(to + sizeof header);
    for (int g = 0; g < header.kGroups; ++g) {
      const int32_t sum = run.round(x + k + g * kGroup, known - g * kGroup, kGroup, q + g * kGroup);
      header.corrections[g] = -zero * sum;
      header.sums[g] = int16_t(sum);
    }
    std::memcpy(to, &header, sizeof header);
    to += sizeof header + kBlockInputs * sizeof(DotElement);
  }
}

template <typename T>
inline void quantize_row(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  if (linear.coding->block == 0)
    quantize_flat(linear, x, padded, to);
  else if (linear.group_size == 16)
    quantize_blocks<16>(linear, x, padded, to);
  else
    quantize_blocks<32>(linear, x, padded, to);
}

inline int64_t quantized_row_bytes(const Weights& linear, int64_t padded) {
  const int64_t header = linear.coding->block == 0    ? int64_t(sizeof(FlatHeader))
                         : linear.group_size == 16 ? int64_t(sizeof(BlockHeader<16>))
                                                   : int64_t(sizeof(BlockHeader<32>));
  const int64_t inputs = linear.coding->block == 0 ? linear.group_size : kBlockInputs;
  return padded / inputs * (header + inputs * int64_t(sizeof(DotElement)));
}

// Rows of x as bytes, [M, ld].
struct GroupedRows {
  const uint8_t* data;
  int64_t ld;
};

// Uses the pool's shared memory, slot 0, and the threads' scratch.
template <typename T>
inline GroupedRows quantize_groups(Pool& pool, const LinearCall& call) {
  const Weights& linear = call.any();
  const int64_t K = linear.num_inputs;
  const int64_t padded = coded_stretches(linear) * CodedLayout(linear).inputs;
  // Rows a multiple of 2 KiB apart would meet in few sets of the L1 cache.
  const int64_t lines = divide_up(quantized_row_bytes(linear, padded), 64);
  const int64_t ld = (lines % 2 == 0 ? lines + 1 : lines) * 64;
  auto* data = static_cast<uint8_t*>(pool.shared(0, call.M * ld));
  const int32_t* order = linear.coding->input_order;
  // A region costs about as much as 8 Ki elements.
  const int64_t rows_per_task = divide_up(16384, padded);
  pool.parallel(divide_up(call.M, rows_per_task), [&](int64_t task, int thread) {
    const int64_t end = (task + 1) * rows_per_task < call.M ? (task + 1) * rows_per_task : call.M;
    for (int64_t m = task * rows_per_task; m < end; ++m) {
      const T* x = call.row<T>(m);
      if (order != nullptr) {
        auto* ordered = static_cast<T*>(pool.scratch(thread, K * int64_t(sizeof(T))));
        for (int64_t k = 0; k < K; ++k) ordered[k] = x[order[k]];
        x = ordered;
      }
      quantize_row(linear, x, padded, data + m * ld);
    }
  });
  return {data, ld};
}

inline GroupedRows quantize_groups(Pool& pool, const LinearCall& call) {
  return call.dtype == kBF16 ? quantize_groups<uint16_t>(pool, call)
                             : quantize_groups<float>(pool, call);
}

}  // namespace quire::QUIRE_ISA
