// Makes tokens impossible whose bit in a mask is not set.
//
// A grammar's masks have whole words in a row that are all set (inside of a string) or all empty
// (between two parts of JSON): the former cost no look at the logits, the latter a plain store.
#include "sampling/scan_logits.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kWordTokens = 32;

static_assert(kRangeTokens % kWordTokens == 0);

// Of tokens [first, end), first a multiple of 32; bit t % 32 of words[t / 32] is token t's.
void forbid_range(float* line, const uint32_t* words, int64_t first, int64_t end) {
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

}  // namespace

void forbid(Pool& pool, float* logits, int64_t ld, int64_t V, const int64_t* lines,
            const uint32_t* words, int64_t width, int64_t N) {
  for_lines(pool, N, V, [=](int64_t i, const auto& division) {
    division.run([=](int64_t, int64_t first, int64_t end) {
      forbid_range(logits + lines[i] * ld, words + i * width, first, end);
    });
  });
}

}  // namespace quire::QUIRE_ISA
