#include "runtime/thread_pool.h"

#include <sched.h>
#include <time.h>

#include "runtime/affinity.h"

namespace tidewheel {
namespace {

// Spin a little, because another worker is usually microseconds away; then offer the processor to whoever needs it,
// the event loop above all, without giving up quick wake-up; then sleep.
constexpr int kSpins = 2000;
constexpr int64_t kYieldNanoseconds = 300'000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  const int64_t deadline = now_nanoseconds() + kYieldNanoseconds;
  do {
    if (value.load(std::memory_order_acquire) != old) return;
    sched_yield();
  } while (now_nanoseconds() < deadline);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

int Worker::count() const { return pool_.size(); }

void Worker::barrier() {
  if (pool_.size() == 1) return;
  const uint32_t generation = pool_.barrier_generation_.load(std::memory_order_relaxed);
  if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.size()) {
    pool_.arrived_.store(0, std::memory_order_relaxed);
    pool_.barrier_generation_.store(generation + 1, std::memory_order_release);
    pool_.barrier_generation_.notify_all();
  } else {
    wait_while(pool_.barrier_generation_, generation);
  }
}

std::atomic<int64_t>& Worker::take_counter() {
  const unsigned current = phase_;
  phase_ = (phase_ + 1) % 3;
  // Nobody touches the next counter before all have passed this phase's barrier.
  if (index_ == 0) pool_.counters_[phase_].next.store(0, std::memory_order_relaxed);
  return pool_.counters_[current].next;
}

ThreadPool::ThreadPool(std::vector<int> cpus) : cpus_(std::move(cpus)) {
  for (int i = 1; i < size(); ++i) threads_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(Worker&)>& job) {
  for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
  job_ = &job;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  Worker worker(*this, 0);
  job(worker);
  worker.barrier();
}

void ThreadPool::pin_caller() const { pin_to(cpus_.front()); }

void ThreadPool::serve(int index) {
  pin_to(cpus_[index]);
  for (uint32_t seen = 0;; ++seen) {
    wait_while(generation_, seen);
    if (stopping_.load()) return;
    Worker worker(*this, index);
    (*job_)(worker);
    worker.barrier();
  }
}

}  // namespace tidewheel
