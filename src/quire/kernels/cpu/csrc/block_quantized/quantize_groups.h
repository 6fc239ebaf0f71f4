// Quantizes activations to int8, with a scale for each chunk of 32 inputs, whatever the weights'
// groups are: a few channels of a real model are a hundred times the others, and take from those
// that share their scale all but a few levels.
//
// x[m, k] ~ scale * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even, and
// scale = max |x[m, k]| / 127 over the chunk. Inputs whose largest is next to nothing have the
// scale 0; those with an infinity or a NaN have the scale NaN, and q = 0, so that their row's
// results are NaN.
//
// A row is one run of bytes, chunk after chunk: a header, then the chunk's q. Wide inputs count as
// zeros in their chunks; they follow the last chunk as they are, in fp32.
#pragma once
#include "block_quantized/chunk.h"
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

// Precedes a chunk's q. A part is half of a chunk for two-level groups of 16, else all of it.
template <int kParts>
struct alignas(16) ChunkHeader {
  float scale;
  int32_t corrections[kParts];  // -byte_zero * (sum of the part's q)
  float sums[kParts];           // of the part's q; times the scale where groups have offsets
};

template <int kParts, typename Element>
constexpr int kChunkRowBytes =
    int(sizeof(ChunkHeader<kParts>)) + int(kChunkInputs) * int(sizeof(Element));

// The number that is subtracted from a code's byte. A table's bytes are its values plus a bias;
// bytes of 8-bit codes are the codes minus a bias. If groups have their own zeros, kByteBias - zero
// is added to the difference.
inline int32_t byte_zero(const CodeFormat& code_format) {
  const int32_t added = code_format.table != nullptr    ? table_bias(code_format)
                        : code_format.has_zeros != 0 ? kByteBias
                                                     : 0;
  return code_format.zero + added - (code_format.width == 8 ? kCodeBias : 0);
}

// The number of existing inputs among the next `count`, if a row has `left` more.
inline int64_t known_inputs(int64_t left, int64_t count) {
  return left < 0 ? 0 : left < count ? left : count;
}

#if defined(__AVX2__) && !defined(__AVX512BW__)

inline void store_chunk(int8_t* to, __m256i bytes) { _mm256_storeu_si256((__m256i*)to, bytes); }

// As dot_pairs takes them.
inline void store_chunk(int16_t* to, __m256i bytes) {
  const __m256i order = _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 0, 2,
                                         1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m256i ordered = _mm256_shuffle_epi8(bytes, order);
  auto* const halves = (__m256i*)to;
  _mm256_storeu_si256(halves, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(ordered)));
  _mm256_storeu_si256(halves + 1, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(ordered, 1)));
}

// A whole chunk, as RunQuantizer rounds it, but register by register. Stores q and the sums of its
// parts. Returns its scale, or -1 if these numbers are not rounded.
template <int kParts, typename T, typename Element>
inline float round_chunk(const T* x, Element* q, int32_t (&sums)[kParts]) {
  static_assert(kChunkInputs == 32);
  __m256 numbers[4];
  for (int i = 0; i < 4; ++i) numbers[i] = (__m256)load_part(x + i * kPartLanes);
  // The largest magnitude, as the bits of a float.
  const __m256i all_but_sign = _mm256_set1_epi32(0x7fffffff);
  __m256i magnitudes[4];
  for (int i = 0; i < 4; ++i)
    magnitudes[i] = _mm256_and_si256(_mm256_castps_si256(numbers[i]), all_but_sign);
  const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(magnitudes[0], magnitudes[1]),
                                         _mm256_max_epi32(magnitudes[2], magnitudes[3]));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  const float largest = _mm_cvtss_f32(_mm_castsi128_ps(four));
  if (!is_roundable(largest)) return -1.0f;
  // Rounded to integers, and these to bytes, whose order the last permutation restores.
  const __m256 factor = _mm256_set1_ps(127.0f / largest);
  __m256i integers[4];
  for (int i = 0; i < 4; ++i)
    integers[i] = _mm256_cvtps_epi32(_mm256_mul_ps(numbers[i], factor));
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(integers[0], integers[1]),
                                           _mm256_packs_epi32(integers[2], integers[3]));
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store_chunk(q, bytes);
  // Sums of four, then of the sixteen of a half.
  __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes),
                                  _mm256_set1_epi16(1));
  sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
  sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
  const int32_t low = _mm256_cvtsi256_si32(sum);
  const int32_t high = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
  if constexpr (kParts == 1)
    sums[0] = low + high;
  else
    sums[0] = low, sums[1] = high;
  return largest / 127.0f;
}

#endif

