// A pool of threads for loops that are far shorter than a thread's time slice.
//
// The caller starts a loop and takes items too; helpers take items when they arrive. Items that no
// helper has taken never wait for one: if another process has a helper's core, the caller does the
// work alone. OpenMP's barriers cannot do this, because they wait for every thread. Without work,
// helpers spin for tens of microseconds, then sleep.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace headrace {

class Pool {
 public:
  using Body = void (*)(const void* context, int64_t item, int thread);

  // `threads` includes the caller. Fewer are used if the system allows no more.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return helpers_ + 1; }

  // Calls body(item, thread) for each item below `count`, in any order, and returns after the
  // last. One loop at a time.
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

  // The loop's number in the upper half, its next item in the lower half: a late helper that still
  // has an old loop's number cannot take another loop's item.
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
