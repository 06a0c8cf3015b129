#include "model/attention_tasks.h"

#include <algorithm>
#include <limits>

namespace tidewheel {
namespace {

// A task is split if its cost is more than this fraction of one worker's share. Otherwise the other workers would wait
// for it.
constexpr int kUnitsPerWorker = 8;
// For each worker: room for the KV splits of 128 K tokens of a large model's context. Common prefixes take up to half
// of it.
constexpr size_t kPartialBytesPerWorker = size_t{8} << 20;
constexpr int kUnlimited = std::numeric_limits<int>::max();

}  // namespace

AttentionTasks::AttentionTasks(std::span<const Heads> layers, std::span<const std::vector<int>> windows, int max_tokens,
                               int max_sequences, const Ownership& ownership)
    : partials_(std::make_shared<Arena>(kPartialBytesPerWorker * ownership.workers())) {
  int group = 1, kv_heads = 1;
  for (const Heads& heads : layers) {
    group = std::max(group, heads.group());
    kv_heads = std::max(kv_heads, heads.num_kv_heads);
    floats_per_token_ = std::max(floats_per_token_, heads.num_kv_heads * heads.partial_floats(1));
  }
  for (int g = 0; g < ownership.groups(); ++g) {
    const int workers = ownership.workers(g), own = ownership.of(g, kv_heads).size();
    if (own > 0 && workers * kv_heads_ > workers_ * own) {
      workers_ = workers;
      kv_heads_ = own;
    }
  }
  tokens_per_task_ = std::max(1, kAttentionRows / group);
  for (const std::vector<int>& all : windows) {
    int widest = 0;
    for (const int window : all) widest = std::max(widest, window ? window : kUnlimited);
    prefixes_.emplace_back(widest == kUnlimited ? 0 : widest, tokens_per_task_, floats_per_token_, ownership.workers());
  }
  tasks_.reserve(size_t(max_tokens) / tokens_per_task_ + max_sequences);
}

void AttentionTasks::build(std::span<const int32_t> query_start, std::span<const int32_t> context_len,
                           std::span<const BlockTables> block_tables, std::span<const int32_t> visible_until,
                           bool with_prefixes) {
  clear();
  for (size_t s = 0; s < context_len.size(); ++s) {
    add_tasks(static_cast<int>(s), query_start[s], query_start[s + 1], query_start[s], query_start, context_len, visible_until);
  }
  divide(query_start, block_tables, with_prefixes, true);
}

void AttentionTasks::build_some(std::span<const int32_t> tokens, std::span<const int32_t> query_start,
                                std::span<const int32_t> context_len, std::span<const BlockTables> block_tables,
                                std::span<const int32_t> visible_until) {
  clear();
  int sequence = 0;
  for (size_t row = 0; row < tokens.size();) {
    const int begin = tokens[row];
    while (query_start[sequence + 1] <= begin) ++sequence;
    int end = begin + 1;
    while (row + (end - begin) < tokens.size() && tokens[row + (end - begin)] == end && end < query_start[sequence + 1]) ++end;
    add_tasks(sequence, begin, end, static_cast<int>(row), query_start, context_len, visible_until);
    row += end - begin;
  }
  divide(query_start, block_tables, true, false);
}

void AttentionTasks::clear() {
  tasks_.clear();
  units_.clear();
  split_.clear();
  shared_.clear();
}

void AttentionTasks::add_tasks(int sequence, int begin, int end, int row, std::span<const int32_t> query_start,
                               std::span<const int32_t> context_len, std::span<const int32_t> visible_until) {
  for (int t = begin; t < end; t += tokens_per_task_) {
    const int next = std::min(t + tokens_per_task_, end);
    const int context = visible_until.empty() ? context_len[sequence] - (query_start[sequence + 1] - next) : visible_until[next - 1];
    tasks_.push_back({count(), sequence, t, next - t, row + t - begin, context});
  }
}

void AttentionTasks::divide(std::span<const int32_t> query_start, std::span<const BlockTables> block_tables,
                            bool with_prefixes, bool some_alone) {
  const auto cost = [&](const AttentionTask& task) { return int64_t{task.num_tokens} * (task.context - in_prefix(task)); };
  find_prefixes(query_start, block_tables, with_prefixes);
  int64_t total = 0;
  for (const AttentionTask& task : tasks_) total += cost(task);
  int64_t used = prefix_floats_;
  for (int i = 0; i < static_cast<int>(tasks_.size()); ++i) {
    AttentionTask& task = tasks_[i];
    const int splits = task.num_splits();
    const int64_t floats = static_cast<int64_t>(floats_per_token_) * task.num_tokens * splits;
    const bool holds_up = cost(task) * kUnitsPerWorker * workers_ > total * kv_heads_;
    const bool is_split = workers_ > 1 && splits > 1 && holds_up && used + floats <= static_cast<int64_t>(partial_floats());
    const bool single = some_alone && query_start[task.sequence + 1] - query_start[task.sequence] == 1;
    const bool has_prefix = std::any_of(prefixes_.begin(), prefixes_.end(), [&](const CommonPrefixes& prefixes) {
      return prefixes.place(task.index).prefix >= 0;
    });
    task.alone = single && !is_split && !has_prefix;
    if (!task.alone) shared_.push_back(i);
    if (!is_split) {
      units_.push_back({i, 0, cost(task)});
      continue;
    }
    task.partials = used;
    used += floats;
    split_.push_back(i);
    for (int split = 0; split < splits; ++split) units_.push_back({i, split, cost(task) / splits});
  }
  std::sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

void AttentionTasks::find_prefixes(std::span<const int32_t> query_start, std::span<const BlockTables> block_tables,
                                   bool with_prefixes) {
  prefix_floats_ = 0;
  for (size_t group = 0; group < prefixes_.size(); ++group) {
    members_.clear();
    for (const AttentionTask& task : tasks_) {
      if (!with_prefixes) break;
      // With more tokens, the sequence's own tasks already share each read of K and V.
      if (query_start[task.sequence + 1] - query_start[task.sequence] != task.num_tokens) continue;
      // So all of its context is before the task or in it, even if tokens see beyond themselves.
      members_.push_back({task.index, task.token_begin, task.num_tokens, block_tables[group].of(task.sequence),
                          task.context - task.num_tokens});
    }
    const int64_t room = static_cast<int64_t>(partial_floats()) / 2;
    prefix_floats_ = std::max(prefix_floats_, prefixes_[group].find(members_, count(), room));
  }
}

int AttentionTasks::in_prefix(const AttentionTask& task) const {
  int least = task.context;
  for (const CommonPrefixes& prefixes : prefixes_) {
    const int index = prefixes.place(task.index).prefix;
    least = std::min(least, index < 0 ? 0 : prefixes.prefix(index).end - prefixes.prefix(index).begin);
  }
  return prefixes_.empty() ? 0 : least;
}

float* AttentionTasks::partial(const CommonPrefix& prefix, const Heads& heads, int kv_head, int split) const {
  const size_t index = size_t(kv_head) * (prefix.split_end() - prefix.split_begin()) + split - prefix.split_begin();
  return reinterpret_cast<float*>(partials_->data()) + prefix.partials + index * heads.partial_floats(prefix.num_tokens);
}

PrefixResult AttentionTasks::prefix_result(const AttentionTask& task, int cache_group, int window, const Heads& heads,
                                           int kv_head) const {
  const CommonPrefixes::Place place = prefixes_[cache_group].place(task.index);
  if (place.prefix < 0) return {};
  const CommonPrefix& prefix = prefixes_[cache_group].prefix(place.prefix);
  const int first = prefix.first_split(window);
  if (first >= prefix.split_end()) return {};
  return {partial(prefix, heads, kv_head, first), prefix.num_tokens, place.token, first, prefix.end};
}

float* AttentionTasks::partial(const AttentionTask& task, const Heads& heads, int kv_head, int split) const {
  const size_t index = size_t(kv_head) * task.num_splits() + split;
  return reinterpret_cast<float*>(partials_->data()) + task.partials + index * heads.partial_floats(task.num_tokens);
}

}  // namespace tidewheel
