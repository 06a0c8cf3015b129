#include "model/state_slots.h"

#include <algorithm>
#include <string>

#include "model/require.h"

namespace tidewheel {
namespace {

constexpr size_t kCacheLineFloats = 16;
constexpr int64_t kPieceFloats = 16384;  // of one piece of a copy

}  // namespace

size_t StateSlots::take(size_t floats, size_t& end) {
  const size_t offset = end;
  end += (floats + kCacheLineFloats - 1) / kCacheLineFloats * kCacheLineFloats;
  return offset;
}

size_t StateSlots::add(size_t floats) { return take(floats, floats_); }

size_t StateSlots::add_to_log(size_t floats) { return take(floats, log_stride_); }

void StateSlots::allocate(int num_slots, int max_draft_tokens) {
  max_draft_tokens_ = max_draft_tokens;
  memory_ = Arena(num_slots * floats_ * sizeof(float));
  log_ = Arena(num_slots * max_draft_tokens_ * log_stride_ * sizeof(float));
  slots_.resize(num_slots);
}

void StateSlots::check_slot(int slot) const {
  if (slot < 0 || slot >= static_cast<int>(slots_.size())) {
    fail("there is no slot " + std::to_string(slot) + " of recurrent state");
  }
}

void StateSlots::check(const Step& step) const {
  if (empty()) return;
  const size_t sequences = step.context_len.size();
  require(step.state_slots.size() == sequences, "every sequence needs a slot of recurrent state");
  require(step.num_draft_tokens.empty() || step.num_draft_tokens.size() == sequences, "every sequence needs its number of draft tokens");
  std::vector<int32_t> taken(step.state_slots.begin(), step.state_slots.end());
  for (const int32_t slot : taken) check_slot(slot);
  std::sort(taken.begin(), taken.end());
  require(std::adjacent_find(taken.begin(), taken.end()) == taken.end(), "two sequences have the same slot of recurrent state");
  for (size_t s = 0; s < sequences; ++s) {
    const int begin = step.query_start[s], count = step.query_start[s + 1] - begin, first = step.positions[begin];
    const int draft_tokens = step.num_draft_tokens.empty() ? 0 : step.num_draft_tokens[s];
    require(draft_tokens >= 0 && draft_tokens < count, "every sequence needs a token before its draft tokens");
    if (draft_tokens > static_cast<int>(max_draft_tokens_)) {
      fail("a sequence may have " + std::to_string(max_draft_tokens_) + " draft tokens, not " + std::to_string(draft_tokens));
    }
    const Slot& slot = slots_[step.state_slots[s]];
    if (first > 0 && slot.draft_tokens > 0 && (first < slot.length || first > slot.length + slot.draft_tokens)) {
      fail("slot " + std::to_string(step.state_slots[s]) + " has the state after " + std::to_string(slot.length) + " tokens and " +
           std::to_string(slot.draft_tokens) + " draft tokens, not after " + std::to_string(first));
    }
  }
}

void StateSlots::begin(const Step& step) {
  replayed_.clear(), running_.clear();
  if (empty()) return;
  for (size_t s = 0; s < step.context_len.size(); ++s) {
    const int begin = step.query_start[s], count = step.query_start[s + 1] - begin, first = step.positions[begin];
    const int number = step.state_slots[s], draft_tokens = step.num_draft_tokens.empty() ? 0 : step.num_draft_tokens[s];
    Slot& slot = slots_[number];
    if (first > 0 && slot.draft_tokens > 0 && first > slot.length) {
      replayed_.push_back({0, first - slot.length, number, 0, false, true});
    }
    running_.push_back({begin, count, number, draft_tokens, first == 0, false});
    slot = {first + count - draft_tokens, draft_tokens};
  }
}

void StateSlots::copy(ThreadPool& pool, std::span<const int32_t> pairs) {
  std::vector<size_t> logged;  // floats
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
    const Slot slot = slots_[pairs[i + 1]] = slots_[pairs[i]];
    logged.push_back(slot.draft_tokens * log_stride_);
  }
  pool.run([&](Worker& worker) {
    const auto share = [&](size_t floats, const float* from, float* to) {
      worker.share(static_cast<int64_t>(floats), kPieceFloats,
                   [&](int64_t begin, int64_t end) { std::copy(from + begin, from + end, to + begin); });
    };
    for (size_t i = 0; i < logged.size(); ++i) {
      const int from = pairs[2 * i], to = pairs[2 * i + 1];
      if (from == to) continue;
      share(floats_, at(from, 0), at(to, 0));
      if (logged[i]) share(logged[i], log_at(from, 0), log_at(to, 0));
    }
  });
}

}  // namespace tidewheel
