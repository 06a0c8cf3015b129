#include "runtime/topology.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
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

std::optional<int64_t> read_number(const std::string& path) {
  const auto line = read_line(path);
  if (!line) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line->data(), line->data() + line->size(), value);
  if (error != std::errc() || end == line->data()) return std::nullopt;  // "max" is no limit
  return value;
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

struct CgroupPaths {
  std::vector<std::string> v2, cpu;  // this process's group and its parents, innermost first
};

std::vector<std::string> with_parents(const std::string& mount, std::string group) {
  std::vector<std::string> paths;
  while (true) {
    paths.push_back(mount + (group == "/" ? "" : group));
    if (group.empty() || group == "/") break;
    group = group.substr(0, group.find_last_of('/'));
  }
  return paths;
}

CgroupPaths cgroup_paths(const std::string& root) {
  CgroupPaths paths;
  std::ifstream file(root + "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    const std::string mount = root + "sys/fs/cgroup";
    if (controllers.empty()) {
      paths.v2 = with_parents(mount, group);
      continue;
    }
    std::stringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "cpu") paths.cpu = with_parents(mount + "/cpu", group);
    }
  }
  return paths;
}

double cpu_quota(const CgroupPaths& paths) {
  double quota = 0;
  const auto take = [&quota](double limit, double period) {
    if (limit > 0 && period > 0 && (quota == 0 || limit / period < quota)) quota = limit / period;
  };
  for (const auto& path : paths.v2) {
    if (const auto line = read_line(path + "/cpu.max")) {
      std::stringstream fields(*line);
      double limit = 0, period = 0;
      if (fields >> limit >> period) take(limit, period);  // "max 100000" does not parse: no limit
    }
  }
  for (const auto& path : paths.cpu) {
    const auto limit = read_number(path + "/cpu.cfs_quota_us"), period = read_number(path + "/cpu.cfs_period_us");
    if (limit && period) take(static_cast<double>(*limit), static_cast<double>(*period));
  }
  return quota;
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
    if (error != std::errc() || at != end || first < 0 || last < first || last >= kMostCpus) {
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
  topology.cpu_quota = cpu_quota(cgroup_paths(root));
  return topology;
}

int default_threads(const Topology& topology) {
  int threads = static_cast<int>(topology.cores.size());
  if (topology.cpu_quota > 0) threads = std::min(threads, std::max(1, static_cast<int>(std::floor(topology.cpu_quota))));
  return threads >= 8 ? threads - 1 : threads;
}

}  // namespace tidewheel
