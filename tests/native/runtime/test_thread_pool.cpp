#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "runtime/thread_pool.h"

using namespace tidewheel;

TEST_CASE("every piece is done once, and a barrier shows what came before it") {
  for (const int size : {1, 2, 5}) {
    ThreadPool pool({std::vector<int>(size, 0)});
    for (int round = 0; round < 200; ++round) {
      std::vector<int> first(1000), second(1000);
      pool.run([&](Worker& worker) {
        worker.share(1000, 7, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) first[i] += 1;
        });
        worker.share(1000, 13, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) second[i] += first[999 - i];
        });
        worker.share(0, 1, [&](int64_t, int64_t) { FAIL("there was nothing to do"); });
      });
      CHECK(std::accumulate(second.begin(), second.end(), 0) == 1000);
    }
  }
}

TEST_CASE("all workers take part, each under its own index") {
  ThreadPool pool({{0, 0, 0}});
  std::atomic<int> seen{0};
  pool.run([&](Worker& worker) {
    seen.fetch_or(1 << worker.index());
    worker.share(0, 1, [](int64_t, int64_t) {});
    CHECK(seen.load() == 7);
  });
}

TEST_CASE("a team does all of its work whenever its last worker is yielded and taken back") {
  using Groups = std::vector<std::vector<int>>;
  for (const Groups& groups : {Groups{{0, 0}}, Groups{{0, 0, 0}}, Groups{{0, 0}, {0, 0}}, Groups{{0, 0}, {0}}, Groups{{0}}}) {
    ThreadPool pool(groups);
    std::atomic<int> lent{0};
    std::atomic<bool> over{false};
    std::thread borrower([&] {
      for (unsigned round = 0; !over.load() || lent.load() > 0; ++round) {
        if (lent.load() == 0) {
          std::this_thread::yield();
          continue;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(round * 37 % 300));
        pool.reclaim_core();
        --lent;
      }
    });
    for (int round = 0; round < 60; ++round) {
      for (int i = 0; i < round % 4 - 1; ++i) {
        pool.yield_core();
        ++lent;
      }
      std::vector<int> counts(500), own(groups.size() * 100);
      std::atomic<bool> complete{true};
      pool.run([&](Worker& worker) {
        for (int phase = 1; phase <= 8; ++phase) {
          worker.share(500, 9, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) counts[i] += 1;
          });
          worker.share_in_group(100, 3, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) own[worker.group() * 100 + i] += counts[i * 5];
          });
          worker.share_ranges_in_group(100, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              if (own[worker.group() * 100 + i] != phase * (phase + 1) / 2) complete = false;
            }
          });
        }
      });
      CHECK(complete.load());
      CHECK(std::accumulate(counts.begin(), counts.end(), 0) == 500 * 8);
    }
    over = true;
    borrower.join();
  }
}

TEST_CASE("every piece of ranges is done once, however many calls there are") {
  for (const int workers : {1, 2, 3, 11}) {
    ThreadPool pool({std::vector<int>(workers, 0)});
    constexpr int kCalls = 600, kTotal = 37;
    std::vector<int> done(kTotal);
    std::atomic<bool> complete{true};
    pool.run([&](Worker& worker) {
      for (int call = 0; call < kCalls; ++call) {
        const int total = call % (kTotal + 1);
        worker.share_ranges_in_group(total, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) done[i] += 1;
        });
        worker.share(1, 1, [&](int64_t, int64_t) {
          for (int i = 0; i < total; ++i) {
            if (done[i] != 1) complete = false;
          }
          done.assign(kTotal, 0);
        });
      }
    });
    CHECK(complete.load());
  }
}

TEST_CASE("a job does without a worker that is yielded, unless it is a group's only one") {
  const auto workers_of_a_job = [](ThreadPool& pool) {
    std::atomic<int> seen{0};
    pool.run([&](Worker& worker) { seen.fetch_or(1 << worker.index()); });
    return seen.load();
  };
  ThreadPool pair({{0, 0}}), singles({{0}, {0}});
  pair.yield_core();
  pair.yield_core();
  CHECK(workers_of_a_job(pair) == 1);
  pair.reclaim_core();
  CHECK(workers_of_a_job(pair) == 1);
  pair.reclaim_core();
  while (workers_of_a_job(pair) != 3) std::this_thread::yield();
  singles.yield_core();
  CHECK(workers_of_a_job(singles) == 3);
}
