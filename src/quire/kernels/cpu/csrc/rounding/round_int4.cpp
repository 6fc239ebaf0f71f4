// Rounds weights to int4 and packs them.
//
// Layout and formula: linear_int4.h. A group's scale and offset are those with the least squared
// error among a few starts: the range of the group, shrunk by some factors (its extremes matter
// less than the rest), each rounded to integers q once and then fitted to them by linear
// regression. Needs no data but the weights. kernels/quantize.py does the same, in the same order.
//
// Sixteen outputs at a time, each in a lane of its own, so that nothing is summed across lanes and
// every instruction set computes the same.
#include <cstring>
#include <vector>

#include "kernels_isa.h"
#include "linear/linear_int4.h"
#include "rounding/round_bytes.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kShrink[] = {1.0f, 0.93f, 0.86f, 0.79f};
constexpr float kLevels = 15.0f, kFactors = 255.0f, kLargest = 3.4028235e38f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
constexpr int64_t kEighths = 8;

inline part all(float x) { return part{} + x; }

// 0 to `high`, as integers.
inline part rounded_within(part x, float high) {
  return min(max(x, part{}), all(high)) + kRound - kRound;
}

// The fit of each lane's group: w ~ scale * q - offset.
struct Fit {
  part scale, offset, error;
};

// One group of each of up to sixteen outputs. weights: [size][16], an output in each lane.
struct Groups {
  const float* weights;
  int64_t size;
  part low, high, sum, sum_of_squares;  // low <= 0 <= high

  Groups(const float* turned, int64_t group_size) : weights(turned), size(group_size) {
    low = high = sum = sum_of_squares = part{};
    for (int64_t i = 0; i < size; ++i) {
      const part w = at(i);
      low = min(low, w);
      high = max(high, w);
      sum += w;
      sum_of_squares += w * w;
    }
  }

  part at(int64_t i) const { return load_part(weights + i * kLanes); }

  // Sums over q, as kernels/quantize.py adds them: eight of every eighth, and those by halves.
  struct Sums {
    part q, qq, qw;
  };

  Sums sums(part factor, part offset) const {
    Sums eighths[kEighths];
    for (int64_t j = 0; j < kEighths; ++j) {
      part q{}, qq{}, qw{};
#pragma GCC unroll 4
      for (int64_t i = j; i < size; i += kEighths) {
        const part w = at(i), level = rounded_within((w + offset) * factor, kLevels);
        q += level;
        qq += level * level;
        qw += level * w;
      }
      eighths[j] = {q, qq, qw};
    }
    for (int64_t width = kEighths / 2; width; width /= 2)
      for (int64_t j = 0; j < width; ++j) {
        eighths[j].q += eighths[j + width].q;
        eighths[j].qq += eighths[j + width].qq;
        eighths[j].qw += eighths[j + width].qw;
      }
    return eighths[0];
  }

  // The best scale and offset >= 0 for the q to which w is rounded at the given two.
  Fit fit(part scale, part offset) const {
    const auto [q, qq, qw] = sums(scale > part{} ? all(1.0f) / scale : part{}, offset);
    const float n = float(size);
    const part determinant = n * qq - q * q;
    // If all q are alike, any scale will do.
    scale = determinant > part{} ? (n * qw - q * sum) / determinant : scale;
    offset = (scale * q - sum) / n;
    const auto through_zero = offset < part{};
    const part steepest = qq > part{} ? qw / qq : part{};
    scale = through_zero ? steepest : scale;
    offset = through_zero ? part{} : offset;
    return {scale, offset, sum_of_squares - scale * qw + offset * sum};
  }

  Fit best_fit() const {
    Fit best{part{}, part{}, sum_of_squares};
    for (const float shrink : kShrink)
      keep_better(best, fit((high - low) * shrink / kLevels, -low * shrink));
    keep_better(best, fit(best.scale, best.offset));
    return best;
  }

