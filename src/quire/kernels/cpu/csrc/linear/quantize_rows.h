// Quantizes activations to int8, with a scale per token.
//
// x[m, k] ~ scales[m] * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even.
//
//   scales[m] = max over k of |x[m, k]| / 127
//
// A row of zeros has the scale 0. A row with an infinity or a NaN has the scale NaN, and q = 0, so
// that its results are NaN, as those of the dense formats are.
#pragma once
#include "linear/dot.h"
#include "linear/linear.h"

namespace quire::QUIRE_ISA {

// Rows are padded with zeros to `padded` inputs; groups of inputs have their sums of q.
struct QuantizedRows {
  const DotElement* data;  // [M, ld]
  int64_t ld;
  const float* scales;        // [M]
  const int32_t* totals;      // [M] sum of a row's q
  const int16_t* group_sums;  // [M, num_groups], where groups were asked for
  int64_t num_groups;

  // Those from row m on.
  QuantizedRows from(int64_t m) const {
    const int16_t* sums = group_sums == nullptr ? nullptr : group_sums + m * num_groups;
    return {data + m * ld, ld, scales + m, totals + m, sums, num_groups};
  }
};

inline int32_t sum_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t v[kLanes];
  std::memcpy(v, &x, sizeof x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
#endif
}

inline vi larger(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  union IntParts { vi whole; DotInts parts[kNumParts]; } x{a}, y{b};
  for (int i = 0; i < kNumParts; ++i)
    x.parts[i] = x.parts[i] > y.parts[i] ? x.parts[i] : y.parts[i];
  return x.whole;
#endif
}

inline int32_t greatest_lane(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t v[kLanes];
  std::memcpy(v, &x, sizeof x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
#endif
}

// The largest |x|, as the bits of a float: these order NaN above infinity above all numbers.
template <typename T>
inline float largest_magnitude(const T* x, int64_t K) {
  vi largest{};
  int64_t k = 0;
#pragma GCC unroll 4
  for (; k + kLanes <= K; k += kLanes) largest = larger(largest, (vi)load(x + k) & 0x7fffffff);
  if (k < K) largest = larger(largest, (vi)load_n(x + k, int(K - k)) & 0x7fffffff);
  const int32_t bits = greatest_lane(largest);
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Writes rows of x, and sums of groups of `group_size` inputs of theirs.
struct RowQuantizer {
  DotElement* data;
  int64_t ld;
  int64_t padded;
  float* scales;
  int32_t* totals;
  int16_t* group_sums;  // or null: then there is but one group, the row
  int64_t group_size;

  template <typename T>
  void quantize(const T* x, int64_t K, int64_t m) const {
    const float largest = largest_magnitude(x, K);
    const bool is_finite = largest <= 3.4028235e38f;
    // Below, 1 / scale would overflow; next to a model's numbers this is nothing.
    const bool is_zero = largest < 1e-30f;
    scales[m] = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
    totals[m] = 0;
    if (is_finite && !is_zero)
      quantize_groups(x, K, splat(127.0f / largest), m);
    else
      clear(m);
  }

 private:
  template <typename T>
  void quantize_groups(const T* x, int64_t K, vf factor, int64_t m) const {
    DotElement* q = data + m * ld;
    for (int64_t start = 0; start < padded; start += group_size) {
      const int64_t end = start + group_size, end_whole = end <= K ? end : K / kLanes * kLanes;
      vi sums{};
      int64_t k = start;
#pragma GCC unroll 4
      for (; k < end_whole; k += kLanes) sums += quantize_vector(load(x + k), factor, q + k);
      for (; k < end; k += kLanes)
        sums += quantize_vector(load_n(x + k, k < K ? int(K - k) : 0), factor, q + k);
      const int32_t sum = sum_of(sums);
      if (group_sums != nullptr) group_sums[(m * padded + start) / group_size] = int16_t(sum);
      totals[m] += sum;
    }
  }

  static vi quantize_vector(vf x, vf factor, DotElement* to) {
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    const vi q = (vi)(x * factor + splat(12582912.0f)) - 0x4b400000;
    store_elements(to, q);
    return q;
  }

  void clear(int64_t m) const {
    std::memset(data + m * ld, 0, padded * sizeof(DotElement));
    if (group_sums != nullptr)
      std::memset(group_sums + m * padded / group_size, 0, padded / group_size * sizeof(int16_t));
  }
};

// Uses the pool's shared memory, slots 0 and 1. group_size: a multiple of 16, or 0 for no groups;
// padded: a multiple of 16, and of group_size.
template <typename T>
inline QuantizedRows quantize_rows(Pool& pool, const LinearCall& call, int64_t padded,
                                   int64_t group_size) {
  const int64_t M = call.M, K = call.any().num_inputs;
  // Rows a multiple of 2 KiB apart would meet in few sets of the L1 cache.
  const int64_t kLine = 64 / int64_t(sizeof(DotElement));
  const int64_t lines = divide_up(padded, kLine);
  const int64_t ld = (lines % 2 == 0 ? lines + 1 : lines) * kLine;
  const int64_t num_groups = group_size > 0 ? padded / group_size : 0;
  auto* data = static_cast<DotElement*>(pool.shared(0, M * ld * int64_t(sizeof(DotElement))));
  auto* scales = static_cast<float*>(pool.shared(1, M * (8 + num_groups * 2)));
  auto* totals = reinterpret_cast<int32_t*>(scales + M);
  auto* group_sums = group_size > 0 ? reinterpret_cast<int16_t*>(totals + M) : nullptr;
  const RowQuantizer quantizer{data,   ld,         padded, scales,
                               totals, group_sums, group_size > 0 ? group_size : padded};
  // A region costs about as much as 8 Ki elements.
  const int64_t kTaskElements = 16384;
  const int64_t rows_per_task = divide_up(kTaskElements, padded);
  pool.parallel(divide_up(M, rows_per_task), [&](int64_t task, int) {
    const int64_t end = (task + 1) * rows_per_task < M ? (task + 1) * rows_per_task : M;
    for (int64_t m = task * rows_per_task; m < end; ++m) quantizer.quantize(call.row<T>(m), K, m);
  });
  return {data, ld, scales, totals, group_sums, num_groups};
}

inline QuantizedRows quantize_rows(Pool& pool, const LinearCall& call, int64_t padded,
                                   int64_t group_size) {
  if (call.dtype == kBF16) return quantize_rows<uint16_t>(pool, call, padded, group_size);
  return quantize_rows<float>(pool, call, padded, group_size);
}

}  // namespace quire::QUIRE_ISA
