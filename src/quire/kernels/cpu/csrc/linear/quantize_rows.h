// Quantizes activations to int8, with a scale for each group of inputs.
//
// x[m, k] ~ scale * q[m, k], with -127 <= q <= 127, rounded to the nearest, ties to even, and
// scale = max |x[m, k]| / 127 over the group. A group of zeros has the scale 0. One with an
// infinity or a NaN has the scale NaN, and q = 0, so that its row's results are NaN, as those of
// the dense formats are.
#pragma once
#include "hadamard.h"
#include "linear/dot_codes.h"
#include "linear/linear.h"

namespace quire::QUIRE_ISA {

// Element: DotElement, or CodeElement where weights are codes.
template <typename Element>
struct RowsOf {
  const Element* data;  // [M, ld]: groups one after the other, then wide inputs
  int64_t ld;
  const float* scales;  // [M, num_scales]: of groups, then of the wide inputs
  // [M, num_sums]: -kByteBias times the sum of q of a group, which takes the bias off the weights,
  // or plain sums of its parts; that of the wide inputs is the last one.
  const int32_t* sums;
  int64_t num_scales;
  int64_t num_sums;

  // Those from row m on.
  RowsOf from(int64_t m) const {
    return {data + m * ld, ld, scales + m * num_scales, sums + m * num_sums, num_scales, num_sums};
  }
};

using QuantizedRows = RowsOf<DotElement>;

// How rows are rounded.
struct RowRounding {
  int64_t group;          // inputs that share a scale
  int64_t padded;         // inputs, with zeros behind them: a multiple of 16, and of 2 * part
  int rotation = 1;       // inputs that are rotated together before they are rounded
  int64_t part = 0;       // inputs of a sum, of which two of 16 bits are in a word; 0: whole groups
  const int32_t* wide = nullptr;  // inputs that are zeros in their groups, rounded by themselves
  int64_t num_wide = 0;           // how many, a multiple of 4

  int64_t num_groups() const { return divide_up(padded, group); }
  int64_t num_scales() const { return num_groups() + (num_wide > 0); }
  int64_t num_sums() const {
    return (part > 0 ? padded / (2 * part) : num_groups()) + (num_wide > 0);
  }
};

inline int32_t sum_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
  union { vi v; __m256i halves[2]; } wide{x};
  const __m256i eight = _mm256_add_epi32(wide.halves[0], wide.halves[1]);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#elif defined(__aarch64__)
  union { vi whole; int32x4_t parts[4]; } y{x};
  return vaddvq_s32(y.parts[0] + y.parts[1] + (y.parts[2] + y.parts[3]));
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
#elif defined(__AVX2__)
  union { vi v; __m256i halves[2]; } wide{x};
  const __m256i eight = _mm256_max_epi32(wide.halves[0], wide.halves[1]);
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#elif defined(__aarch64__)
  union { vi whole; int32x4_t parts[4]; } y{x};
  const int32x4_t low = vmaxq_s32(y.parts[0], y.parts[1]), high = vmaxq_s32(y.parts[2], y.parts[3]);
  return vmaxvq_s32(vmaxq_s32(low, high));
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

// Whether numbers with this largest magnitude are rounded: with an infinity or a NaN they are not,
// and below, 1 / scale would overflow; next to a model's numbers this is nothing.
inline bool is_roundable(float largest) { return largest >= 1e-30f && largest <= 3.4028235e38f; }

// Rounds runs of inputs that share a scale.
class RunQuantizer {
 public:
  // Finds the scale of `known` inputs; more that share it are zeros.
  template <typename T>
  RunQuantizer(const T* x, int64_t known) {
    const float largest = known > 0 ? largest_magnitude(x, known) : 0.0f;
    const bool is_finite = largest <= 3.4028235e38f;
    is_rounded_ = is_roundable(largest);
    scale_ = !is_finite ? __builtin_nanf("") : is_rounded_ ? largest / 127.0f : 0.0f;
    factor_ = is_rounded_ ? 127.0f / largest : 0.0f;
  }

  float scale() const { return scale_; }

  // Stores the q of `count` inputs, zeros from x[known] on, and returns their sum.
  template <typename T, typename Element>
  int32_t round(const T* x, int64_t known, int64_t count, Element* to) const {
    if (!is_rounded_) {
      std::memset(to, 0, count * sizeof(Element));
      return 0;
    }
    const vf factor = splat(factor_);
    const int64_t whole = known < count ? known : count;
    vi sums{};
    int64_t k = 0;
#pragma GCC unroll 4
    for (; k + kLanes <= whole; k += kLanes) sums += round_vector(load(x + k), factor, to + k);
    for (; k < count; k += kLanes)
      sums += round_vector(load_n(x + k, k < known ? int(known - k) : 0), factor, to + k);
    return sum_of(sums);
  }

