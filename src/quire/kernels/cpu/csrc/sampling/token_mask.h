// Makes a line's tokens impossible if their bits in a mask are not set.
//
// A grammar's masks have whole words in a row that are all set (inside of a string) or all empty
// (between two parts of JSON).
#pragma once
#include "sampling/scan_logits.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kWordTokens = 32;

static_assert(kRangeTokens % kWordTokens == 0 && kWordTokens == 2 * kLanes);

// Masks tokens [first, end), first a multiple of 32; bit t % 32 of words[t / 32] is token t's.
inline void forbid_range(float* line, const uint32_t* words, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; t += kWordTokens) {
    const uint32_t word = words[t / kWordTokens];
    if (word == 0xffffffffu) continue;
    const int64_t n = min_of(kWordTokens, end - t);
    float* logits = line + t;
    if (word == 0 && n == kWordTokens) {
      for (int64_t i = 0; i < kWordTokens; ++i) logits[i] = kNever;
    } else {
      for (int64_t i = 0; i < n; ++i) logits[i] = (word >> i & 1) ? logits[i] : kNever;
    }
  }
}

struct alignas(64) ForbiddenPart {
  Largest largest;   // of what is left
  float raw_largest; // before; NaN where there is one
};

// `forbid_range`, and the results of `find_largest` before and after it, in one pass.
inline ForbiddenPart forbid_and_find(float* line, const uint32_t* words, int64_t first,
                                     int64_t end) {
  constexpr int64_t kBlock = 32 * kWordTokens;
  constexpr vu kBits = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf raw[2] = {splat(kNever), splat(kNever)};
  vu broken = {};
  float largest = kNever;
  int64_t block = first;
  for (int64_t start = first; start < end; start += kBlock) {
    const int64_t stop = min_of(end, start + kBlock);
    vf best[2] = {splat(kNever), splat(kNever)};
    int64_t t = start;
    for (; t + kWordTokens <= stop; t += kWordTokens) {
      const uint32_t word = words[t / kWordTokens];
      for (int half = 0; half < 2; ++half) {
        float* logits = line + t + half * kLanes;
        const vf v = load(logits);
        broken |= ((vu)v & 0x7fffffffu) + 0x007fffffu;  // NaN alone sets the highest bit
        raw[half] = max(raw[half], v);
        if (word == 0xffffffffu) {
          best[half] = max(best[half], v);
        } else if (word == 0) {
          store(logits, splat(kNever));
        } else {
          const vi allowed = -(vi)((vu{} + (word >> half * kLanes)) >> kBits & 1u);
          const vf left = (vf)((allowed & (vi)v) | (~allowed & (vi)splat(kNever)));
          best[half] = max(best[half], left);
          store(logits, left);
        }
      }
    }
    float of_block = reduce_max(max(best[0], best[1]));
    for (; t < stop; ++t) {
      const float v = line[t];
      if (is_nan(v)) broken[0] = 1u << 31;
      raw[0][0] = v > raw[0][0] ? v : raw[0][0];
      if (!(words[t / kWordTokens] >> (t % kWordTokens) & 1)) line[t] = kNever;
      of_block = line[t] > of_block ? line[t] : of_block;
    }
    if (of_block > largest) largest = of_block, block = start;
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= broken[lane];
  if (bits >> 31) return {{__builtin_nanf(""), first}, __builtin_nanf("")};
  while (line[block] != largest) ++block;
  return {{largest, block}, reduce_max(max(raw[0], raw[1]))};
}

// The same for a divided line. raw_largest: the largest logit before the mask.
template <typename Division>
Largest forbid_line(const Division& division, const LineMemory<Division>& memory, float* line,
                    const uint32_t* words, float* raw_largest) {
  auto* parts = memory.template parts<ForbiddenPart>();
  division.run([&](int64_t part, int64_t first, int64_t end) {
    parts[part] = forbid_and_find(line, words, first, end);
  });
  Largest largest = parts[0].largest;
  *raw_largest = parts[0].raw_largest;
  for (int64_t part = 1; part < division.num_parts(); ++part) {
    const ForbiddenPart& found = parts[part];
    if (is_nan(*raw_largest)) break;
    if (!(found.raw_largest <= *raw_largest)) *raw_largest = found.raw_largest;
    if (!(found.largest.value <= largest.value)) largest = found.largest;
  }
  return largest;
}

}  // namespace quire::QUIRE_ISA
