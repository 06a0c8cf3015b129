// Which processors this process may use: those of its affinity mask, and one a physical core.
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
  std::vector<Processor> allowed;  // by cpu
  std::vector<int> cores;          // one allowed cpu for each physical core
};

// `root` is "/", and `allowed` what the calling thread may run on, but in tests, which lay out /proc and /sys trees of
// their own.
Topology read_topology(const std::string& root = "/", const std::optional<std::vector<int>>& allowed = std::nullopt);

// "0-3,8" to {0, 1, 2, 3, 8}. Throws std::invalid_argument naming what it cannot read.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace tidewheel