 private:
  template <typename Element>
  static vi round_vector(vf x, vf factor, Element* to) {
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    const vi q = (vi)(x * factor + splat(12582912.0f)) - 0x4b400000;
    store_elements(to, q);
    return q;
  }

  float scale_, factor_;
  bool is_rounded_;
};

// Writes rows of x.
template <typename Element>
struct RowQuantizer {
  RowRounding how;
  Element* data;
  int64_t ld;
  float* scales;
  int32_t* sums;

  // y: room for the row, and the wide inputs behind it.
  template <typename T>
  void quantize(const T* x, int64_t K, int64_t m, float* y) const {
    rotate_blocks(x, K, how.rotation, y);
    for (int64_t k = divide_up(K, kLanes) * kLanes; k < how.padded; k += kLanes) store(y + k, vf{});
    for (int64_t i = 0; i < how.num_wide; ++i) {
      y[how.padded + i] = y[how.wide[i]];
      y[how.wide[i]] = 0.0f;
    }
    float* scale = scales + m * how.num_scales();
    int32_t* sum = sums + m * how.num_sums();
    Element* q = data + m * ld;
    for (int64_t start = 0; start < how.padded; start += how.group) {
      const int64_t left = how.padded - start, count = left < how.group ? left : how.group;
      const RunQuantizer run(y + start, count);
      *scale++ = run.scale();
      if (how.part == 0) {
        *sum++ = -kByteBias * run.round(y + start, count, count, q + start);
        continue;
      }
      for (int64_t k = start; k < start + count; k += 2 * how.part) {
        const int32_t low = run.round(y + k, how.part, how.part, q + k);
        const int32_t high = run.round(y + k + how.part, how.part, how.part, q + k + how.part);
        *sum++ = (low & 0xffff) | int32_t(uint32_t(high) << 16);
      }
    }
    if (how.num_wide == 0) return;
    const RunQuantizer run(y + how.padded, how.num_wide);
    *scale = run.scale();
    *sum = -kByteBias * run.round(y + how.padded, how.num_wide, how.num_wide, q + how.padded);
  }
};

// Uses the pool's shared memory, slots 0 and 1, and the threads' scratch.
template <typename T, typename Element>
inline RowsOf<Element> quantize_rows(Pool& pool, const LinearCall& call, const RowRounding& how) {
  const int64_t M = call.M, K = call.any().num_inputs, width = how.padded + how.num_wide;
  // Rows a multiple of 2 KiB apart would meet in few sets of the L1 cache.
  const int64_t kLine = 64 / int64_t(sizeof(Element));
  const int64_t lines = divide_up(width, kLine);
  const int64_t ld = (lines % 2 == 0 ? lines + 1 : lines) * kLine;
  auto* data = static_cast<Element*>(pool.shared(0, M * ld * int64_t(sizeof(Element))));
  const int64_t num_words = M * (how.num_scales() + how.num_sums());
  auto* scales = static_cast<float*>(pool.shared(1, num_words * 4));
  auto* sums = reinterpret_cast<int32_t*>(scales + M * how.num_scales());
  const RowQuantizer<Element> quantizer{how, data, ld, scales, sums};
  // A region costs about as much as 8 Ki elements.
  const int64_t kTaskElements = 16384;
  const int64_t rows_per_task = divide_up(kTaskElements, how.padded);
  pool.parallel(divide_up(M, rows_per_task), [&](int64_t task, int thread) {
    const int64_t end = (task + 1) * rows_per_task < M ? (task + 1) * rows_per_task : M;
    auto* y = static_cast<float*>(pool.scratch(thread, width * int64_t(sizeof(float))));
    for (int64_t m = task * rows_per_task; m < end; ++m)
      quantizer.quantize(call.row<T>(m), K, m, y);
  });
  return {data, ld, scales, sums, how.num_scales(), how.num_sums()};
}

template <typename Element = DotElement>
inline RowsOf<Element> quantize_rows(Pool& pool, const LinearCall& call, const RowRounding& how) {
  if (call.dtype == kBF16) return quantize_rows<uint16_t, Element>(pool, call, how);
  return quantize_rows<float, Element>(pool, call, how);
}

}  // namespace quire::QUIRE_ISA
