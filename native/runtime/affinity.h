// Which processors threads may run on, and pinning threads to them.
#pragma once

#include <vector>

namespace tidewheel {

// Processors are numbered from 0 to below this.
constexpr int kMaxCpus = 1024;

// The processors that the calling thread may use, ascending; never empty.
std::vector<int> affinity();

// Restricts the calling thread to these processors, or to one. If the system refuses or cannot do it, only speed is
// lost.
void run_on(const std::vector<int>& cpus);
inline void pin_to(int cpu) { run_on({cpu}); }

// Keeps the calling thread on one processor for the lifetime of this object.
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
