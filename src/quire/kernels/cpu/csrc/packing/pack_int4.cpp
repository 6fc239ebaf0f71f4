// Packs int4 weights.
//
// Layout and formula: linear_int4.h. Compiled once, for all instruction sets.
//
// A group's scale and offset are those with the least squared error among a few starts: the range
// of the group, shrunk by some factors (its extremes matter less than the rest), each rounded to
// integers q once and then fitted to them by linear regression. Needs no data but the weights.
// kernels/quantize.py does the same, in the same order.
#include <cstring>
#include <initializer_list>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "linear/linear_int4.h"
#include "packing/pack.h"
#include "packing/pack_rows.h"

namespace quire {
namespace {

constexpr float kShrink[] = {1.0f, 0.93f, 0.86f, 0.79f};
constexpr float kLevels = 15.0f, kFactors = 255.0f;

// Four floats at once. A group's sums are eight, of every eighth, in two of these; then by halves.
constexpr int64_t kFour = 4;
typedef float Four __attribute__((vector_size(16)));

inline Four load(const float* p) {
  Four x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Four smaller(Four a, Four b) {
#if defined(__SSE2__)
  return (Four)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}

inline Four larger(Four a, Four b) {
#if defined(__SSE2__)
  return (Four)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

inline float sum_of(const Four (&x)[2]) {
  const Four y = x[0] + x[1];
  return (y[0] + y[2]) + (y[1] + y[3]);
}

// w ~ scale * q - offset.
struct Fit {
  float scale, offset, error;
};

struct Levels {
  Four factor, offset;

  Levels(float scale, float offset_value)
      : factor(Four{} + (scale > 0.0f ? 1.0f / scale : 0.0f)), offset(Four{} + offset_value) {}

  // q of four weights. Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
  Four round(const float* w) const {
    const Four level = (load(w) + offset) * factor;
    return smaller(larger(level, Four{}), Four{} + kLevels) + 12582912.0f - 12582912.0f;
  }
};

struct Group {
  const float* w;
  int64_t size;
  float low, high, sum, sum_of_squares;  // low <= 0 <= high

  Group(const float* weights, int64_t num_weights) : w(weights), size(num_weights) {
    Four lowest{}, highest{};
    for (int64_t i = 0; i < size; i += kFour) {
      lowest = smaller(lowest, load(w + i));
      highest = larger(highest, load(w + i));
    }
    low = high = sum = sum_of_squares = 0.0f;
    for (int64_t i = 0; i < kFour; ++i) {
      low = lowest[i] < low ? lowest[i] : low;
      high = highest[i] > high ? highest[i] : high;
    }
    for (int64_t i = 0; i < size; ++i) {
      sum += w[i];
      sum_of_squares += w[i] * w[i];
    }
  }

  // The best scale and offset >= 0 for the q to which w is rounded at the given two.
  Fit fit(float scale, float offset) const {
    const Levels levels(scale, offset);
    Four qs[2]{}, qqs[2]{}, qws[2]{};
    for (int64_t i = 0; i < size; i += 2 * kFour)
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; ++half) {
        const float* four = w + i + half * kFour;
        const Four q = levels.round(four);
        qs[half] += q;
        qqs[half] += q * q;
        qws[half] += q * load(four);
      }
    const float n = float(size), sum_q = sum_of(qs), sum_qq = sum_of(qqs), sum_qw = sum_of(qws);
    const float determinant = n * sum_qq - sum_q * sum_q;
    // If all q are alike, any scale will do.
    if (determinant > 0.0f) scale = (n * sum_qw - sum_q * sum) / determinant;
    offset = (scale * sum_q - sum) / n;
    if (offset < 0.0f) {  // then the line goes through zero
      offset = 0.0f;
      scale = sum_qq > 0.0f ? sum_qw / sum_qq : 0.0f;
    }
    return {scale, offset, sum_of_squares - scale * sum_qw + offset * sum};
  }

  Fit best_fit() const {
    Fit best{0.0f, 0.0f, sum_of_squares};
    const auto try_from = [&](float scale, float offset) {
      const Fit found = fit(scale, offset);
      if (found.scale > 0.0f && found.error < best.error) best = found;
    };
    for (const float shrink : kShrink) try_from((high - low) * shrink / kLevels, -low * shrink);
    if (best.scale > 0.0f) try_from(best.scale, best.offset);
    return best;
  }
};

inline float clamped(float x, float high) { return x < 0.0f ? 0.0f : x > high ? high : x; }

// One output: its two factors, and by group the bytes of scale and offset and the levels.
struct PackedOutput {
  float scale_factor, offset_factor;
  std::vector<uint8_t> scales, offsets, levels;  // [groups], [groups], [groups * G]

  PackedOutput(int64_t num_groups, int64_t group)
      : scales(num_groups), offsets(num_groups), levels(num_groups * group), fits_(num_groups) {}

  // An output with a NaN or an infinity among its weights is NaN.
  void quantize(const float* w, int64_t group) {
    const int64_t num_groups = int64_t(scales.size());
    float largest_scale = 0.0f, largest_offset = 0.0f;
    for (int64_t g = 0; g < num_groups; ++g) {
      fits_[g] = Group(w + g * group, group).best_fit();
      if (!(fits_[g].error <= 3.4028235e38f)) return fill_with_nan();
      largest_scale = fits_[g].scale > largest_scale ? fits_[g].scale : largest_scale;
      largest_offset = fits_[g].offset > largest_offset ? fits_[g].offset : largest_offset;
    }
    scale_factor = largest_scale / kFactors;
    offset_factor = largest_offset / kFactors;
    for (int64_t g = 0; g < num_groups; ++g) quantize_group(w + g * group, group, g);
  }

 private:
  void quantize_group(const float* w, int64_t group, int64_t g) {
    scales[g] = in_units(fits_[g].scale, scale_factor);
    offsets[g] = in_units(fits_[g].offset, offset_factor);
    const Levels rounds(float(scales[g]) * scale_factor, float(offsets[g]) * offset_factor);
    for (int64_t i = 0; i < group; i += kFour) {
      const Four q = rounds.round(w + i);
      for (int64_t j = 0; j < kFour; ++j) levels[g * group + i + j] = uint8_t(q[j]);
    }
  }

  void fill_with_nan() {
    scale_factor = offset_factor = __builtin_nanf("");
    for (auto* bytes : {&scales, &offsets, &levels})
      std::memset(bytes->data(), 0, bytes->size());
  }

  static uint8_t in_units(float value, float unit) {
    return unit > 0.0f ? uint8_t(rounded(clamped(value / unit, kFactors))) : 0;
  }

  std::vector<Fit> fits_;
};

uint8_t* output_unit(const Weights& linear, int64_t position) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights)) +
         position / kUnitOutputs * int4_unit_bytes(linear);
}

