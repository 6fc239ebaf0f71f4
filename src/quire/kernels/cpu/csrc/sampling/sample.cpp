// Greedy choice, and sampling without sorting.
//
// Finds the token that quire/sampling/host/choice.py defines and explains, in two passes over a
// line (a third for top_p).
//
// A sample is the argmax of x + gumbel(u) among the tokens that the options leave, x the scaled
// logit, u the token's uniform. In base 2 that score is below x log2(e) - log2(u), and the bits of
// a float u, read as an integer, are a lower bound of log2(u). So a lane costs the hash, two
// conversions and a multiply-add; tokens above the best exact score so far are computed exactly.
#include <cmath>

#include "sampling/scan_logits.h"
#include "sampling/token_mask.h"

namespace quire::QUIRE_ISA {
namespace {

// SplitMix64, as in quire/sampling/noise.py.
constexpr uint64_t kIncrement = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMultiplier0 = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kMultiplier1 = 0x94D049BB133111EBu;

constexpr double kLog2e = 1.4426950408889634;
// Masses are counted in units of 2^-32 of the largest; below this x they are 0.
constexpr float kNoMass = -22.25f;
// Slack for the rounding of bounds in fp32, at most 5e-5 for tokens that can win.
constexpr double kSlack = 1e-3;

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kMultiplier0;
  z = (z ^ (z >> 27)) * kMultiplier1;
  return z ^ (z >> 31);
}

// A register of hashes and of the numbers made from them.
typedef uint64_t part_u64 __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t part_u32 __attribute__((vector_size(kRegisterBytes)));
typedef int32_t part_i32 __attribute__((vector_size(kRegisterBytes)));

// Without its last step, which changes none of the 31 highest bits.
inline part_u64 mix_high(part_u64 z) {
  z = (z ^ (z >> 30)) * kMultiplier0;
  return (z ^ (z >> 27)) * kMultiplier1;
}

// One line that samples.
struct Race {
  const float* line;
  const uint32_t* words;  // of the line's mask, which was applied to it; or none
  float largest;
  float temperature;
  uint64_t key;
  float left;  // the lowest x that top_k and min_p leave

  float x(int64_t token) const { return (line[token] - largest) / temperature; }

  double score(int64_t token) const {
    const uint64_t bits = mix(key + uint64_t(token + 1) * kIncrement) >> 12;
    const double uniform = (double(bits) + 0.5) * 0x1p-52;
    return double(x(token)) - std::log(-std::log1p(-uniform));
  }
};

struct Winner {
  int64_t token;
  double score;

  // Among equal scores, the lowest token wins.
  void meet(int64_t other, double its_score) {
    if (its_score > score || (its_score == score && other < token)) *this = {other, its_score};
  }
};

// A score in the units of `bound` below, which a token's bound must exceed: base 2, and off by the
// exponent's bias and the 31 bits of the uniform.
inline part to_beat(double score) { return part{} + float(score * kLog2e - 158.0 - kSlack); }

// The counters that are hashed, for every other token from `first` on.
inline part_u64 every_other(uint64_t first) {
  part_u64 counters;
  for (int lane = 0; lane < kPartLanes / 2; ++lane)
    counters[lane] = first + 2 * uint64_t(lane) * kIncrement;
  return counters;
}

// The best of `winner` and of tokens [first, end) with x >= lowest.
Winner race_range(const Race& race, float lowest, int64_t first, int64_t end, Winner winner) {
  part_u64 even = every_other(race.key + uint64_t(first + 1) * kIncrement);
  const part scale = part{} + float(kLog2e / double(race.temperature));
  part floor = to_beat(winner.score);
  for (int64_t t = first; t < end; t += kPartLanes, even += kPartLanes * kIncrement) {
    if (race.words && race.words[t / kWordTokens] == 0) continue;
    // An even token's high half moves below its odd neighbour's: lane i is token t + i.
    const part_u64 odd_high = mix_high(even + kIncrement) & 0xffffffff00000000u;
    const auto bits = (part_u32)(mix_high(even) >> 32 | odd_high);
    const part uniform = __builtin_convertvector((part_i32)(bits >> 1), part);    // times 2^31
    const part log2_uniform = __builtin_convertvector((part_i32)uniform, part);  // times 2^23
    const part behind = load_part(race.line + t, end - t) - race.largest;
    const part bound = behind * scale - log2_uniform * 0x1p-23f;
    uint32_t lanes = greater_lanes(bound, floor);
    if (__builtin_expect(lanes == 0, 1)) continue;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t token = t + __builtin_ctz(lanes);
      if (race.x(token) >= lowest) winner.meet(token, race.score(token));
    }
    floor = to_beat(winner.score);
  }
  return winner;
}

