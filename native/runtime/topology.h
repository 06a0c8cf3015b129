// The processors that this process may use: all that its affinity mask allows, and one for each physical core.
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

// By default, `root` is "/" and `allowed` is the calling thread's affinity. Tests pass their own /proc and /sys.
Topology read_topology(const std::string& root = "/", const std::optional<std::vector<int>>& allowed = std::nullopt);

// "0-3,8" as {0, 1, 2, 3, 8}. Throws std::invalid_argument, which names what it cannot read.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace tidewheel
