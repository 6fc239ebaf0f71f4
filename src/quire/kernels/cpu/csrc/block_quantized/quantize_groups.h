// Quantizes activations to int8, with a scale for each chunk of 32 inputs, whatever the weights'
// groups are: a few channels of a real model are a hundred times the others, and take from those
// that share their scale all but a few levels.
//
// x[m, k] ~ scale * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even, and
// scale = max |x[m, k]| / 127 over the chunk. Inputs whose largest is next to nothing have the
// scale 0; those with an infinity or a NaN have the scale NaN, and q = 0, so that their row's
// results are NaN.
//
// A row is one run of bytes, chunk after chunk: a header, then the chunk's q.
#pragma once
#include "block_quantized/chunk.h"
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

// Of a chunk, before its q. A part is what two-level groups of 16 have of it, or all of it.
template <int kParts>
struct alignas(16) ChunkHeader {
  float scale;
  int32_t corrections[kParts];  // (kByteOffset - zero) * (sum of the part's q)
  float sums[kParts];           // of the part's q; times the scale where groups have offsets
};

template <int kParts>
constexpr int kChunkRowBytes =
    int(sizeof(ChunkHeader<kParts>)) + int(kChunkInputs) * int(sizeof(CodeElement));

// What is subtracted from a code's byte: bytes of a table are more than its values by a bias. With
// zeros of the groups' own, 128 - zero is added to what is left. ByteDot itself takes its bias off
// bytes of eight bits.
inline int32_t byte_zero(const CodeFormat& code_format) {
  const bool has_table = code_format.table != nullptr;
  const bool is_long = has_table ? !is_narrow(code_format) : code_format.width == 8;
  const int32_t added =
      has_table ? table_bias(code_format) : code_format.has_zeros != 0 ? 128 : 0;
  return code_format.zero + added - (is_long ? ByteDot<255>::kBias : 0);
}

// Into how many parts the groups divide a chunk.
inline int chunk_parts(const Weights& linear) { return linear.group_size < kChunkInputs ? 2 : 1; }

// Of `count` inputs, how many there are where `left` are left of a row.
inline int64_t known_inputs(int64_t left, int64_t count) {
  return left < 0 ? 0 : left < count ? left : count;
}

template <int kParts, typename T>
inline void quantize_row(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  constexpr int kInputs = int(kChunkInputs) / kParts;
  const int64_t K = linear.num_inputs;
  const bool has_offsets = linear.code_format->has_offsets != 0;
  const int32_t zero = byte_zero(*linear.code_format);
  for (int64_t k = 0; k < padded; k += kChunkInputs) {
    const RunQuantizer run(x + k, known_inputs(K - k, kChunkInputs));
    ChunkHeader<kParts> header{run.scale(), {}, {}};
    auto* q = (CodeElement*)(to + sizeof header);
    for (int part = 0; part < kParts; ++part) {
      const int64_t first = k + part * kInputs;
      const int32_t sum =
          run.round(x + first, known_inputs(K - first, kInputs), kInputs, q + part * kInputs);
      header.corrections[part] = (kByteOffset - zero) * sum;
      header.sums[part] = has_offsets ? run.scale() * float(sum) : float(sum);
    }
    std::memcpy(to, &header, sizeof header);
    to += kChunkRowBytes<kParts>;
  }
}

inline int64_t quantized_row_bytes(const Weights& linear, int64_t padded) {
  const int bytes = chunk_parts(linear) == 1 ? kChunkRowBytes<1> : kChunkRowBytes<2>;
  return padded / kChunkInputs * bytes;
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
  const int64_t padded = quantized_stretches(linear) * BlockQuantizedLayout(linear).inputs;
  // Rows a multiple of 2 KiB apart would meet in few sets of the L1 cache.
  const int64_t lines = divide_up(quantized_row_bytes(linear, padded), 64);
  const int64_t ld = (lines % 2 == 0 ? lines + 1 : lines) * 64;
  auto* data = static_cast<uint8_t*>(pool.shared(0, call.M * ld));
  const int32_t* order = linear.code_format->input_order;
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
      if (chunk_parts(linear) == 1)
        quantize_row<1>(linear, x, padded, data + m * ld);
      else
        quantize_row<2>(linear, x, padded, data + m * ld);
    }
  });
  return {data, ld};
}

inline GroupedRows quantize_groups(Pool& pool, const LinearCall& call) {
  return call.dtype == kBF16 ? quantize_groups<uint16_t>(pool, call)
                             : quantize_groups<float>(pool, call);
}

}  // namespace quire::QUIRE_ISA
