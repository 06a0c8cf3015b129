#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "model/executor.h"
#include "runtime/topology.h"
#include "small_model.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

using Groups = std::vector<std::vector<int>>;

// Even and uneven, more of them than a layer has KV heads, and with more than one worker.
const Groups kGroups[] = {{{0}, {1}}, {{0, 1}, {0}}, {{0}, {1}, {0}}, {{0, 1}}};

// All of them for the best level, and for the others, which share all that knows of groups, one after the other in
// turn.
std::span<const Groups> groups_for(const Kernels& kernels, int turn) {
  if (kStride == 1 && &kernels == &choose_kernels("auto")) return kGroups;
  return {kGroups + turn % 3, 1};
}

std::vector<char> packed_bytes(const Executor& executor) {
  std::vector<char> bytes;
  for (const auto run : executor.weights().packed().spans()) bytes.insert(bytes.end(), run.begin(), run.end());
  return bytes;
}

}  // namespace

TEST_CASE("things are owned once, in order, and by as many workers as their part") {
  for (const auto& workers : {std::vector<int>{1}, {1, 1}, {32, 31}, {3, 1, 2}, {1, 1, 1, 1, 1, 1, 1, 1}}) {
    const Ownership ownership(workers);
    for (const int count : {0, 1, 2, 3, 5, 8, 30, 1536}) {
      int next = 0;
      for (int group = 0; group < ownership.groups(); ++group) {
        const Range own = ownership.of(group, count);
        CHECK(own.begin == next);
        const double part = double(count) * workers[group] / ownership.workers();
        CHECK(std::abs(own.size() - part) <= 1);
        next = own.end;
      }
      CHECK(next == count);
    }
  }
  const auto own = [](std::vector<int> workers, int group, int count) { return Ownership(workers).of(group, count).size(); };
  CHECK(own({16, 16}, 0, 5) == 3);
  CHECK(own({16, 16}, 1, 5) == 2);
  CHECK(own({32, 31}, 1, 8) == 4);
  CHECK(own({4, 4}, 1, 1) == 0);
}

TEST_CASE("a group's pieces are done once, by its own workers, and all meet behind them") {
  for (const Groups& groups : kGroups) {
    ThreadPool pool(groups);
    const int count = static_cast<int>(groups.size());
    for (int round = 0; round < 50; ++round) {
      std::vector<int> team(500), sums(count);
      std::vector<std::vector<int>> own(count, std::vector<int>(300)), ranges = own;
      pool.run([&](Worker& worker) {
        const int group = worker.group(), total = 300 - 100 * (group % 2);  // each has another number
        CHECK(worker.index_in_group() < static_cast<int>(groups[group].size()));
        worker.share_in_group(total, 7, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) own[group][i] += 1;
        });
        worker.share(500, 3, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) team[i] += own[i % count][0];
        });
        worker.share_ranges_in_group(total, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ranges[group][i] += team[i];
        });
        worker.share(count, 1, [&](int64_t g, int64_t) { sums[g] = std::accumulate(ranges[g].begin(), ranges[g].end(), 0); });
      });
      CHECK(std::accumulate(team.begin(), team.end(), 0) == 500);
      for (int group = 0; group < count; ++group) {
        CHECK(std::accumulate(own[group].begin(), own[group].end(), 0) == 300 - 100 * (group % 2));
        CHECK(sums[group] == 300 - 100 * (group % 2));
      }
    }
  }
}

TEST_CASE("a group without a processor is refused") {
  CHECK_THROWS_AS(ThreadPool({}), std::invalid_argument);
  CHECK_THROWS_AS(ThreadPool({{0}, {}}), std::invalid_argument);
}

