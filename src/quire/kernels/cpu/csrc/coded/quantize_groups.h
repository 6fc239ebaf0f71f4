// Quantizes activations to int8, with a scale for each chunk of 32 inputs, whatever the weights'
// groups are: a few channels of a real model are a hundred times the others, and take from those
// that share their scale all but a few levels.
//
// x[m, k] ~ scale * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even, and
// scale = max |x[m, k]| / 127 over the chunk. Inputs whose largest is next to nothing have the
// scale 0; those with an infinity or a NaN have the scale NaN, and q = 0, so that their row's
// results are NaN.
//
// A row is one run of bytes: what belongs to a number of inputs, then their q.
#pragma once
#include "coded/coded.h"
#include "linear/dot.h"
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

// Of a chunk in flat forms, before its q.
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
  float scales[kBlockInputs / kChunkInputs];
  int32_t corrections[kGroups];  // -zero * (sum of a group's q)
  float sums[kGroups];           // of a group's q, times its chunk's scale
};

static_assert(sizeof(FlatHeader) % 16 == 0 && sizeof(BlockHeader<16>) % 16 == 0 &&
              sizeof(BlockHeader<32>) % 16 == 0);

// What is subtracted from a code's byte: bytes of a table are 128 more than its values.
inline int32_t byte_zero(const CodeFormat& coding) {
  if (coding.has_zeros != 0) return 0;
  return coding.zero + (coding.table != nullptr ? 128 : 0);
}

// Of `count` inputs, how many there are where `left` are left of a row.
inline int64_t known_inputs(int64_t left, int64_t count) {
  return left < 0 ? 0 : left < count ? left : count;
}

template <typename T>
inline void quantize_flat(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  const int64_t K = linear.num_inputs;
  const bool has_offsets = linear.coding->has_offsets != 0;
  const int32_t zero = byte_zero(*linear.coding);
  for (int64_t k = 0; k < padded; k += kChunkInputs) {
    const int64_t known = known_inputs(K - k, kChunkInputs);
    const RunQuantizer run(x + k, known);
    auto* q = (DotElement*)(to + sizeof(FlatHeader));
    const int32_t sum = run.round(x + k, known, kChunkInputs, q);
    const float wide = float(sum);
    const FlatHeader header{run.scale(), -zero * sum, has_offsets ? run.scale() * wide : wide, 0};
    std::memcpy(to, &header, sizeof header);
    to += sizeof header + kChunkInputs * sizeof(DotElement);
  }
}

template <int kGroup, typename T>
inline void quantize_blocks(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  constexpr int kPerChunk = int(kChunkInputs) / kGroup;
  const int64_t K = linear.num_inputs;
  const int32_t zero = byte_zero(*linear.coding);
  for (int64_t k = 0; k < padded; k += kBlockInputs) {
    BlockHeader<kGroup> header{};
    auto* q = (DotElement*)(to + sizeof header);
    for (int chunk = 0; chunk < kBlockInputs / kChunkInputs; ++chunk) {
      const int64_t first = k + chunk * kChunkInputs;
      const RunQuantizer run(x + first, known_inputs(K - first, kChunkInputs));
      header.scales[chunk] = run.scale();
      for (int part = 0; part < kPerChunk; ++part) {
        const int64_t start = first + part * kGroup;
        const int32_t sum = run.round(x + start, known_inputs(K - start, kGroup), kGroup, q);
        header.corrections[chunk * kPerChunk + part] = -zero * sum;
        header.sums[chunk * kPerChunk + part] = run.scale() * float(sum);
        q += kGroup;
      }
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
  const int64_t inputs = linear.coding->block == 0 ? kChunkInputs : kBlockInputs;
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
