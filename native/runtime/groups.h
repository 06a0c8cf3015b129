// What the groups of a team own. A group consists of the workers of one NUMA node. Its memory is on that node because
// they touch it first. This needs no library and no permission; containers deny mbind.
#pragma once

#include <cstdint>
#include <vector>

namespace tidewheel {

struct Range {
  int begin = 0, end = 0;
  int size() const { return end - begin; }
};

// Distributes things that cannot be divided, such as panels of a weight or KV heads. Each group owns a run of them, in
// proportion to its workers. If there are fewer things than groups, some groups own none.
class Ownership {
 public:
  explicit Ownership(const std::vector<int>& workers) : before_{0} {
    for (const int count : workers) before_.push_back(before_.back() + count);
  }

  bool operator==(const Ownership&) const = default;

  int groups() const { return static_cast<int>(before_.size()) - 1; }
  int workers() const { return before_.back(); }
  int workers(int group) const { return before_[group + 1] - before_[group]; }
  // The part of [0, count) that `group` owns.
  Range of(int group, int count) const { return {bound(group, count), bound(group + 1, count)}; }

 private:
  int bound(int group, int count) const {
    return static_cast<int>((2 * int64_t{count} * before_[group] + workers()) / (2 * workers()));
  }

  std::vector<int> before_;  // [groups + 1]: number of workers in the groups before
};

}  // namespace tidewheel
