#include "runtime/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The best rate of `work` within `seconds`. `work` returns how much it did.
double best_rate(ThreadPool& pool, double seconds, const std::function<double(Worker&)>& work) {
  double best = 0;
  const auto begin = Clock::now();
  do {
    std::vector<double> done(pool.size());
    const auto start = Clock::now();
    pool.run([&](Worker& worker) { done[worker.index()] = work(worker); });
    best = std::max(best, std::accumulate(done.begin(), done.end(), 0.0) / seconds_since(start));
  } while (seconds_since(begin) < seconds);
  return best;
}

Ceilings measure(ThreadPool& pool, const Kernels& kernels, double seconds, int megabytes) {
  pool.pin_caller();
  const size_t share = size_t(megabytes) * 1024 * 1024 / pool.size() / 4096 * 4096;
  const Arena memory(share * pool.size());
  pool.run([&](Worker& worker) { std::memset(memory.data() + worker.index() * share, 0, share); });
  const double each = seconds / 4;
  Ceilings ceilings{};
  ceilings.read_bytes_per_second = best_rate(
      pool, each, [&](Worker& worker) { return kernels.read_memory(memory.data() + worker.index() * share, share); });
  const auto peak = [&](double (*kernel)(int)) {
    return best_rate(pool, each, [kernel](Worker&) { return kernel(200); });
  };
  ceilings.bfloat16_flops = peak(kernels.peak_bfloat16);
  ceilings.int8_ops = peak(kernels.peak_int8);
  ceilings.float32_flops = peak(kernels.peak_float32);
  return ceilings;
}

}  // namespace

Ceilings measure_ceilings(const Kernels& kernels, const std::vector<int>& cpus, double seconds, int megabytes) {
  ThreadPool pool({cpus});
  Ceilings ceilings{};
  // Worker 0 must be pinned to its processor, but the caller's own thread must not be.
  std::thread([&] { ceilings = measure(pool, kernels, seconds, megabytes); }).join();
  return ceilings;
}

}  // namespace tidewheel
