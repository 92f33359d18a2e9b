#include "pool.h"

#include <sched.h>

#include <cstdlib>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {
namespace {

constexpr int kSpins = 2000;  // tens of microseconds
constexpr int kMaxItems = 0x7fffffff;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  if (word.load() == value) sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, kMaxItems, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

inline uint32_t loop_of(uint64_t cursor) { return uint32_t(cursor >> 32); }
inline int64_t item_of(uint64_t cursor) { return int64_t(cursor & 0xffffffffu); }
inline uint64_t first_item(uint32_t loop) { return uint64_t(loop) << 32; }
constexpr uint64_t kClosed = 0xffffffffu;  // not an item of any loop

}  // namespace

Pool::Pool(int threads) {
  if (threads < 2) return;
  team_ = static_cast<Helper*>(std::calloc(threads - 1, sizeof(Helper)));
  for (int i = 0; team_ && i < threads - 1; ++i) {
    team_[i] = {this, i + 1, {}};
    if (pthread_create(&team_[i].thread, nullptr, &Pool::enter, &team_[i]) != 0) break;
    ++helpers_;
  }
}

Pool::~Pool() {
  closing_.store(true);
  round_.fetch_add(1);
  wake_all(round_);
  for (int i = 0; i < helpers_; ++i) pthread_join(team_[i].thread, nullptr);
  std::free(team_);
}

void Pool::run(int64_t count, Body body, const void* context) {
  if (count <= 0) return;
  // Closed first: no helper may combine the old loop's cursor with the new loop's body.
  const uint32_t loop = loop_of(cursor_.load(std::memory_order_relaxed));
  cursor_.store(first_item(loop + 1) | kClosed, std::memory_order_seq_cst);
  count_.store(count, std::memory_order_release);
  body_.store(body, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  done_.store(0, std::memory_order_release);
  cursor_.store(first_item(loop + 2), std::memory_order_seq_cst);
  round_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(round_);
  while (take_one(cursor_.load(std::memory_order_acquire), 0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
    if (spins < kSpins)
      relax();
    else
      sched_yield();
}

// Takes the next item of `cursor`'s loop. False if there is none left. What it has read of the
// loop is valid only if the cursor has not changed meanwhile.
bool Pool::take_one(uint64_t cursor, int thread) {
  for (;;) {
    const int64_t item = item_of(cursor);
    const Body body = body_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    if (item >= count_.load(std::memory_order_acquire)) return false;
    if (cursor_.compare_exchange_weak(cursor, cursor + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      body(context, item, thread);
      done_.fetch_add(1, std::memory_order_acq_rel);
      return true;
    }
  }
}

void* Pool::enter(void* helper) {
  Helper* self = static_cast<Helper*>(helper);
  self->pool->help(self->number);
  return nullptr;
}

void Pool::help(int thread) {
  uint64_t seen = cursor_.load(std::memory_order_acquire);
  while (!closing_.load(std::memory_order_relaxed)) {
    while (take_one(seen, thread)) seen = cursor_.load(std::memory_order_acquire);
    seen = await(seen);
  }
}

// Returns when a loop other than `seen`'s has begun, or the pool closes.
uint64_t Pool::await(uint64_t seen) {
  for (;;) {
    const uint32_t round = round_.load(std::memory_order_seq_cst);
    for (int spins = 0; spins < kSpins; ++spins) {
      const uint64_t now = cursor_.load(std::memory_order_acquire);
      if (loop_of(now) != loop_of(seen) || closing_.load(std::memory_order_relaxed)) return now;
      relax();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (loop_of(cursor_.load(std::memory_order_seq_cst)) == loop_of(seen) &&
        !closing_.load(std::memory_order_seq_cst))
      sleep_while(round_, round);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace headrace
