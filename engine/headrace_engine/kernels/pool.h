// A pool of threads for loops that are far shorter than a thread's time slice.
//
// The caller hands out a loop's items and takes part; helpers take items as they come by. What has
// no helper's hand on it never waits for that helper: where another process has its core, the caller
// does the work alone. This is what OpenMP's barriers cannot do, which wait for every thread.
// Helpers spin for tens of microseconds when there is nothing to do, then sleep.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace headrace {

class Pool {
 public:
  using Body = void (*)(const void* context, int64_t item, int thread);

  // `threads` counts the caller too. Fewer are used where the system gives no more.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return helpers_ + 1; }

  // Calls body(item, thread) for each item below `count`, in any order, and returns after the last.
  // One loop at a time.
  template <class Function>
  void run(int64_t count, const Function& body) {
    if (count == 1 || helpers_ == 0) {
      for (int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    run(count, &call<Function>, &body);
  }

 private:
  struct Helper {
    Pool* pool;
    int number;
    pthread_t thread;
  };

  template <class Function>
  static void call(const void* function, int64_t item, int thread) {
    (*static_cast<const Function*>(function))(item, thread);
  }

  void run(int64_t count, Body body, const void* context);
  bool take_one(uint64_t cursor, int thread);
  void help(int thread);
  uint64_t await(uint64_t seen);
  static void* enter(void* helper);

  // Number of the loop in the upper half, of its next item in the lower one: a helper that comes
  // late with a loop's number cannot take another loop's item.
  alignas(64) std::atomic<uint64_t> cursor_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> count_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<uint32_t> round_{0};  // what sleepers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  Helper* team_ = nullptr;
  int helpers_ = 0;
};

}  // namespace headrace
