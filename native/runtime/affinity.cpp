#include "runtime/affinity.h"

#if defined(__APPLE__)
#include <numeric>

#include <sys/sysctl.h>
#else
#include <sched.h>
#endif

namespace tidewheel {

#if defined(__APPLE__)

// macOS places threads itself and does not allow pinning. At each barrier a team would wait for threads on efficiency
// cores. So there are only as many threads as performance cores.
std::vector<int> affinity() {
  int count = 0;
  size_t size = sizeof count;
  if (sysctlbyname("hw.perflevel0.physicalcpu", &count, &size, nullptr, 0) != 0 &&
      sysctlbyname("hw.physicalcpu", &count, &size, nullptr, 0) != 0) {
    count = 1;
  }
  std::vector<int> cpus(count > 0 ? count : 1);
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

void run_on(const std::vector<int>&) {}

#else

static_assert(kMaxCpus == CPU_SETSIZE);

std::vector<int> affinity() {
  std::vector<int> cpus;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

void run_on(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}

#endif

}  // namespace tidewheel