void store_output(const Weights& linear, int64_t position, const PackedOutput& from) {
  const int64_t group = linear.group_size, lane = position % kUnitOutputs;
  uint8_t* pair = output_unit(linear, position);
  for (int64_t i = 0; i < int4_group_pairs(linear); ++i, pair += int4_pair_bytes(linear))
    for (int g = 0; g < 2; ++g) {
      const int64_t index = i * 2 + g;
      pair[g * kUnitOutputs + lane] = from.scales[index];
      pair[2 * kUnitOutputs + lane * 2 + g] = from.offsets[index];
      const uint8_t* levels = from.levels.data() + index * group;
      uint8_t* line = pair + kInt4HeaderBytes + g * group * kUnitOutputs / 2 + lane * 4;
      for (int64_t k = 0; k < group; k += 8, line += 4 * kUnitOutputs)
        for (int j = 0; j < 4; ++j) line[j] = uint8_t(levels[k + j] | levels[k + 4 + j] << 4);
    }
  auto* factors = const_cast<float*>(linear.scales);
  factors[position] = from.scale_factor;
  factors[padded_outputs(linear) + position] = from.offset_factor;
}

}  // namespace

int64_t packed_bytes_int4(const Weights& linear) {
  return num_panels(linear) * 2 * int4_unit_bytes(linear);
}

int64_t num_scales_int4(const Weights& linear) { return 2 * padded_outputs(linear); }

void pack_rows_int4(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                    int64_t first, int64_t num_rows) {
  const int64_t K = linear.num_inputs, group = linear.group_size;
  const int64_t num_groups = int4_group_pairs(linear) * 2;
  PackedOutput output(num_groups, group);
  std::vector<float> padded(num_groups * group);
  for (int64_t row = 0; row < num_rows; ++row) {
    widen_row(rows, rows_dtype, row * ld, K, padded.data());
    output.quantize(padded.data(), group);
    store_output(linear, packed_position(linear, first + row), output);
  }
}

void clear_padding_int4(const Weights& linear) {
  const int64_t last = num_panels(linear) - 1, panel_bytes = 2 * int4_unit_bytes(linear);
  std::memset(static_cast<uint8_t*>(const_cast<void*>(linear.weights)) + last * panel_bytes, 0,
              panel_bytes);
  auto* factors = const_cast<float*>(linear.scales);
  for (int64_t n = 0; n < kPanelOutputs; ++n)
    for (int half = 0; half < 2; ++half)
      factors[half * padded_outputs(linear) + last * kPanelOutputs + n] = 0.0f;
}

}  // namespace quire