TEST_CASE("the KV cache has a place of its own for every head of every layer of every block") {
  const DecoderPlan plan = small_plan();
  std::vector<Heads> layers;
  for (const auto& layer : plan.layers) {
    for (const ResidualBlockPlan& residual : layer) {
      if (const auto* attention = std::get_if<AttentionPlan>(&residual.mixer)) layers.push_back(attention->heads());
    }
  }
  for (const CacheType type : kAllCacheTypes) {
    const KvCache whole(layers, type, 3, Ownership({1}));
    for (const auto& workers : {std::vector<int>{1, 1}, {2, 1}, {1, 1, 1, 1}}) {
      const Ownership ownership(workers);
      const KvCache cache(layers, type, 3, ownership);
      CHECK(cache.bytes() == whole.bytes());
      std::map<const char*, size_t> places;
      for (size_t layer = 0; layer < layers.size(); ++layer) {
        int heads = 0;
        for (int group = 0; group < ownership.groups(); ++group) {
          const Range own = cache.heads(group, static_cast<int>(layer));
          for (int head = own.begin; head < own.end; ++head, ++heads) {
            for (int block = 0; block < 3; ++block) {
              const char* place = cache.head(group, static_cast<int>(layer), block, head);
              CHECK(place == cache.head(group, static_cast<int>(layer), 0, head) + block * cache.block_bytes(group));
              CHECK(place >= cache.memory(group).data());
              const size_t bytes = layers[layer].head_bytes(type);
              CHECK(place + bytes <= cache.memory(group).data() + cache.memory(group).bytes());
              CHECK(places.emplace(place, bytes).second);
            }
          }
        }
        CHECK(heads == layers[layer].num_kv_heads);
      }
      const char* end = nullptr;
      for (const auto& [place, bytes] : places) {
        CHECK(place >= end);
        end = place + bytes;
      }
    }
  }
}

TEST_CASE("any groups give the bits of one worker, for every level and type of weight") {
  int turn = 0;
  for (const Kernels* kernels : tested_kernels()) {
    for (size_t i = 0; i < std::size(kFormats); i += kStride) {
      const auto& [name, format] = kFormats[i];
      CAPTURE(kernels->name);
      CAPTURE(name);
      SmallModel alone(*kernels, format, CacheType::kFloat32, {{0}});
      const auto expected = alone.run({9, 21}, 2);
      const auto packed = packed_bytes(alone.executor);
      const uint64_t checksum = alone.executor.weights().packed().checksum();
      for (const Groups& groups : groups_for(*kernels, ++turn)) {
        CAPTURE(groups.size());
        SmallModel model(*kernels, format, CacheType::kFloat32, groups);
        CHECK(packed_bytes(model.executor) == packed);
        CHECK(model.executor.weights().packed().checksum() == checksum);
        CHECK(model.run({9, 21}, 2) == expected);
      }
    }
  }
}

TEST_CASE("and for every type of cache, with contexts that several workers share, chunks and copied blocks") {
  const WeightFormat format{WeightKind::kBFloat16};
  int turn = 0;
  for (const Kernels* kernels : tested_kernels()) {
    if (kernels->name == std::string("scalar")) continue;  // it would take long
    for (size_t i = 0; i < kModelCacheTypes; ++i) {
      const CacheType type = kAllCacheTypes[i];
      CAPTURE(kernels->name);
      CAPTURE(name_of(type));
      const auto expected = SmallModel(*kernels, format, type, {{0}}).run({kLongPrompt, 5}, 2);
      for (const Groups& groups : groups_for(*kernels, ++turn)) {
        CHECK(SmallModel(*kernels, format, type, groups).run({kLongPrompt, 5}, 2, 256) == expected);
      }
    }
  }
}

TEST_CASE("and whenever a worker that was lent comes back") {
  const Kernels& kernels = choose_kernels("auto");
  const int prompt = kStride == 1 ? 150 : 40;
  for (const CacheType type : {CacheType::kFloat32, CacheType::kInt8}) {
    const WeightFormat format{type == CacheType::kInt8 ? WeightKind::kInt8 : WeightKind::kBFloat16};
    const auto expected = SmallModel(kernels, format, type, {{0}}).run({prompt, 5}, 3);
    for (const Groups& groups : {Groups{{0, 1}}, Groups{{0, 1}, {0, 1, 0}}}) {
      SmallModel model(kernels, format, type, groups);
      for (int round = 0; round < 6; round += kStride) {
        model.executor.pool()->yield_core();
        std::thread borrower([&] {
          std::this_thread::sleep_for(std::chrono::microseconds(round * 200));
          model.executor.pool()->reclaim_core();
        });
        CHECK(model.run({prompt, 5}, 3) == expected);
        borrower.join();
      }
    }
  }
}

