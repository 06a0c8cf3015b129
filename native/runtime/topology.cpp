#include "runtime/topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "runtime/affinity.h"

namespace tidewheel {
namespace {

std::optional<std::string> read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

// The NUMA node of each processor that belongs to one.
std::map<int, int> numa_nodes(const std::string& root) {
  const std::string folder = root + "sys/devices/system/node/";
  std::map<int, int> nodes;
  for (const int node : parse_cpu_list(read_line(folder + "online").value_or(""))) {
    const auto cpus = read_line(folder + "node" + std::to_string(node) + "/cpulist");  // empty: a node with memory only
    for (const int cpu : parse_cpu_list(cpus.value_or(""))) nodes[cpu] = node;
  }
  return nodes;
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
    if (error != std::errc() || at != end || first < 0 || last < first || last >= kMaxCpus) {
      throw std::invalid_argument("'" + part + "' is not a CPU number or a range like 0-3");
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return {cpus.begin(), cpus.end()};
}

Topology read_topology(const std::string& root, const std::optional<std::vector<int>>& allowed) {
  Topology topology;
  std::set<int> seen;
  const std::map<int, int> nodes = numa_nodes(root);
  for (const int cpu : allowed ? *allowed : affinity()) {
    const auto node = nodes.find(cpu);
    const Processor processor{cpu, first_sibling(root, cpu), node == nodes.end() ? 0 : node->second};
    topology.allowed.push_back(processor);
    if (seen.insert(processor.core).second) topology.cores.push_back(cpu);
  }
  return topology;
}

}  // namespace tidewheel
