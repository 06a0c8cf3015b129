#include "runtime/topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include <sched.h>
#include <unistd.h>

namespace tidewheel {
namespace {

std::optional<std::string> read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

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

int numa_node_of(const std::string& root, int cpu) {
  for (int node = 0; node < 256; ++node) {
    const auto list = read_line(root + "sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    if (!list) {
      if (node > 0) break;
      continue;
    }
    const auto cpus = parse_cpu_list(*list);
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) return node;
  }
  return 0;
}

int first_sibling(const std::string& root, int cpu) {
  const auto list =
      read_line(root + "sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  if (!list) return cpu;
  const auto cpus = parse_cpu_list(*list);
  return cpus.empty() ? cpu : *std::min_element(cpus.begin(), cpus.end());
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::set<int> cpus;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    const char* end = part.data() + part.size();
    auto [at, error] = std::from_chars(part.data(), end, first);
    last = first;
    if (error == std::errc() && at != end && *at == '-') {
      const auto second = std::from_chars(at + 1, end, last);
      at = second.ptr;
      error = second.ec;
    }
    if (error != std::errc() || at != end || first < 0 || last < first || last >= CPU_SETSIZE) {
      throw std::invalid_argument("'" + part + "' is not a CPU number or a range like 0-3");
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return {cpus.begin(), cpus.end()};
}

Topology read_topology(const std::string& root) {
  Topology topology;
  std::set<int> seen;
  for (const int cpu : affinity()) {
    const Processor processor{cpu, first_sibling(root, cpu), numa_node_of(root, cpu)};
    topology.allowed.push_back(processor);
    if (seen.insert(processor.core).second) topology.cores.push_back(cpu);
  }
  return topology;
}

}  // namespace tidewheel
