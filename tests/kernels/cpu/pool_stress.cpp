// Works the thread pool hard and checks that every task of every region ran once, before the region
// ended. Built and run by test_pool.py, also under ThreadSanitizer, for which the tasks write plain
// memory: what the pool does not order is a race.
//
//     pool_stress NUM_THREADS
#include "threads/pool.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <time.h>

using quire::Pool;

namespace {

uint64_t state = 88172645463325252;

uint64_t chance(uint64_t below) {  // xorshift
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

void check(bool is_true, const char* what) {
  if (is_true) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

void sleep_us(int64_t duration) {
  const timespec time{0, duration * 1000};
  nanosleep(&time, nullptr);
}

// Plain counters, one for each task: 1 after the region, for all of them and for no other.
void count_tasks(Pool& pool, std::vector<int>& counts, int64_t num_tasks) {
  pool.parallel(num_tasks, [&](int64_t task, int thread) {
    check(0 <= thread && thread < pool.num_threads(), "a thread's number");
    ++counts[task];
  });
  for (size_t task = 0; task < counts.size(); ++task) {
    check(counts[task] == (int64_t(task) < num_tasks ? 1 : 0), "a task was lost or done twice");
    counts[task] = 0;
  }
}

void tiny_regions(Pool& pool) {
  std::vector<int> counts(40);
  for (int region = 0; region < 6000; ++region) count_tasks(pool, counts, chance(9));
  for (int region = 0; region < 300; ++region) count_tasks(pool, counts, chance(counts.size()));
}

// Whoever takes one certain task is slow, so that in turn the caller and workers are waited for; the
// pauses let workers fall asleep, before and while the next region starts.
void slow_tasks(Pool& pool) {
  std::vector<int> counts(12);
  for (int region = 0; region < 60; ++region) {
    const int64_t slow_task = region % 12;
    pool.parallel(12, [&](int64_t task, int) {
      if (task == slow_task) sleep_us(300);
      ++counts[task];
    });
    for (int& count : counts) check(count == 1, "a slow region ended early");
    counts.assign(12, 0);
    if (region % 3 == 0) sleep_us(chance(900));
  }
}

// A region reads what another wrote to shared memory, while a further slot grows; each thread has a
// scratch memory of its own.
void memory(Pool& pool) {
  for (int64_t size = 1; size < 40'000; size *= 3) {
    auto* first = static_cast<int64_t*>(pool.shared(0, size * sizeof(int64_t)));
    check(reinterpret_cast<uintptr_t>(first) % 64 == 0, "alignment of shared memory");
    pool.parallel(size, [&](int64_t task, int thread) {
      auto* own = static_cast<int64_t*>(pool.scratch(thread, (1 + task % 700) * 64));
      check(reinterpret_cast<uintptr_t>(own) % 64 == 0, "alignment of scratch memory");
      *own = task;
      first[task] = *own * 3;
    });
    auto* second = static_cast<int64_t*>(pool.shared(1, size * sizeof(int64_t)));
    pool.parallel(size, [&](int64_t task, int) { second[task] = first[size - 1 - task]; });
    for (int64_t task = 0; task < size; ++task)
      check(second[task] == (size - 1 - task) * 3, "what a region before has written");
  }
}

void coming_and_going(int num_threads) {
  for (int round = 0; round < 60; ++round) {
    auto pool = std::make_unique<Pool>(num_threads);
    std::vector<int> counts(5);
    for (uint64_t region = chance(3); region > 0; --region) count_tasks(*pool, counts, 5);
    if (round % 20 == 0) sleep_us(600);  // its threads are asleep when it goes
  }
}

// Pools of several callers don't know each other.
void two_callers(int num_threads) {
  auto work = [num_threads] {
    Pool pool(num_threads);
    std::vector<int> counts(7);
    for (int region = 0; region < 400; ++region) count_tasks(pool, counts, region % 8);
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace

int main(int, char** words) {
  const int num_threads = std::atoi(words[1]);
  {
    Pool pool(num_threads);
    tiny_regions(pool);
    slow_tasks(pool);
    memory(pool);
    tiny_regions(pool);
  }
  coming_and_going(num_threads);
  two_callers(num_threads);
  std::printf("done\n");
}
