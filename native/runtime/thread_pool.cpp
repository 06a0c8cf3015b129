#include "runtime/thread_pool.h"

#include <stdexcept>

#include <sched.h>
#include <time.h>

#include "runtime/affinity.h"

namespace tidewheel {
namespace {

// Spin for a while first, because other workers are usually only microseconds away. Then yield the processor to other
// threads, mainly the event loop; waking up is still quick. Then sleep.
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

// Wait until `value` differs from `old`. Until it sleeps, it also returns if `interrupted()` is true.
template <typename T, typename Interrupted>
void wait_while(const std::atomic<T>& value, T old, Interrupted interrupted) {
  const auto is_over = [&] { return value.load(std::memory_order_acquire) != old || interrupted(); };
  for (int i = 0; i < kSpins; ++i) {
    if (is_over()) return;
    pause_briefly();
  }
  const int64_t deadline = now_nanoseconds() + kYieldNanoseconds;
  do {
    if (is_over()) return;
    sched_yield();
  } while (now_nanoseconds() < deadline);
  value.wait(old, std::memory_order_acquire);
}

template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  wait_while(value, old, [] { return false; });
}

std::vector<int> sizes(const std::vector<std::vector<int>>& groups) {
  std::vector<int> counts;
  for (const auto& cpus : groups) {
    if (cpus.empty()) throw std::invalid_argument("every group of workers needs at least one CPU");
    counts.push_back(static_cast<int>(cpus.size()));
  }
  if (counts.empty()) throw std::invalid_argument("at least one CPU is needed");
  return counts;
}

}  // namespace

Worker::Worker(ThreadPool& pool, int index, unsigned phase)
    : pool_(pool), index_(index), group_index_(pool.places_[index].group), group_(pool.groups_[group_index_]),
      index_in_group_(pool.places_[index].index_in_group), first_phase_(phase) {}

// The last worker of a group to arrive reports for its group. The last worker of the last group releases all groups,
// each through its own atomic variable.
void Worker::barrier(bool last) {
  if (pool_.size() == 1) return;
  const uint32_t generation = group_.barrier_generation.load(std::memory_order_relaxed);
  const int members = group_.members;  // read before arriving: after all have arrived, the next job may change it
  if (group_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
    group_.arrived.store(0, std::memory_order_relaxed);
    const int groups = static_cast<int>(pool_.groups_.size());
    if (groups == 1 || pool_.arrived_groups_.fetch_add(1, std::memory_order_acq_rel) + 1 == groups) {
      pool_.arrived_groups_.store(0, std::memory_order_relaxed);
      const bool admits = !last && pool_.expect_latecomer(phase_);
      for (WorkerGroup& group : pool_.groups_) {
        group.barrier_generation.store(generation + 1, std::memory_order_release);
        group.barrier_generation.notify_all();
      }
      if (admits) pool_.move_door(ThreadPool::Door::kInside);  // only now: the late worker is not part of this barrier
      return;
    }
  }
  wait_while(group_.barrier_generation, generation);
}

bool Worker::take_of_range(int member, int64_t size, bool own, int64_t& begin, int64_t& end) {
  constexpr int kBits = 28;
  constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  std::atomic<uint64_t>& left = group_.ranges[member].left;
  uint64_t seen = left.load(std::memory_order_relaxed), taken;
  do {
    // The range belongs to an earlier call: no worker has begun this one.
    const bool is_new = seen >> 2 * kBits != range_call_;
    begin = is_new ? 0 : static_cast<int64_t>(seen >> kBits & kMask);
    end = is_new ? size : static_cast<int64_t>(seen & kMask);
    if (begin >= end) return false;
    const int64_t piece = (end - begin + 3) / 4;
    taken = uint64_t{range_call_} << 2 * kBits;
    if (own) {
      taken |= static_cast<uint64_t>(begin + piece) << kBits | static_cast<uint64_t>(end);
      end = begin + piece;
    } else {
      taken |= static_cast<uint64_t>(begin) << kBits | static_cast<uint64_t>(end - piece);
      begin = end - piece;
    }
  } while (!left.compare_exchange_weak(seen, taken, std::memory_order_relaxed));
  return true;
}