  static void keep_better(Fit& best, const Fit& found) {
    const auto is_better = (found.scale > part{}) & (found.error < best.error);
    best.scale = is_better ? found.scale : best.scale;
    best.offset = is_better ? found.offset : best.offset;
    best.error = is_better ? found.error : best.error;
  }
};

inline part in_units(part value, part unit) {
  return unit > part{} ? rounded_within(value / unit, kFactors) : part{};
}

// Up to sixteen outputs: [...][16] each.
struct Outputs {
  int64_t num_groups, group;
  std::vector<float> turned;           // weights [groups * G]
  std::vector<float> scales, offsets;  // fitted, then in units of the factors [groups]
  uint16_t scale_factors[kLanes], offset_factors[kLanes];  // bf16
  std::vector<uint32_t> levels;  // [groups * G/8]: the four bytes of an output's eight inputs
  std::vector<uint8_t> wide;     // [16 outputs][num_wide]: bytes of the wide inputs, + kByteBias
  float wide_scales[kLanes];

  explicit Outputs(const Weights& linear)
      : num_groups(int4_group_pairs(linear) * 2),
        group(linear.group_size),
        turned(num_groups * group * kLanes),
        scales(num_groups * kLanes),
        offsets(num_groups * kLanes),
        levels(num_groups * group / 8 * kLanes),
        wide(kLanes * linear.num_wide) {}

  // rows: `count` rows of K weights; the other lanes, and inputs after K, stay zero.
  void turn(const float* rows, int64_t ld, int64_t count, int64_t K) {
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t k = 0; k < K; ++k) turned[k * kLanes + lane] = rows[lane * ld + k];
  }
  void turn(const uint16_t* rows, int64_t ld, int64_t count, int64_t K) {
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t k = 0; k < K; ++k) turned[k * kLanes + lane] = to_float(rows[lane * ld + k]);
  }

  // Rounds the wide inputs, each output's by themselves, and leaves zeros in their places.
  void take_wide(const Weights& linear) {
    const int64_t count = linear.num_wide;
    std::vector<float> row(count);
    for (int lane = 0; lane < kLanes && count > 0; ++lane) {
      for (int64_t i = 0; i < count; ++i) {
        float& weight = turned[linear.wide_inputs[i] * kLanes + lane];
        row[i] = weight;
        weight = 0.0f;
      }
      wide_scales[lane] = round_bytes(row.data(), count, &wide[lane * count]);
    }
  }

  void round() {
    for (int lane = 0; lane < kLanes; lane += kPartLanes) round_lanes(lane);
  }

 private:
  // An output with a NaN or an infinity among its weights is NaN.
  void round_lanes(int lane) {
    part largest_scale{}, largest_offset{};
    auto is_sound = part{} == part{};
    for (int64_t g = 0; g < num_groups; ++g) {
      const Fit fit = Groups(turned.data() + g * group * kLanes + lane, group).best_fit();
      is_sound &= fit.error <= all(kLargest);
      largest_scale = max(fit.scale, largest_scale);
      largest_offset = max(fit.offset, largest_offset);
      std::memcpy(&scales[g * kLanes + lane], &fit.scale, sizeof(part));
      std::memcpy(&offsets[g * kLanes + lane], &fit.offset, sizeof(part));
    }
    const part nan = all(__builtin_nanf(""));
    store(scale_factors + lane, is_sound ? largest_scale / kFactors : nan);
    store(offset_factors + lane, is_sound ? largest_offset / kFactors : nan);
    const part scale_factor = load_part(scale_factors + lane);
    const part offset_factor = load_part(offset_factors + lane);
    for (int64_t g = 0; g < num_groups; ++g) round_group(g, lane, scale_factor, offset_factor);
  }

  // A factor that is NaN is not above zero, so all is zero beside it.
  void round_group(int64_t g, int lane, part scale_factor, part offset_factor) {
    float* const stored_scale = &scales[g * kLanes + lane];
    float* const stored_offset = &offsets[g * kLanes + lane];
    const part s = in_units(load_part(stored_scale), scale_factor);
    const part o = in_units(load_part(stored_offset), offset_factor);
    std::memcpy(stored_scale, &s, sizeof(part));
    std::memcpy(stored_offset, &o, sizeof(part));
    const part scale = s * scale_factor;
    const part factor = scale > part{} ? all(1.0f) / scale : part{};
    const part offset = o > part{} ? o * offset_factor : part{};
    const float* w = turned.data() + g * group * kLanes + lane;
    uint32_t* words = levels.data() + g * group / 8 * kLanes + lane;
    for (int64_t i = 0; i < group; i += 8, words += kLanes) {
      typedef uint32_t bits __attribute__((vector_size(kRegisterBytes)));
      bits word{};
      for (int j = 0; j < 8; ++j) {
        const part level = (load_part(w + (i + j) * kLanes) + offset) * factor;
        const bits q = (bits)(min(max(level, part{}), all(kLevels)) + kRound) & 15;
        word |= q << (j % 4 * 8 + j / 4 * 4);
      }
      std::memcpy(words, &word, sizeof word);
    }
  }
};

