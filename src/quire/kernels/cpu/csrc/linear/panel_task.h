// Divides a linear's work into tasks, and prefetches its weights.
#pragma once
#include <cstdint>

#include "linear/linear.h"
#include "threads/work_stealing.h"

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

// Rows of a group, counted from its first, that are multiplied with one panel after another.
struct GroupRows {
  const LinearGroup* group;
  Range rows;
};

// How `num_rows` rows are divided: into so many parts, which begin at multiples of kMultiple.
template <int64_t kMultiple>
int64_t num_row_parts(int64_t num_rows, int64_t row_bytes) {
  const int64_t count = num_row_groups(num_rows, row_bytes);
  if constexpr (kMultiple == 1) return count;
  const int64_t num_blocks = divide_up(num_rows, kMultiple);
  return count < num_blocks ? count : num_blocks;
}

template <int64_t kMultiple>
Range row_part(int64_t num_rows, int64_t i, int64_t count) {
  if constexpr (kMultiple == 1) return Range{0, num_rows}.part(i, count);
  const Range blocks = Range{0, divide_up(num_rows, kMultiple)}.part(i, count);
  const int64_t end = blocks.end * kMultiple;
  return {blocks.first * kMultiple, end < num_rows ? end : num_rows};
}

// f(group, rows, panel, thread) for all rows and panels of a call. Groups follow each other without
// a barrier; a thread takes panel after panel of one's rows, which begin at a multiple of
// kMultiple. Uses the pool's shared memory, slots 2 and 3.
template <int64_t kMultiple = 1, typename F>
void share_panels(Pool& pool, const LinearCall& call, int64_t row_bytes, F&& f) {
  int64_t num_parts = 0;
  for (int64_t g = 0; g < call.num_groups; ++g)
    num_parts += num_row_parts<kMultiple>(call.groups[g].count, row_bytes);
  auto* parts =
      static_cast<GroupRows*>(pool.shared(3, num_parts * int64_t(sizeof(GroupRows))));
  GroupRows* next = parts;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    const int64_t num_rows = call.groups[g].count;
    const int64_t count = num_row_parts<kMultiple>(num_rows, row_bytes);
    for (int64_t i = 0; i < count; ++i)
      *next++ = {&call.groups[g], row_part<kMultiple>(num_rows, i, count)};
  }
  const int64_t panels = num_panels(call.any());
  share(pool, 2, panels * num_parts, [&](int64_t item, int thread) {
    const GroupRows& part = parts[item / panels];
    f(*part.group, part.rows, item % panels, thread);
  });
}

}  // namespace quire::QUIRE_ISA
