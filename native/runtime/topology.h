// Which processors this process may use: those of its affinity mask, one a physical core, and its cgroup's quota.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tidewheel {

struct Processor {
  int cpu;   // the operating system's number
  int core;  // the lowest-numbered hardware thread of its physical core
  int numa_node;
};

struct Topology {
  std::vector<Processor> allowed;         // by cpu
  std::vector<int> cores;                 // one allowed cpu for each physical core
  double cpu_quota = 0;                   // cores' worth of time that the cgroup allows; 0 is no limit
};

// `root` is "/", and `allowed` what the calling thread may run on, but in tests, which lay out /proc and /sys trees of
// their own.
Topology read_topology(const std::string& root = "/", const std::optional<std::vector<int>>& allowed = std::nullopt);

// "0-3,8" to {0, 1, 2, 3, 8}. Throws std::invalid_argument naming what it cannot read.
std::vector<int> parse_cpu_list(const std::string& text);

// How many of the cores to compute on: all that the quota pays for; from eight on, one is left for the event loop.
int default_threads(const Topology& topology);

}  // namespace tidewheel
