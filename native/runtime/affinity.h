// Threads and the processors they run on, as the operating system has it.
#pragma once

#include <vector>

namespace tidewheel {

// Processors are numbered from 0 to below this.
constexpr int kMostCpus = 1024;

// The processors that the calling thread may use, ascending; never empty.
std::vector<int> affinity();

// Keeps the calling thread on some of them, or one. Where that is refused, or there is no such thing, it costs speed only.
void run_on(const std::vector<int>& cpus);
inline void pin_to(int cpu) { run_on({cpu}); }

// Keeps the calling thread on one while it lives.
class Pinned {
 public:
  explicit Pinned(int cpu) : before_(affinity()) { pin_to(cpu); }
  ~Pinned() { run_on(before_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  const std::vector<int> before_;
};

}  // namespace tidewheel
