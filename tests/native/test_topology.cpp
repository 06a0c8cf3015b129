#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include <stdlib.h>

#include "runtime/topology.h"

using namespace tidewheel;

namespace {

// A made-up /proc and /sys.
class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tidewheel-XXXXXX").string();
    path_ = std::string(mkdtemp(pattern.data())) + "/";
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_ + name).parent_path());
    std::ofstream(path_ + name) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("CPU lists") {
  CHECK(parse_cpu_list("0-3,8") == std::vector<int>{0, 1, 2, 3, 8});
  CHECK(parse_cpu_list("5") == std::vector<int>{5});
  for (const char* wrong : {"a", "3-1", "1-", "-1", "1,,2", "0x3", "99999"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_cpu_list(wrong), std::invalid_argument);
  }
}

TEST_CASE("cgroup v2: the lowest limit of the group and its parents counts") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/a/b\n");
  root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  const Topology topology = read_topology(root.path());
  CHECK(topology.cpu_quota == doctest::Approx(1.5));
  CHECK(default_threads(topology) == 1);
}

TEST_CASE("cgroup v1") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:cpu,cpuacct:/job\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  CHECK(read_topology(root.path()).cpu_quota == 0);
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK(read_topology(root.path()).cpu_quota == doctest::Approx(2.5));
}

TEST_CASE("no cgroup at all: no limits, and at least one core") {
  const FakeRoot root;
  const Topology topology = read_topology(root.path());
  CHECK(topology.cpu_quota == 0);
  CHECK(topology.cores.size() >= 1);
}

TEST_CASE("hardware threads of one core count once") {
  const FakeRoot root;
  const Topology plain = read_topology(root.path());
  for (const Processor& p : plain.allowed) {
    root.write("sys/devices/system/cpu/cpu" + std::to_string(p.cpu) + "/topology/thread_siblings_list", "0-1\n");
  }
  CHECK(read_topology(root.path()).cores.size() == 1);
}

TEST_CASE("a core is left for the event loop from eight on") {
  Topology topology;
  topology.cores = {0, 1, 2, 3};
  CHECK(default_threads(topology) == 4);
  topology.cores.resize(8);
  CHECK(default_threads(topology) == 7);
  topology.cpu_quota = 2.9;
  CHECK(default_threads(topology) == 2);
  topology.cpu_quota = 0.5;
  CHECK(default_threads(topology) == 1);
}

namespace {

// A machine whose nodes have these processors, all of which may be used, and no cores with two hardware threads.
Topology machine(const FakeRoot& root, const std::map<int, std::string>& nodes) {
  std::string online;
  std::vector<int> allowed;
  for (const auto& [node, cpus] : nodes) {
    online += (online.empty() ? "" : ",") + std::to_string(node);
    root.write("sys/devices/system/node/node" + std::to_string(node) + "/cpulist", cpus + "\n");
    for (const int cpu : parse_cpu_list(cpus)) allowed.push_back(cpu);
  }
  root.write("sys/devices/system/node/online", online + "\n");
  std::sort(allowed.begin(), allowed.end());
  return read_topology(root.path(), allowed);
}

using Groups = std::vector<std::vector<int>>;

std::vector<size_t> sizes(const Groups& groups) {
  std::vector<size_t> sizes;
  for (const auto& cpus : groups) sizes.push_back(cpus.size());
  return sizes;
}

}  // namespace

TEST_CASE("a group for each NUMA node, less a core for the event loop") {
  const FakeRoot root;
  const Topology topology = machine(root, {{0, "0-31"}, {1, "32-63"}});
  CHECK(topology.allowed[31].numa_node == 0);
  CHECK(topology.allowed[32].numa_node == 1);
  const Groups groups = default_groups(topology);
  CHECK(sizes(groups) == std::vector<size_t>{32, 31});
  CHECK(groups[0] == parse_cpu_list("0-31"));
  CHECK(groups[1] == parse_cpu_list("32-62"));
}

TEST_CASE("nodes of every numbering, without processors, and without memory of their own") {
  CHECK(default_groups(machine(FakeRoot(), {{0, "0,2,4"}, {1, "1,3,5"}})) == Groups{{0, 2, 4}, {1, 3, 5}});
  CHECK(default_groups(machine(FakeRoot(), {{0, "0-1"}, {8, "8-9"}, {9, ""}})) == Groups{{0, 1}, {8, 9}});
  const FakeRoot root;
  const Topology plain = read_topology(root.path(), std::vector<int>{3, 4});  // no nodes at all
  CHECK(default_groups(plain) == Groups{{3, 4}});
}

TEST_CASE("what the process may use of the nodes counts") {
  const FakeRoot root;
  machine(root, {{0, "0-3"}, {1, "4-7"}, {2, "8-11"}});
  CHECK(default_groups(read_topology(root.path(), std::vector<int>{5, 6})) == Groups{{5, 6}});
  CHECK(default_groups(read_topology(root.path(), std::vector<int>{3, 4, 9, 10})) == Groups{{3}, {4}, {9, 10}});
}

TEST_CASE("one hardware thread of each core, in its node") {
  const FakeRoot root;
  for (int cpu = 0; cpu < 8; ++cpu) {
    const std::string siblings = std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4);
    root.write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", siblings + "\n");
  }
  CHECK(default_groups(machine(root, {{0, "0-1,4-5"}, {1, "2-3,6-7"}})) == Groups{{0, 1}, {2, 3}});
}

TEST_CASE("a quota takes as few nodes as will do, and of these alike") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/\n");
  const auto with_quota = [&](int cores) {
    root.write("sys/fs/cgroup/cpu.max", std::to_string(cores) + "00000 100000\n");
    return sizes(default_groups(machine(root, {{0, "0-15"}, {1, "16-31"}, {2, "32-55"}})));
  };
  CHECK(with_quota(6) == std::vector<size_t>{6});
  CHECK(with_quota(24) == std::vector<size_t>{23});  // the largest node has them all
  CHECK(with_quota(31) == std::vector<size_t>{15, 15});
  CHECK(with_quota(100) == std::vector<size_t>{16, 16, 23});
}