TEST_CASE("packed weights are read from a file into any groups, or not at all") {
  const Kernels& kernels = choose_kernels("auto");
  const WeightFormat format{WeightKind::kInt8};
  SmallModel source(kernels, format, CacheType::kFloat32, kGroups[1]);
  const auto expected = source.run({9}, 2);
  std::vector<char> bytes = packed_bytes(source.executor);
  const uint64_t checksum = source.executor.weights().packed().checksum();
  const auto write = [&](std::FILE* file) {
    std::rewind(file);
    std::fwrite("before", 1, 6, file);
    std::fwrite(bytes.data(), 1, bytes.size(), file);
    std::fflush(file);
  };
  for (const Groups& groups : kGroups) {
    std::FILE* file = std::tmpfile();
    REQUIRE(file);
    write(file);
    SmallModel model(kernels, format, CacheType::kFloat32, groups, false);
    CHECK_THROWS_AS(model.executor.check_complete(), std::invalid_argument);
    CHECK(model.executor.read_weights(fileno(file), 6, checksum));
    model.executor.check_complete();
    CHECK(model.run({9}, 2) == expected);
    for (const size_t at : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
      bytes[at] ^= 4;
      write(file);
      bytes[at] ^= 4;
      SmallModel other(kernels, format, CacheType::kFloat32, groups, false);
      CHECK_FALSE(other.executor.read_weights(fileno(file), 6, checksum));
      const auto zeros = packed_bytes(other.executor);
      CHECK(std::all_of(zeros.begin(), zeros.end(), [](char byte) { return byte == 0; }));
    }
    std::fclose(file);
  }
}

#if defined(__linux__) && defined(SYS_move_pages)
// Of the pages of an arena that are there. Empty if the kernel does not say.
static std::set<int> nodes_of(const Arena& memory) {
  const size_t page = sysconf(_SC_PAGESIZE), count = (memory.bytes() + page - 1) / page;
  std::vector<void*> pages;
  for (size_t i = 0; i < count; ++i) pages.push_back(memory.data() + i * page);
  std::vector<int> status(count, -1);
  if (count == 0 || syscall(SYS_move_pages, 0, count, pages.data(), nullptr, status.data(), 0) != 0) return {};
  std::set<int> nodes(status.begin(), status.end());
  nodes.erase(nodes.begin(), nodes.lower_bound(0));  // errors: never touched
  return nodes;
}

TEST_CASE("a group's weights and KV heads lie on its node") {
  const Topology topology = read_topology();
  Groups groups;
  std::map<int, int> cpu_of, node_of;
  for (const Processor& processor : topology.allowed) {
    node_of[processor.cpu] = processor.numa_node;
    if (cpu_of.emplace(processor.numa_node, processor.cpu).second) groups.push_back({processor.cpu});
  }
  if (groups.size() == 1) groups.push_back(groups.front());  // of one node, two groups
  SmallModel model(choose_kernels("auto"), {WeightKind::kFloat32}, CacheType::kFloat32, groups);
  const std::vector<int> before = affinity();
  std::thread([&] {
    model.executor.pin_caller();  // for good, which is not for this thread
    model.run({40, 300}, 2);
  }).join();
  CHECK(affinity() == before);
  for (size_t group = 0; group < groups.size(); ++group) {
    const int place = static_cast<int>(group);
    const std::set<int> weights = nodes_of(model.executor.weights().memory(place));
    if (weights.empty()) {
      MESSAGE("the kernel does not say where pages are");
      return;
    }
    CHECK(weights == std::set<int>{node_of[groups[group].front()]});
    CHECK(nodes_of(model.executor.cache().memory(place)) == std::set<int>{node_of[groups[group].front()]});
  }
}
#endif
