// Divides a linear's work into tasks, and prefetches its weights.
#pragma once
#include <cstdint>

#include "linear/linear.h"

namespace quire::QUIRE_ISA {

struct Range {
  int64_t first;
  int64_t end;

  int64_t size() const { return end - first; }
  // Of `count` parts whose sizes differ by one at most.
  Range part(int64_t i, int64_t count) const {
    return {first + size() * i / count, first + size() * (i + 1) / count};
  }
};

constexpr int64_t kLineBytes = 64;

// Weights to prefetch while a loop works on others: `num_lines` cache lines from `next` on, spread
// over its steps.
class Prefetch {
 public:
  Prefetch(const uint8_t* next, int64_t num_lines) : next_(next), num_lines_(num_lines) {}

  // The loop will have so many steps.
  void spread(int64_t num_steps) {
    lines_per_step_ = num_steps > 0 ? divide_up(num_lines_, num_steps) : 0;
  }
  void step() {
    for (int64_t line = 0; line < lines_per_step_; ++line)
      __builtin_prefetch(next_ + line * kLineBytes, 0, 2);
    next_ += lines_per_step_ * kLineBytes;
  }

 private:
  const uint8_t* next_;
  int64_t num_lines_;
  int64_t lines_per_step_ = 0;
};

// Rows that are multiplied with one panel after another. Their bytes stay in the L2 cache
// meanwhile, with room for the panel and the next one.
constexpr int64_t kMaxGroupBytes = 384 * 1024;

inline int64_t num_row_groups(int64_t M, int64_t row_bytes) {
  return divide_up(M * row_bytes, kMaxGroupBytes);
}

}  // namespace quire::QUIRE_ISA
