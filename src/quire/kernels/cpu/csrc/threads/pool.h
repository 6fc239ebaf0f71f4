// The thread pool that runs all kernels.
//
// A region is a number of tasks; threads take the next task until none is left, so a thread that
// the system runs seldom takes few. The caller works too, and waits for tasks that other threads
// took, never for threads without tasks: a busy neighbour on one processor costs only its share.
// Waits spin for a moment, since a decode step has a hundred regions of some 20 us, then sleep; an
// idle pool uses no processor.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace quire {

// task: 0 <= task < num_tasks. thread: 0 <= thread < num_threads, 0 the caller.
using TaskFunction = void (*)(void* context, int64_t task, int thread);

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Run all tasks and return when they are done. Not to be called by two threads at once, nor from
  // within a task.
  void run(int64_t num_tasks, TaskFunction function, void* context);

  // f(task, thread) for every task.
  template <typename F>
  void parallel(int64_t num_tasks, F&& f) {
    run(num_tasks, [](void* context, int64_t task, int thread) {
      (*static_cast<std::remove_reference_t<F>*>(context))(task, thread);
    }, &f);
  }

  // At least num_bytes, aligned to 64, kept by the pool and overwritten by the next user.
  // Memory of one thread, for use within a task:
  void* scratch(int thread, int64_t num_bytes);
  // Memory of the caller that all tasks of a region read. Nested data takes different slots:
  void* shared(int slot, int64_t num_bytes);
  static constexpr int kNumShared = 8;

 private:
  struct alignas(64) Buffer {
    void* data = nullptr;
    int64_t num_bytes = 0;
    void* take(int64_t wanted);
    ~Buffer();
  };

  void work(int thread);
  void stop();  // ends the workers, and waits for that
  void take_tasks(uint32_t epoch, int thread);
  void wait_for_tasks(int32_t count);
  void leave_processor_to_caller();

  // A region's number in the high half, the tasks that are not taken in the low one: a thread
  // that comes late, with an old region's number, takes nothing.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> num_done_{0};  // futex of the caller
  std::atomic<bool> caller_asleep_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // futex of the workers
  std::atomic<int32_t> num_asleep_{0};
  std::atomic<bool> stops_{false};
  // The region; holds still while one of its tasks is not done.
  std::atomic<int32_t> num_tasks_{0};
  std::atomic<TaskFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};

  alignas(64) int caller_processor_ = -1;  // which the workers may not run on
  int64_t next_move_ns_ = 0;
  int num_threads_;
  std::vector<Buffer> scratch_;
  std::vector<Buffer> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace quire
