#include "model/attention_tasks.h"

#include <algorithm>

namespace tidewheel {
namespace {

// A task is split if it is more than this part of one worker's share, because the other workers would wait for it.
constexpr int kUnitsPerWorker = 8;
// Room for the pieces of 128 K tokens of context of a large model, once a worker.
constexpr size_t kPartialBytesPerWorker = size_t{8} << 20;

}  // namespace

AttentionTasks::AttentionTasks(std::span<const Heads> layers, int max_tokens, int max_sequences,
                               const Ownership& ownership)
    : partials_(kPartialBytesPerWorker * ownership.workers()) {
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
  tasks_.reserve(size_t(max_tokens) / tokens_per_task_ + max_sequences);
}

void AttentionTasks::build(std::span<const int32_t> query_start, std::span<const int32_t> context_len) {
  tasks_.clear();
  units_.clear();
  split_.clear();
  shared_.clear();
  const auto cost = [](const AttentionTask& task) { return int64_t{task.num_tokens} * task.context; };
  int64_t total = 0;
  for (size_t s = 0; s < context_len.size(); ++s) {
    const int end = query_start[s + 1];
    for (int t = query_start[s]; t < end; t += tokens_per_task_) {
      const int next = std::min(t + tokens_per_task_, end);
      tasks_.push_back({static_cast<int>(s), t, next - t, context_len[s] - (end - next)});
      total += cost(tasks_.back());
    }
  }
  int64_t used = 0;
  for (int i = 0; i < static_cast<int>(tasks_.size()); ++i) {
    AttentionTask& task = tasks_[i];
    const int pieces = task.num_pieces();
    const int64_t floats = static_cast<int64_t>(floats_per_token_) * task.num_tokens * pieces;
    const bool holds_up = cost(task) * kUnitsPerWorker * workers_ > total * kv_heads_;
    const bool splits = workers_ > 1 && pieces > 1 && holds_up && used + floats <= static_cast<int64_t>(partial_floats());
    task.alone = !splits && query_start[task.sequence + 1] - query_start[task.sequence] == 1;
    if (!task.alone) shared_.push_back(i);
    if (!splits) {
      units_.push_back({i, 0, cost(task)});
      continue;
    }
    task.partials = used;
    used += floats;
    split_.push_back(i);
    for (int piece = 0; piece < pieces; ++piece) units_.push_back({i, piece, cost(task) / pieces});
  }
  std::sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

float* AttentionTasks::partial(const AttentionTask& task, const Heads& heads, int kv_head, int piece) const {
  const size_t index = size_t(kv_head) * task.num_pieces() + piece;
  return reinterpret_cast<float*>(partials_.data()) + task.partials + index * heads.partial_floats(task.num_tokens);
}

}  // namespace tidewheel
