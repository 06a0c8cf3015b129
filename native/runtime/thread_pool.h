// A team of pinned threads that run one function together. Each group of threads shares a NUMA node. The calling thread
// is worker 0 of group 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/affinity.h"
#include "runtime/groups.h"

namespace tidewheel {

// The size of a cache line, the unit that caches exchange.
#if defined(__s390x__)
constexpr size_t kCacheLine = 256;
#elif defined(__powerpc64__) || (defined(__APPLE__) && defined(__aarch64__))
constexpr size_t kCacheLine = 128;
#else
constexpr size_t kCacheLine = 64;
#endif

class ThreadPool;

// The state by which a group's workers synchronize. It has its own cache lines, so that waiting stays within a node.
struct WorkerGroup {
  struct alignas(kCacheLine) Counter {
    std::atomic<int64_t> next{0};
  };
  // What is left of a worker's own range: the call that it belongs to (8 bits), its begin and its end (28 bits each).
  struct alignas(kCacheLine) Range {
    std::atomic<uint64_t> left{0};
  };

  int workers = 0;
  int members = 0;  // workers that take part now: all except a yielded one
  alignas(kCacheLine) std::atomic<int> arrived{0};
  alignas(kCacheLine) std::atomic<uint32_t> barrier_generation{0};
  // Three are enough: one is in use, the next one is ready at 0, and a late worker may still read the previous one on
  // its way to the barrier.
  Counter counters[3];
  std::vector<Range> ranges;  // [workers]
};

// A worker's view of the team while a job runs.
class Worker {
 public:
  // A worker that joins after `phase` calls of `share...` skips these calls.
  Worker(ThreadPool& pool, int index, unsigned phase = 0);
  int index() const { return index_; }
  int group() const { return group_index_; }
  int index_in_group() const { return index_in_group_; }
  int group_size() const { return group_.workers; }
  // Whether the next call of `share...` was done without this worker. Then its inputs need not be prepared.
  bool is_late() const { return phase_ < first_phase_; }

  // Divide [0, count) among the team in pieces of `grain`. A free worker takes the next piece, for `body(begin, end)`.
  // All workers then meet at a barrier, after which they see everything that was written before. Every worker must make
  // the same calls of `share...` in the same order.
  template <typename Body>
  void share(int64_t count, int64_t grain, Body&& body) {
    share_from(false, count, grain, body);
  }

  // The same within the worker's group. Each group has its own `count`. The barrier is for the whole team.
  template <typename Body>
  void share_in_group(int64_t count, int64_t grain, Body&& body) {
    share_from(true, count, grain, body);
  }

  // The same in ranges. A worker takes consecutive pieces of its own range, so that it reads memory as a stream. The
  // pieces shrink to 1. A worker that is done helps others, from the end of their ranges. `total` is less than 2^28.
  template <typename Body>
  void share_ranges_in_group(int64_t total, Body&& body) {
    range_call_ = range_call_ % kMaxCalls + 1;
    if (skip()) return;
    take_counter(true);
    const int members = group_.members;
    for (int i = 0; i < members && i <= kMaxHelped; ++i) {
      const int member = (index_in_group_ + i) % members;
      const int64_t first = total * member / members, size = total * (member + 1) / members - first;
      for (int64_t begin, end; take_of_range(member, size, i == 0, begin, end);) body(first + begin, first + end);
    }
    barrier();
  }

 private:
  friend class ThreadPool;

  template <typename Body>
  void share_from(bool own, int64_t count, int64_t grain, Body&& body) {
    if (skip()) return;
    std::atomic<int64_t>& next = take_counter(own);
    for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
      body(begin, begin + grain < count ? begin + grain : count);
    }
    barrier();
  }

  // Calls are counted from 1 to kMaxCalls, then from 1 again. A range that belongs to no call has 0.
  static constexpr int kMaxCalls = 255;
  // How many others a worker looks at when it is done.
  static constexpr int kMaxHelped = 7;

  // Takes a piece of a member's range of `size` items: from its begin if it is the worker's `own`, otherwise from its
  // end. False if nothing is left.
  bool take_of_range(int member, int64_t size, bool own, int64_t& begin, int64_t& end);

  bool skip() {
    if (!is_late()) return false;
    ++phase_;
    return true;
  }

  // The group's counter if `own`, otherwise the team's, which is that of the first group.
  std::atomic<int64_t>& take_counter(bool own);

  // Wait until the whole team has arrived. At the `last` barrier of a job, no yielded worker is let in.
  void barrier(bool last = false);

  ThreadPool& pool_;
  const int index_, group_index_;
  WorkerGroup& group_;
  const int index_in_group_;
  const unsigned first_phase_;
  unsigned phase_ = 0;  // calls of `share...` so far
  uint8_t range_call_ = 0;  // the number of the last call of `share_ranges_in_group`
};

class ThreadPool {
 public:
  // Makes a thread for each processor of the `groups`, pinned to it. The first processor gets no thread: it belongs to
  // the caller. Throws std::invalid_argument for a group without a processor.
  explicit ThreadPool(const std::vector<std::vector<int>>& groups);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(places_.size()); }
  const Ownership& ownership() const { return ownership_; }
  // The processor of each worker, by group.
  std::vector<std::vector<int>> cpus() const;

  // Run `job` on every worker and wait for all. Not reentrant; `job` must not throw. A yielded worker joins late or not
  // at all. It takes no part in the calls of `share...` before it joins.
  void run(const std::function<void(Worker&)>& job);

  // Leave the last worker's processor to other threads until `reclaim_core` has been called as often as `yield_core`.
  // Workers meet dozens of times a millisecond. If there are as many workers as processors, any other thread takes a
  // processor from one of them, and all others wait for it. If the last worker is alone in its group, it is not
  // yielded. The thread that runs jobs calls `yield_core`. Any thread may call `reclaim_core`, which lets the worker
  // join a running job.
  void yield_core() { yielded_.fetch_add(1); }
  void reclaim_core() {
    if (yielded_.fetch_sub(1) == 1) yielded_.notify_all();
  }

  // Pin the calling thread to worker 0's processor, for good or for the lifetime of the result.
  void pin_caller() const;
  Pinned pinned_caller() const { return Pinned(places_.front().cpu); }

 private:
  friend class Worker;

  struct Place {
    int cpu, group, index_in_group;
  };

  // Where the last worker is: it takes part in jobs, or a job began without it, or it wants to join.
  enum class Door : uint32_t { kInside, kOutside, kWaiting };

  void serve(int index);
  void serve_yielding(int index);
  // Lets the last worker join, from that call of `share...` on, if it waits for this. Returns whether it does. Call
  // this only while no other worker runs.
  bool expect_latecomer(unsigned phase);
  void move_door(Door door);
  bool can_yield() const { return groups_.back().workers > 1; }

  std::vector<Place> places_;  // [workers]
  const Ownership ownership_;
  std::vector<WorkerGroup> groups_;
  std::vector<std::thread> threads_;
  const std::function<void(Worker&)>* job_ = nullptr;
  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
  alignas(kCacheLine) std::atomic<int> arrived_groups_{0};
  std::atomic<bool> stopping_{false};
  alignas(kCacheLine) std::atomic<int> yielded_{0};  // calls of `yield_core` without their `reclaim_core`
  alignas(kCacheLine) std::atomic<Door> door_{Door::kInside};
  unsigned first_phase_ = 0;  // the first phase of the last worker, once it was let in
};

}  // namespace tidewheel
