// The thread pool's workers, and how they wait.

#include "threads/pool.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <climits>
#include <cstdlib>

namespace quire {
namespace {

// The time that a wait spins before it sleeps. Waking a sleeper takes 30 to 50 us and costs the
// waker 9 (two Zen 4 cores, virtual), so workers wait through the serial parts of a step and of the
// loop around it. A worker that lost its processor to a neighbour spins just long enough to reach
// from one region to the next, because spinning uses up its share of the processor.
constexpr int64_t kWorkerSpinNs = 400'000;
constexpr int64_t kPoliteSpinNs = 10'000;
constexpr int64_t kLossNs = 1'000'000;     // a neighbour's slice; the system itself takes less
constexpr int64_t kPoliteNs = 20'000'000;  // how long a loss is remembered
constexpr int64_t kCallerSpinNs = 20'000;
constexpr int kLooksPerClock = 16;
constexpr int64_t kMoveNs = 1'000'000;  // between two moves of all workers

int64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleep while *word == seen; may return at any time.
template <typename T>
void futex_wait(std::atomic<T>* word, T seen) {
#if defined(__linux__)
  static_assert(sizeof *word == sizeof(uint32_t));
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, uint32_t(seen), nullptr, nullptr, 0);
#else
  word->wait(seen);
#endif
}

// Wake that many threads, or more of them.
template <typename T>
void futex_wake(std::atomic<T>* word, [[maybe_unused]] int num_threads) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
#else
  word->notify_all();
#endif
}

// The processor that runs the caller; -1 on systems without thread affinity.
int current_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Lets the thread run on the caller's processors except this one. No change if that is refused.
void keep_off([[maybe_unused]] int processor, [[maybe_unused]] std::thread& thread) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more than 1024 processors
  CPU_CLR(processor, &allowed);
  if (CPU_COUNT(&allowed) > 0)
    pthread_setaffinity_np(thread.native_handle(), sizeof allowed, &allowed);
#endif
}

// Check repeatedly until it is true or the time is over. Returns whether it is true.
template <typename F>
bool spin(int64_t end_ns, F&& is_true) {
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (is_true()) return true;
      relax();
    }
  } while (now_ns() < end_ns);
  return false;
}

// Tells a thread whether it shares its processor: whether it lost more than a moment to others.
class Loss {
 public:
  // Time asleep is no loss.
  void forget() {
    wall_ns_ = clock_ns(CLOCK_MONOTONIC);
    own_ns_ = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  }

  bool was_lately() {
    const int64_t wall_before = wall_ns_, own_before = own_ns_;
    forget();
    if (wall_ns_ - wall_before > own_ns_ - own_before + kLossNs) until_ns_ = wall_ns_ + kPoliteNs;
    return wall_ns_ < until_ns_;
  }

 private:
  int64_t wall_ns_, own_ns_, until_ns_ = 0;
};

}  // namespace

void* Pool::Buffer::take(int64_t wanted) {
  if (wanted > num_bytes) {
    std::free(data);
    num_bytes = (wanted + wanted / 4 + 4095) / 4096 * 4096;
    data = std::aligned_alloc(4096, num_bytes);
    if (data == nullptr) std::abort();  // a few MiB: the process can't go on anyway
  }
  return data;
}

Pool::Buffer::~Buffer() { std::free(data); }

Pool::Pool(int num_threads)
    : num_threads_(num_threads), scratch_(num_threads), shared_(kNumShared) {
  // Signals are the interpreter's: its main thread must get them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int thread = 1; thread < num_threads; ++thread)
      threads_.emplace_back([this, thread] { work(thread); });
  } catch (...) {  // no memory, or the system's bound on threads: the started workers must end
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stops_ = true;
  epoch_.fetch_add(1);
  futex_wake(&epoch_, INT_MAX);
  for (auto& thread : threads_) thread.join();
}

void* Pool::scratch(int thread, int64_t num_bytes) { return scratch_[thread].take(num_bytes); }

void* Pool::shared(int slot, int64_t num_bytes) { return shared_[slot].take(num_bytes); }

void Pool::run(int64_t num_tasks, TaskFunction function, void* context) {
  if (num_tasks <= 1 || num_threads_ == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) function(context, task, 0);
    return;
  }
  leave_processor_to_caller();
  const int32_t count = static_cast<int32_t>(num_tasks);
  function_.store(function, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_tasks_.store(count, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  ticket_.store(uint64_t(epoch) << 32 | uint32_t(count), std::memory_order_release);
  epoch_.store(epoch);
  if (num_asleep_.load() > 0) futex_wake(&epoch_, count - 1);
  take_tasks(epoch, 0);
  wait_for_tasks(count);
}

// Waits for tasks that other threads have taken.
void Pool::wait_for_tasks(int32_t count) {
  const auto is_done = [&] { return num_done_.load(std::memory_order_acquire) == count; };
  if (is_done() || spin(now_ns() + kCallerSpinNs, is_done)) return;
  caller_asleep_.store(true);
  for (int32_t seen; (seen = num_done_.load()) != count;) futex_wait(&num_done_, seen);
  caller_asleep_.store(false);
}

// Linux tends to wake a worker on its waker's processor. There it takes time from the thread that
// everything waits for, and leaves another processor to a neighbour (Linux 6.18: two threads then
// got one processor's time, not one and a half). So workers may run on the caller's processors
// except its current one; the caller itself goes wherever the system sends it.
void Pool::leave_processor_to_caller() {
  const int processor = current_processor();
  if (processor == caller_processor_ || processor < 0) return;
  const int64_t now = now_ns();
  if (now < next_move_ns_) return;
  next_move_ns_ = now + kMoveNs;
  caller_processor_ = processor;
  for (auto& thread : threads_) keep_off(processor, thread);
}

// The ticket itself counts the region's remaining tasks, so another region's can't be taken
// instead. The region's other fields are read after a task was taken, and don't change then.
void Pool::take_tasks(uint32_t epoch, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == epoch && uint32_t(ticket) != 0) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
    const int32_t count = num_tasks_.load(std::memory_order_relaxed);
    const int64_t task = count - int64_t(uint32_t(ticket));
    void* const context = context_.load(std::memory_order_relaxed);
    function_.load(std::memory_order_relaxed)(context, task, thread);
    if (num_done_.fetch_add(1) + 1 == count && caller_asleep_.load()) futex_wake(&num_done_, 1);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  Loss loss;
  loss.forget();
  while (!stops_.load(std::memory_order_relaxed)) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (epoch != seen) {
      seen = epoch;
      take_tasks(epoch, thread);
      continue;
    }
    const auto has_come = [&] { return epoch_.load(std::memory_order_relaxed) != seen; };
    const int64_t start_ns = now_ns();
    if (spin(start_ns + kPoliteSpinNs, has_come)) continue;
    if (!loss.was_lately() && spin(start_ns + kWorkerSpinNs, has_come)) continue;
    num_asleep_.fetch_add(1);
    futex_wait(&epoch_, seen);
    num_asleep_.fetch_sub(1);
    loss.forget();
  }
}

}  // namespace quire
