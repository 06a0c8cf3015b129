// How the workers share a step's attention: which tokens are computed together, and which of these tasks are split
// among several workers. This cannot change a result: the kernels give the same bits for any division.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "model/common_prefixes.h"
#include "model/step.h"
#include "runtime/arena.h"
#include "runtime/groups.h"

namespace tidewheel {

// A run of tokens of one sequence whose attention is computed together, for each KV head.
struct AttentionTask {
  int index;            // of this task
  int sequence, token_begin, num_tokens;
  int row;              // of its first token among those that are computed
  int context;          // tokens that the task's last token sees, in layers that are two-way
  // No other task needs its q, k and v, so they are prepared together with it. It is not split, has no common prefix,
  // and its token is the only one of its sequence.
  bool alone = false;
  int64_t partials = -1;  // the offset of its KV splits' results, in floats; -1: not split

  bool split() const { return partials >= 0; }
  int num_splits() const { return (context + kKvSplit - 1) / kKvSplit; }
};

// Copies use the same memory for the results of KV splits, one after the other.
class AttentionTasks {
 public:
  // What a worker computes at a time, for one KV head: a whole task, or one KV split of a split task.
  struct Unit {
    int task, split;
    int64_t cost;
  };

  AttentionTasks() = default;
  // `windows` has the windows of each cache group's layers; 0: unlimited. Throws std::bad_alloc.
  AttentionTasks(std::span<const Heads> layers, std::span<const std::vector<int>> windows, int max_tokens,
                 int max_sequences, const Ownership& ownership);

  // The arrays have the sizes [S + 1], [S], [cache groups] and [T] or none, as in Step. Without prefixes, each
  // sequence's attention is computed on its own.
  void build(std::span<const int32_t> query_start, std::span<const int32_t> context_len,
             std::span<const BlockTables> block_tables, std::span<const int32_t> visible_until = {},
             bool with_prefixes = true);
  // The same for some of the tokens alone, in ascending order. Their K and V are stored before, so no task is alone.
  void build_some(std::span<const int32_t> tokens, std::span<const int32_t> query_start,
                  std::span<const int32_t> context_len, std::span<const BlockTables> block_tables,
                  std::span<const int32_t> visible_until = {});

  int count() const { return static_cast<int>(tasks_.size()); }
  const AttentionTask& task(int index) const { return tasks_[index]; }
  std::span<const Unit> units() const { return units_; }        // the most expensive first
  std::span<const int> split_tasks() const { return split_; }
  std::span<const int> shared_tasks() const { return shared_; }  // tasks that are not alone
  // The result of a split task's KV split, counted from the first one that the layer sees.
  float* partial(const AttentionTask& task, const Heads& heads, int kv_head, int split) const;
  const CommonPrefixes& prefixes(int cache_group) const { return prefixes_[cache_group]; }
  float* partial(const CommonPrefix& prefix, const Heads& heads, int kv_head, int split) const;
  // The result for the task from its common prefix, in a layer with this window.
  PrefixResult prefix_result(const AttentionTask& task, int cache_group, int window, const Heads& heads, int kv_head) const;
  size_t partial_floats() const { return partials_->bytes() / sizeof(float); }

 private:
  void clear();
  // Divides the tokens of a sequence from `begin` to `end` into tasks.
  void add_tasks(int sequence, int begin, int end, int row, std::span<const int32_t> query_start,
                 std::span<const int32_t> context_len, std::span<const int32_t> visible_until);
  // Finds prefixes, splits and units of all tasks.
  void divide(std::span<const int32_t> query_start, std::span<const BlockTables> block_tables, bool with_prefixes,
              bool some_alone);
  void find_prefixes(std::span<const int32_t> query_start, std::span<const BlockTables> block_tables, bool with_prefixes);
  // Tokens of the context that every layer takes from a common prefix.
  int in_prefix(const AttentionTask& task) const;

  int tokens_per_task_ = 1;
  int workers_ = 0, kv_heads_ = 1;  // of the group with the most workers per KV head
  size_t floats_per_token_ = 0;  // of one KV split, over all heads
  std::shared_ptr<Arena> partials_;
  std::vector<CommonPrefixes> prefixes_;  // [cache groups]; their results share one place: layers run one by one
  int64_t prefix_floats_ = 0;             // floats of the partials that prefixes use in this step
  std::vector<CommonPrefixes::Member> members_;
  std::vector<AttentionTask> tasks_;
  std::vector<Unit> units_;
  std::vector<int> split_, shared_;
};

}  // namespace tidewheel
