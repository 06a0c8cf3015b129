#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "model/attention_tasks.h"

using namespace tidewheel;

TEST_CASE("every token has one task, and every KV split of a task a place of its own") {
  const Heads layers[] = {{12, 4, 64}, {4, 2, 40}};
  const std::vector<int> windows[] = {{0, 0}};
  AttentionTasks shared(layers, windows, 256, 8, Ownership({2}));
  std::vector<int32_t> blocks(2 * 200'000);
  std::iota(blocks.begin(), blocks.end(), 0);  // none twice
  const BlockTables tables[] = {{blocks.data(), 200'000}};
  const auto check = [&](const std::vector<int32_t>& query_start, const std::vector<int32_t>& context_len,
                         const std::vector<int32_t>& visible_until = {}) {
    shared.build(query_start, context_len, tables, visible_until);
    std::vector<int> planned(query_start.back());
    std::vector<std::vector<int>> splits(query_start.back());
    std::vector<const float*> places;
    for (const AttentionTasks::Unit& unit : shared.units()) {
      const AttentionTask& task = shared.task(unit.task);
      CHECK(task.num_tokens * 3 <= kAttentionRows);
      const int after = query_start[task.sequence + 1] - task.token_begin - task.num_tokens;
      const int last_token = task.token_begin + task.num_tokens - 1;
      CHECK(task.context == (visible_until.empty() ? context_len[task.sequence] - after : visible_until[last_token]));
      splits[task.token_begin].push_back(unit.split);
      if (unit.split == 0) {
        for (int t = 0; t < task.num_tokens; ++t) ++planned[task.token_begin + t];
      }
      if (!task.split()) continue;
      for (const Heads& heads : layers) {
        const float* first = shared.partial(task, heads, 0, 0);
        const float* last = shared.partial(task, heads, heads.num_kv_heads - 1, task.num_splits() - 1);
        const size_t end = task.partials + (last - first) + heads.partial_floats(task.num_tokens);
        CHECK(end <= shared.partial_floats());
        if (&heads == layers && unit.split == 0) places.push_back(first);
        if (&heads == layers && unit.split == 0) places.push_back(last + heads.partial_floats(task.num_tokens) - 1);
      }
    }
    CHECK(std::all_of(planned.begin(), planned.end(), [](int count) { return count == 1; }));
    for (const int index : shared.split_tasks()) {
      std::vector<int>& found = splits[shared.task(index).token_begin];
      std::sort(found.begin(), found.end());
      std::vector<int> all(shared.task(index).num_splits());
      std::iota(all.begin(), all.end(), 0);
      CHECK(found == all);
    }
    std::sort(places.begin(), places.end());
    CHECK(std::adjacent_find(places.begin(), places.end()) == places.end());
    return shared.split_tasks().size();
  };
  CHECK(check({0, 1}, {4096}) == 1);
  CHECK(check({0, 1}, {400}) == 0);               // one split
  CHECK(check({0, 1, 2}, {400, 3000}) == 1);      // the long one only
  CHECK(check({0, 256}, {4096}) == 0);            // tasks enough without
  CHECK(check({0, 6, 7}, {5000, 5001}) == 1);
  CHECK(check({0, 1, 2}, {100, 3'000'000}) == 0);  // more than there is room for
  // Of three tasks, the first one sees all that the last one stores, which is another KV split.
  std::vector<int32_t> until(80);
  std::iota(until.begin(), until.end(), 961);
  CHECK(check({0, 80}, {1040}, until) == 2);
  CHECK(shared.task(0).num_splits() == 2);
  std::fill(until.begin(), until.end(), 1040);
  CHECK(check({0, 80}, {1040}, until) == 2);
  CHECK(shared.task(0).num_splits() == 3);
}

TEST_CASE("of some tokens, those that follow each other in a sequence are computed together") {
  const Heads layers[] = {{4, 4, 64}};
  const std::vector<int> windows[] = {{0}};
  AttentionTasks tasks(layers, windows, 256, 8, Ownership({1}));
  std::vector<int32_t> blocks(3 * 100);
  std::iota(blocks.begin(), blocks.end(), 0);
  const BlockTables tables[] = {{blocks.data(), 100}};
  const std::vector<int32_t> query_start{0, 40, 41, 50}, context_len{100, 30, 9}, tokens{3, 38, 39, 40, 41, 42, 49};
  tasks.build_some(tokens, query_start, context_len, tables);
  const std::vector<std::vector<int>> wanted{
      {0, 3, 1, 0, 64}, {0, 38, 2, 1, 100}, {1, 40, 1, 3, 30}, {2, 41, 2, 4, 2}, {2, 49, 1, 6, 9}};
  REQUIRE(tasks.count() == static_cast<int>(wanted.size()));
  CHECK(tasks.shared_tasks().size() == wanted.size());
  for (int i = 0; i < tasks.count(); ++i) {
    const AttentionTask& task = tasks.task(i);
    CHECK(std::vector<int>{task.sequence, task.token_begin, task.num_tokens, task.row, task.context} == wanted[i]);
  }
}
