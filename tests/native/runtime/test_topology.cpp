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

TEST_CASE("a system that does not say: at least one core") {
  const FakeRoot root;
  CHECK(read_topology(root.path()).cores.size() >= 1);
}

TEST_CASE("hardware threads of one core count once") {
  const FakeRoot root;
  const Topology plain = read_topology(root.path());
  for (const Processor& p : plain.allowed) {
    root.write("sys/devices/system/cpu/cpu" + std::to_string(p.cpu) + "/topology/thread_siblings_list", "0-1\n");
  }
  CHECK(read_topology(root.path()).cores.size() == 1);
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
