// Distributes many small items of work among threads, by work stealing.
//
// The items have a fixed order. Each thread begins with a run of its own and takes from its front,
// so that it reads memory from first to last and knows what comes next. A thread without items
// takes from the back of other runs. So threads end together, and a thread that the system runs
// seldom, or not at all, delays no others.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

#include "threads/pool.h"

namespace quire::QUIRE_ISA {

class Shares {
 public:
  // Items 0 .. num_items - 1, in the pool's shared memory `slot`.
  Shares(Pool& pool, int slot, int64_t num_items)
      : num_threads_(pool.num_threads()),
        runs_(static_cast<Run*>(pool.shared(slot, num_threads_ * int64_t(sizeof(Run))))) {
    for (int64_t i = 0; i < num_threads_; ++i)
      new (&runs_[i]) Run{pack(num_items * i / num_threads_, num_items * (i + 1) / num_threads_)};
  }

  // f(item) for all items that `thread` gets; returns when none is left to take.
  template <typename F>
  void work(int thread, F&& f) {
    for (int64_t item; take_front(runs_[thread], &item);) f(item);
    for (int i = 1; i < num_threads_; ++i)
      for (int64_t item; take_back(runs_[(thread + i) % num_threads_], &item);) f(item);
  }

 private:
  // First and end of what is left, in one word.
  struct alignas(64) Run {
    std::atomic<uint64_t> left;
  };

  static uint64_t pack(int64_t first, int64_t end) { return uint64_t(first) << 32 | uint64_t(end); }

  static bool take_front(Run& run, int64_t* item) {
    uint64_t left = run.left.load(std::memory_order_relaxed);
    while (left >> 32 < uint32_t(left))
      if (run.left.compare_exchange_weak(left, left + (uint64_t(1) << 32))) {
        *item = int64_t(left >> 32);
        return true;
      }
    return false;
  }

  static bool take_back(Run& run, int64_t* item) {
    uint64_t left = run.left.load(std::memory_order_relaxed);
    while (left >> 32 < uint32_t(left))
      if (run.left.compare_exchange_weak(left, left - 1)) {
        *item = int64_t(uint32_t(left)) - 1;
        return true;
      }
    return false;
  }

  int num_threads_;
  Run* runs_;
};

// f(item, thread) for every item.
template <typename F>
void share(Pool& pool, int slot, int64_t num_items, F&& f) {
  Shares shares(pool, slot, num_items);
  const int64_t num_tasks = num_items < pool.num_threads() ? num_items : pool.num_threads();
  pool.parallel(num_tasks, [&](int64_t, int thread) {
    shares.work(thread, [&](int64_t item) { f(item, thread); });
  });
}

}  // namespace quire::QUIRE_ISA
