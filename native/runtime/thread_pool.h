// A team of pinned threads that run one function together, in groups that share a NUMA node. The caller is worker 0, of
// group 0.
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

// Bytes that go from one processor's cache to another's together.
#if defined(__s390x__)
constexpr size_t kCacheLine = 256;
#else
constexpr size_t kCacheLine = 64;
#endif

class ThreadPool;

// What the workers of a group meet over: in cache lines of its own, so that waiting goes on within a node.
struct WorkerGroup {
  struct alignas(kCacheLine) Counter {
    std::atomic<int64_t> next{0};
  };

  int workers = 0;
  int members = 0;  // those that take part now: all, but for a worker that is lent
  alignas(kCacheLine) std::atomic<int> arrived{0};
  alignas(kCacheLine) std::atomic<uint32_t> barrier_generation{0};
  // Three suffice: while one is in use, the next stands ready at 0, and the one before may still be read by a
  // straggler on its way to the barrier.
  Counter counters[3];
};

// What a worker sees of the team while it runs.
class Worker {
 public:
  // One that comes when `phase` calls of `share...` were done without it has nothing to do before.
  Worker(ThreadPool& pool, int index, unsigned phase = 0);
  int index() const { return index_; }
  int group() const { return group_index_; }
  int index_in_group() const { return index_in_group_; }
  int group_size() const { return group_.workers; }
  // The next call of `share...` was done without this worker: what only that needs need not be made.
  bool is_late() const { return phase_ < first_phase_; }

  // Share [0, count) among the team in pieces of `grain`, whoever is free taking the next, then meet at a barrier: what
  // was written before is seen by all after. Every worker must make the same calls of `share...` in the same order.
  // `body(begin, end)`.
  template <typename Body>
  void share(int64_t count, int64_t grain, Body&& body) {
    share_from(false, count, grain, body);
  }

  // The same among the worker's group alone: each group has a `count` of its own. The barrier is the whole team's.
  template <typename Body>
  void share_in_group(int64_t count, int64_t grain, Body&& body) {
    share_from(true, count, grain, body);
  }

  // That in pieces that shrink as less is left, down to 1: long runs first, and a level finish.
  template <typename Body>
  void share_in_group_guided(int64_t total, Body&& body) {
    if (skip()) return;
    std::atomic<int64_t>& next = take_counter(true);
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < total) {
      const int64_t piece = (total - begin) / (2 * group_.workers), end = begin + (piece > 1 ? piece : 1);
      if (next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) {
        body(begin, end);
        begin = next.load(std::memory_order_relaxed);
      }
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

  bool skip() {
    if (!is_late()) return false;
    ++phase_;
    return true;
  }

  // The group's own, or the team's, which is the first group's.
  std::atomic<int64_t>& take_counter(bool own);

  // Wait until the whole team is here; at the `last` one of a job nobody is let in.
  void barrier(bool last = false);

  ThreadPool& pool_;
  const int index_, group_index_;
  WorkerGroup& group_;
  const int index_in_group_;
  const unsigned first_phase_;
  unsigned phase_ = 0;  // calls of `share...` so far
};

class ThreadPool {
 public:
  // A thread for each of the `groups`' processors, pinned there; the caller's own place is the first. Throws
  // std::invalid_argument for a group without a processor.
  explicit ThreadPool(const std::vector<std::vector<int>>& groups);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(places_.size()); }
  const Ownership& ownership() const { return ownership_; }

  // Run `job` on every worker and wait for all. Not reentrant; `job` must not throw. A worker that is lent comes late,
  // or not at all: it takes no part in the calls of `share...` before it comes.
  void run(const std::function<void(Worker&)>& job);

  // Leave the last worker's processor to other threads until `take_back` was called as often: where as many threads as
  // there are processors meet dozens of times a millisecond, one that has to wait while another thread has its
  // processor holds all of them up. A last group of one worker keeps it.
  // `lend` is for the thread that runs jobs; `take_back`, for any thread, lets the worker into a job that runs.
  void lend() { lent_.fetch_add(1); }
  void take_back() {
    if (lent_.fetch_sub(1) == 1) lent_.notify_all();
  }

  // Pin the calling thread to worker 0's processor, for good or while the result lives.
  void pin_caller() const;
  Pinned pinned_caller() const { return Pinned(places_.front().cpu); }

 private:
  friend class Worker;

  struct Place {
    int cpu, group, index_in_group;
  };

  // The last worker takes part in jobs; a job began without it; or it wants to come in.
  enum class Door : uint32_t { kInside, kOutside, kWaiting };

  void serve(int index);
  void serve_lendable(int index);
  // Whether the last worker is to be let in, to begin with that call of `share...`. Only while no other worker moves.
  bool expect_latecomer(unsigned phase);
  void move_door(Door door);
  bool can_lend() const { return groups_.back().workers > 1; }

  std::vector<Place> places_;  // [workers]
  const Ownership ownership_;
  std::vector<WorkerGroup> groups_;
  std::vector<std::thread> threads_;
  const std::function<void(Worker&)>* job_ = nullptr;
  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
  alignas(kCacheLine) std::atomic<int> arrived_groups_{0};
  std::atomic<bool> stopping_{false};
  alignas(kCacheLine) std::atomic<int> lent_{0};  // calls of `lend` without their `take_back`
  alignas(kCacheLine) std::atomic<Door> door_{Door::kInside};
  unsigned first_phase_ = 0;  // of the last worker, when the door has opened
};

}  // namespace tidewheel
