#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
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
    worker.barrier();
    CHECK(seen.load() == 7);
  });
}