std::atomic<int64_t>& Worker::take_counter(bool own) {
  const unsigned current = phase_++ % 3;
  // No worker touches the next counters before all have passed this phase's barrier.
  if (index_in_group_ == 0) group_.counters[phase_ % 3].next.store(0, std::memory_order_relaxed);
  return (own ? group_ : pool_.groups_.front()).counters[current].next;
}

ThreadPool::ThreadPool(const std::vector<std::vector<int>>& groups) : ownership_(sizes(groups)), groups_(groups.size()) {
  for (size_t g = 0; g < groups.size(); ++g) {
    groups_[g].workers = groups_[g].members = static_cast<int>(groups[g].size());
    groups_[g].ranges = std::vector<WorkerGroup::Range>(groups[g].size());
    for (int i = 0; i < groups_[g].workers; ++i) places_.push_back({groups[g][i], static_cast<int>(g), i});
  }
  for (int i = 1; i < size(); ++i) {
    threads_.emplace_back([this, i] { i + 1 == size() && can_yield() ? serve_yielding(i) : serve(i); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  yielded_.store(0);
  yielded_.notify_all();
  move_door(Door::kInside);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::vector<std::vector<int>> ThreadPool::cpus() const {
  std::vector<std::vector<int>> groups(groups_.size());
  for (const Place& place : places_) groups[place.group].push_back(place.cpu);
  return groups;
}

void ThreadPool::run(const std::function<void(Worker&)>& job) {
  for (WorkerGroup& group : groups_) {
    for (auto& counter : group.counters) counter.next.store(0, std::memory_order_relaxed);
    for (auto& range : group.ranges) range.left.store(0, std::memory_order_relaxed);
  }
  job_ = &job;
  first_phase_ = 0;
  bool admits = false;
  if (can_yield() && yielded_.load() > 0) {
    groups_.back().members = groups_.back().workers - 1;
    move_door(Door::kOutside);
  } else {
    admits = expect_latecomer(0);
  }
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  if (admits) move_door(Door::kInside);
  Worker worker(*this, 0);
  job(worker);
  worker.barrier(true);
}

void ThreadPool::pin_caller() const { pin_to(places_.front().cpu); }

void ThreadPool::serve(int index) {
  pin_to(places_[index].cpu);
  for (uint32_t seen = 0;; ++seen) {
    wait_while(generation_, seen);
    if (stopping_.load()) return;
    Worker worker(*this, index);
    (*job_)(worker);
    worker.barrier(true);
  }
}

void ThreadPool::serve_yielding(int index) {
  pin_to(places_[index].cpu);
  for (uint32_t seen = 0;;) {
    wait_while(generation_, seen, [&] { return yielded_.load(std::memory_order_relaxed) > 0; });
    for (int lent; (lent = yielded_.load()) > 0;) yielded_.wait(lent);
    Door outside = Door::kOutside;
    if (door_.compare_exchange_strong(outside, Door::kWaiting)) wait_while(door_, Door::kWaiting);
    if (stopping_.load()) return;
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (door_.load() != Door::kInside || generation == seen) continue;  // yielded again, or back before a job began
    seen = generation;
    Worker worker(*this, index, first_phase_);
    (*job_)(worker);
    worker.barrier(true);
  }
}

bool ThreadPool::expect_latecomer(unsigned phase) {
  if (door_.load() != Door::kWaiting) return false;
  groups_.back().members = groups_.back().workers;
  first_phase_ = phase;
  return true;
}

void ThreadPool::move_door(Door door) {
  door_.store(door);
  door_.notify_all();
}

}  // namespace tidewheel