struct alignas(64) RacedPart {
  Winner winner;
};

template <typename Division>
Winner run_race(const Division& division, const LineMemory<Division>& memory, const Race& race,
                float lowest, int64_t best_token) {
  auto* parts = memory.template parts<RacedPart>();
  const Winner start{best_token, race.score(best_token)};
  division.run([&](int64_t part, int64_t first, int64_t end) {
    parts[part].winner = race_range(race, lowest, first, end, start);
  });
  Winner winner = start;
  for (int64_t part = 0; part < division.num_parts(); ++part)
    winner.meet(parts[part].winner.token, parts[part].winner.score);
  return winner;
}

typedef float v8f __attribute__((vector_size(32)));
typedef double v8d __attribute__((vector_size(64)));

// Whole numbers, whose sums are exact in any order.
struct alignas(64) Mass {
  double total;
  double above;
};

// For 0 <= x <= 2^32.
inline vf floor_of(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
  const vi is_whole = greater(x, splat(8388607.5f));
  const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
  return (vf)((is_whole & (vi)x) | (~is_whole & (vi)whole));
#endif
}

inline v8d add_up(vf x) {
  const v8f low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  const v8f high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_convertvector(low, v8d) + __builtin_convertvector(high, v8d);
}

inline double reduce_add(v8d x) {
  double sum = 0;
  for (int lane = 0; lane < 8; ++lane) sum += x[lane];
  return sum;
}

// The weights of the remaining tokens in [first, end), and of those above x = won.
Mass weigh_range(const Race& race, float won, int64_t first, int64_t end) {
  const float lowest = race.left > kNoMass ? race.left : kNoMass;
  // Dividing by the temperature takes longer than all else, and most tokens weigh nothing.
  const part behind_all = part{} + (lowest * race.temperature * 1.0001f - 1e-37f);
  const bool divides = race.temperature != 1.0f;
  v8d total = {}, above = {};
  for (int64_t t = first; t < end; t += kLanes) {
    const Parts behind{load_logits(race.line + t, end - t) - splat(race.largest)};
    uint32_t weighty = 0;
    for (int i = 0; i < kNumParts; ++i) weighty |= greater_lanes(behind.parts[i], behind_all);
    if (weighty == 0) continue;
    const vf x = divides ? behind.whole / splat(race.temperature) : behind.whole;
    const vi left = ~greater(splat(lowest), x);
    const vi mass = (vi)floor_of(exp(x) * splat(0x1p32f)) & left;
    total += add_up((vf)mass);
    above += add_up((vf)(mass & greater(x, splat(won))));
  }
  return {reduce_add(total), reduce_add(above)};
}

template <typename Division>
Mass weigh(const Division& division, const LineMemory<Division>& memory, const Race& race,
           float won) {
  auto* parts = memory.template parts<Mass>();
  division.run([&](int64_t part, int64_t first, int64_t end) {
    parts[part] = weigh_range(race, won, first, end);
  });
  Mass all{0, 0};
  for (int64_t part = 0; part < division.num_parts(); ++part) {
    all.total += parts[part].total;
    all.above += parts[part].above;
  }
  return all;
}

