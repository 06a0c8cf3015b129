// A team of pinned threads that run one function together. The caller is worker 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace tidewheel {

// Bytes that go from one processor's cache to another's together.
#if defined(__s390x__)
constexpr size_t kCacheLine = 256;
#else
constexpr size_t kCacheLine = 64;
#endif

class ThreadPool;

// What a worker sees of the team while it runs.
class Worker {
 public:
  Worker(ThreadPool& pool, int index) : pool_(pool), index_(index) {}
  int index() const { return index_; }
  int count() const;

  // Wait until the whole team is here. What was written before is seen by all after.
  void barrier();

  // Share [0, count) among the team in pieces of `grain`, whoever is free taking the next, then meet at a barrier.
  // Every worker must make the same calls in the same order. `body(begin, end)`.
  template <typename Body>
  void share(int64_t count, int64_t grain, Body&& body) {
    std::atomic<int64_t>& next = take_counter();
    for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
      body(begin, begin + grain < count ? begin + grain : count);
    }
    barrier();
  }

  // The same in pieces that shrink as less is left, down to 1: long runs first, and a level finish.
  template <typename Body>
  void share_guided(int64_t total, Body&& body) {
    std::atomic<int64_t>& next = take_counter();
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < total) {
      const int64_t piece = (total - begin) / (2 * count()), end = begin + (piece > 1 ? piece : 1);
      if (next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) {
        body(begin, end);
        begin = next.load(std::memory_order_relaxed);
      }
    }
    barrier();
  }

 private:
  std::atomic<int64_t>& take_counter();

  ThreadPool& pool_;
  const int index_;
  unsigned phase_ = 0;
};

class ThreadPool {
 public:
  // A thread for each of `cpus`, pinned there; the caller's own place is the first.
  explicit ThreadPool(std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(cpus_.size()); }

  // Run `job` on every worker and wait for all. Not reentrant; `job` must not throw.
  void run(const std::function<void(Worker&)>& job);

  // Pin the calling thread to worker 0's processor.
  void pin_caller() const;

 private:
  friend class Worker;

  struct alignas(kCacheLine) Counter {
    std::atomic<int64_t> next{0};
  };

  void serve(int index);

  const std::vector<int> cpus_;
  std::vector<std::thread> threads_;
  const std::function<void(Worker&)>* job_ = nullptr;
  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
  alignas(kCacheLine) std::atomic<int> arrived_{0};
  alignas(kCacheLine) std::atomic<uint32_t> barrier_generation_{0};
  // Three suffice: while one is in use, the next stands ready at 0, and the one before may still be read by a
  // straggler on its way to the barrier.
  Counter counters_[3];
  std::atomic<bool> stopping_{false};
};

}  // namespace tidewheel