// Stores the q of a chunk, of whose inputs `known` are there, and the sums of its parts. Returns its
// scale.
template <int kParts, typename T, typename Element>
inline float quantize_chunk(const T* x, int64_t known, Element* q, int32_t (&sums)[kParts]) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  if (known == kChunkInputs) {
    const float scale = round_chunk(x, q, sums);
    if (scale >= 0.0f) return scale;
  }
#endif
  constexpr int kInputs = int(kChunkInputs) / kParts;
  const RunQuantizer run(x, known);
  for (int part = 0; part < kParts; ++part) {
    const int64_t first = part * kInputs;
    sums[part] = run.round(x + first, known_inputs(known - first, kInputs), kInputs, q + first);
  }
  return run.scale();
}

template <int kParts, typename Element, typename T>
inline void quantize_row(const Weights& linear, const T* x, int64_t padded, uint8_t* to) {
  const int64_t K = linear.num_inputs;
  const bool has_offsets = linear.code_format->has_offsets != 0;
  const int32_t zero = byte_zero(*linear.code_format);
  for (int64_t k = 0; k < padded; k += kChunkInputs) {
    ChunkHeader<kParts> header{};
    int32_t sums[kParts];
    header.scale = quantize_chunk<kParts>(x + k, known_inputs(K - k, kChunkInputs),
                                          (Element*)(to + sizeof header), sums);
    for (int part = 0; part < kParts; ++part) {
      header.corrections[part] = -zero * sums[part];
      header.sums[part] = has_offsets ? header.scale * float(sums[part]) : float(sums[part]);
    }
    std::memcpy(to, &header, sizeof header);
    to += kChunkRowBytes<kParts, Element>;
  }
}

// Rows of x as bytes, [M, ld].
struct GroupedRows {
  const uint8_t* data;
  int64_t ld;
  int64_t wide;  // where a row's wide inputs begin

  const float* wide_inputs(int64_t row) const { return (const float*)(data + row * ld + wide); }
};

// Moves the wide inputs of a row x [K], as the weights are packed, to `wide`. A NaN makes the row's
// results NaN, as in other inputs.
template <typename T>
inline void split_wide(const Weights& linear, T* x, float* wide) {
  for (int64_t i = 0; i < linear.num_wide; ++i) {
    const float input = load_n(x + linear.wide_inputs[i], 1)[0];
    wide[i] = input + 0.0f * input;
    x[linear.wide_inputs[i]] = T{};
  }
}

// Uses the pool's shared memory, slot 0, and the threads' scratch.
template <int kParts, typename Element, typename T>
inline GroupedRows quantize_rows_as(Pool& pool, const LinearCall& call) {
  const Weights& linear = call.any();
  const int64_t K = linear.num_inputs;
  const int64_t padded = quantized_stretches(linear) * BlockQuantizedLayout(linear).inputs;
  // Rows a multiple of 2 KiB apart would meet in few sets of the L1 cache.
  const int64_t chunks_bytes = padded / kChunkInputs * kChunkRowBytes<kParts, Element>;
  const int64_t lines = divide_up(chunks_bytes + linear.num_wide * int64_t(sizeof(float)), 64);
  const int64_t ld = (lines % 2 == 0 ? lines + 1 : lines) * 64;
  auto* data = static_cast<uint8_t*>(pool.shared(0, call.M * ld));
  const int32_t* order = linear.code_format->input_order;
  // A region costs about as much as 8 Ki elements.
  const int64_t rows_per_task = divide_up(16384, padded);
  pool.parallel(divide_up(call.M, rows_per_task), [&](int64_t task, int thread) {
    const int64_t end = (task + 1) * rows_per_task < call.M ? (task + 1) * rows_per_task : call.M;
    for (int64_t m = task * rows_per_task; m < end; ++m) {
      const T* x = call.row<T>(m);
      if (order != nullptr || linear.num_wide > 0) {
        auto* own = static_cast<T*>(pool.scratch(thread, K * int64_t(sizeof(T))));
        if (order == nullptr)
          std::memcpy(own, x, K * sizeof(T));
        else
          for (int64_t k = 0; k < K; ++k) own[k] = x[order[k]];
        split_wide(linear, own, (float*)(data + m * ld + chunks_bytes));
        x = own;
      }
      quantize_row<kParts, Element>(linear, x, padded, data + m * ld);
    }
  });
  return {data, ld, chunks_bytes};
}

// kParts: into how many parts the groups divide a chunk.
template <int kParts, typename Element>
inline GroupedRows quantize_groups(Pool& pool, const LinearCall& call) {
  return call.dtype == kBF16 ? quantize_rows_as<kParts, Element, uint16_t>(pool, call)
                             : quantize_rows_as<kParts, Element, float>(pool, call);
}

}  // namespace quire::QUIRE_ISA