// The lowest float above x, for x < 0.
inline float next_up(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  --bits;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Samples from a line whose largest logit and best tokens were found.
template <typename Division>
void sample_scanned(const Division& division, const LineMemory<Division>& memory,
                    const SampleRow& row, const float* line, const uint32_t* words,
                    const Scan& found, int64_t* token_id, float* largest) {
  *token_id = found.largest.token;
  *largest = found.largest.value;
  if (row.temperature == 0.0f || !is_finite(*largest)) return;
  const uint64_t key = mix(row.stream + uint64_t(row.position + 1) * kIncrement);
  Race race{line, words, *largest, row.temperature, key, row.log_min_p};
  if (row.top_k > 0) {
    const float last = (found.best.worst() - *largest) / row.temperature;
    race.left = last > race.left ? last : race.left;
  }
  const int64_t best = found.largest.token;
  Winner winner = run_race(division, memory, race, race.left, best);
  if (row.top_p < 1.0)
    for (;;) {
      const float won = race.x(winner.token);
      const Mass mass = weigh(division, memory, race, won);
      if (mass.above < row.top_p * mass.total) break;
      winner = run_race(division, memory, race, next_up(won), best);
    }
  *token_id = winner.token;
}

template <typename Division>
LineMemory<Division> memory_of(const Division& division, const SampleRow& row) {
  const bool is_greedy = row.temperature == 0.0f;
  return LineMemory<Division>(division, is_greedy ? 0 : min_of(row.top_k, division.V));
}

template <typename Division>
void sample_line(const Division& division, const SampleRow& row, const float* line,
                 int64_t* token_id, float* largest) {
  const LineMemory<Division> memory = memory_of(division, row);
  const Scan found = scan(division, memory, line);
  sample_scanned(division, memory, row, line, nullptr, found, token_id, largest);
}

template <typename Division>
void sample_masked_line(const Division& division, const SampleRow& row, float* line,
                        const uint32_t* words, int64_t* token_id, float* largest,
                        float* raw_largest) {
  const LineMemory<Division> memory = memory_of(division, row);
  const Largest left = forbid_line(division, memory, line, words, raw_largest);
  const bool has_best = memory.k() > 0;
  const Scan found = has_best ? scan(division, memory, line) : Scan{left, {nullptr, 0}};
  sample_scanned(division, memory, row, line, words, found, token_id, largest);
}

}  // namespace

void argmax(Pool& pool, const float* logits, int64_t ld, int64_t R, int64_t V, int64_t* index,
            float* largest) {
  for_lines(pool, R, V, [=](int64_t i, const auto& division) {
    const LineMemory memory(division, 0);
    const Largest found = scan(division, memory, logits + i * ld).largest;
    index[i] = found.token;
    largest[i] = found.value;
  });
}

void sample(Pool& pool, const float* logits, int64_t ld, int64_t V, const SampleRow* rows,
            int64_t R, int64_t* token_ids, float* largest) {
  for_lines(pool, R, V, [=](int64_t i, const auto& division) {
    sample_line(division, rows[i], logits + i * ld, token_ids + i, largest + i);
  });
}

void sample_allowed(Pool& pool, float* logits, int64_t ld, int64_t V, const SampleRow* rows,
                    const int64_t* masks, const uint32_t* words, int64_t width, int64_t R,
                    int64_t* token_ids, float* largest, float* raw_largest) {
  for_lines(pool, R, V, [=](int64_t i, const auto& division) {
    float* line = logits + i * ld;
    if (masks[i] >= 0) {
      sample_masked_line(division, rows[i], line, words + masks[i] * width, token_ids + i,
                         largest + i, raw_largest + i);
    } else {
      sample_line(division, rows[i], line, token_ids + i, largest + i);
      raw_largest[i] = largest[i];
    }
  });
}

}  // namespace quire::QUIRE_ISA