uint8_t* output_unit(const Weights& linear, int64_t position) {
  return static_cast<uint8_t*>(const_cast<void*>(linear.weights)) +
         position / kUnitOutputs * int4_unit_bytes(linear);
}

void store_output(const Weights& linear, int64_t position, const Outputs& from, int64_t from_lane) {
  const int64_t lane = position % kUnitOutputs, words_per_group = from.group / 8;
  uint8_t* pair = output_unit(linear, position);
  for (int64_t i = 0; i < int4_group_pairs(linear); ++i, pair += int4_pair_bytes(linear))
    for (int64_t g = 0; g < 2; ++g) {
      const int64_t index = i * 2 + g;
      pair[g * kUnitOutputs + lane] = uint8_t(from.scales[index * kLanes + from_lane]);
      pair[2 * kUnitOutputs + lane * 2 + g] = uint8_t(from.offsets[index * kLanes + from_lane]);
      uint8_t* line = pair + kInt4HeaderBytes + g * from.group * kUnitOutputs / 2 + lane * 4;
      const uint32_t* words = from.levels.data() + index * words_per_group * kLanes + from_lane;
      for (int64_t k = 0; k < words_per_group; ++k)
        std::memcpy(line + k * 4 * kUnitOutputs, words + k * kLanes, 4);
    }
  for (int64_t k = 0; k < linear.num_wide; k += 4)
    std::memcpy(pair + k * kUnitOutputs + lane * 4, &from.wide[from_lane * linear.num_wide + k], 4);
  uint16_t* const factors = int4_factors(linear);
  factors[position] = from.scale_factors[from_lane];
  factors[padded_outputs(linear) + position] = from.offset_factors[from_lane];
  if (linear.num_wide > 0) int4_wide_scales(linear)[position] = from.wide_scales[from_lane];
}

template <typename Row>
void round_rows(const Weights& linear, const Row* rows, int64_t ld, int64_t first,
                int64_t num_rows) {
  Outputs outputs(linear);
  for (int64_t start = 0; start < num_rows; start += kLanes) {
    const int64_t count = num_rows - start < kLanes ? num_rows - start : kLanes;
    outputs.turn(rows + start * ld, ld, count, linear.num_inputs);
    outputs.take_wide(linear);
    outputs.round();
    for (int64_t lane = 0; lane < count; ++lane)
      store_output(linear, packed_position(linear, first + start + lane), outputs, lane);
  }
}

}  // namespace

void round_int4(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                int64_t first, int64_t num_rows) {
  if (rows_dtype == kBF16)
    round_rows(linear, static_cast<const uint16_t*>(rows), ld, first, num_rows);
  else
    round_rows(linear, static_cast<const float*>(rows), ld, first, num_rows);
}

}  // namespace quire::QUIRE_ISA
