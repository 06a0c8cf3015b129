#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

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

TEST_CASE("NUMA nodes of any numbering, some without processors, and none at all") {
  const FakeRoot root;
  const std::vector<int> allowed{0, 1, 8, 9};
  for (const Processor& p : read_topology(root.path(), allowed).allowed) CHECK(p.numa_node == 0);
  root.write("sys/devices/system/node/online", "0,8-9\n");
  root.write("sys/devices/system/node/node0/cpulist", "0,8\n");
  root.write("sys/devices/system/node/node8/cpulist", "1,9-63\n");
  root.write("sys/devices/system/node/node9/cpulist", "\n");  // memory only
  std::vector<int> nodes;
  for (const Processor& p : read_topology(root.path(), allowed).allowed) nodes.push_back(p.numa_node);
  CHECK(nodes == std::vector<int>{0, 8, 0, 8});
}
