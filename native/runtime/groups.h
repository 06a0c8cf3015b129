// What the groups of a team own. A group is the workers of one NUMA node, and its memory lies there because they are the
// first to touch it: that needs no library and no permission, which containers deny to mbind.
#pragma once

#include <cstdint>
#include <vector>

namespace tidewheel {

struct Range {
  int begin = 0, end = 0;
  int size() const { return end - begin; }
};

// Shares out what is not to be divided, like panels of a weight or KV heads: each group owns a run of them, as many as
// are nearest to its part of the workers. Where there are fewer of them than groups, some own none.
class Ownership {
 public:
  explicit Ownership(const std::vector<int>& workers) : before_{0} {
    for (const int count : workers) before_.push_back(before_.back() + count);
  }

  int groups() const { return static_cast<int>(before_.size()) - 1; }
  int workers() const { return before_.back(); }
  int workers(int group) const { return before_[group + 1] - before_[group]; }
  // What `group` owns of [0, count).
  Range of(int group, int count) const { return {bound(group, count), bound(group + 1, count)}; }

 private:
  int bound(int group, int count) const {
    return static_cast<int>((2 * int64_t{count} * before_[group] + workers()) / (2 * workers()));
  }

  std::vector<int> before_;  // [groups + 1]: workers of the groups before
};

}  // namespace tidewheel
