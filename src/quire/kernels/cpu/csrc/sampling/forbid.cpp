// Applies token masks to logits that other options change afterwards (else `sample_allowed`).
#include "sampling/token_mask.h"

namespace quire::QUIRE_ISA {

void forbid(Pool& pool, float* logits, int64_t ld, int64_t V, const int64_t* lines,
            const uint32_t* words, int64_t width, int64_t N) {
  for_lines(pool, N, V, [=](int64_t i, const auto& division) {
    division.run([=](int64_t, int64_t first, int64_t end) {
      forbid_range(logits + lines[i] * ld, words + i * width, first, end);
    });
  });
}

}  // namespace quire::QUIRE_ISA
