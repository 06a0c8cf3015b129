#include "model/hidden_rows.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace tidewheel {
namespace {

int64_t slot(int block, int position) { return int64_t{block} * kBlockTokens + position % kBlockTokens; }

int64_t slot(const Step& step, int sequence, int position) {
  return slot(step.block_tables[0].of(sequence)[position / kBlockTokens], position);
}

}  // namespace

void HiddenRows::allocate(int sequences, int rows, int size) {
  rows_each_ = rows, size_ = size;
  memory_ = Arena(size_t(sequences) * rows * size * sizeof(float));
  places_.resize(sequences);
}

const HiddenRows::Row* HiddenRows::find(const Step& step, int sequence) const {
  const int first = step.positions[step.query_start[sequence]];
  if (first == 0) return nullptr;
  const auto found = rows_.find(slot(step, sequence, first - 1));
  return found == rows_.end() || found->second.position != first - 1 ? nullptr : &found->second;
}

float* HiddenRows::at(const Row& row) const {
  return reinterpret_cast<float*>(memory_.data()) + (size_t(row.place) * rows_each_ + row.index) * size_;
}

const float* HiddenRows::before(const Step& step, int sequence) const {
  const Row* row = find(step, sequence);
  return row ? at(*row) : nullptr;
}

void HiddenRows::begin(const Step& step) {
  ++step_;
  kept_.clear();
  const int sequences = static_cast<int>(step.context_len.size());
  // A sequence reuses its place. If forks find the same place, the first one gets it.
  std::vector<int> taken(sequences, -1);
  for (int s = 0; s < sequences; ++s) {
    const Row* row = find(step, s);
    if (!row || places_[row->place].used == step_) continue;
    taken[s] = row->place;
    places_[row->place].used = step_;
  }
  std::vector<int> free;  // the least recently used one last
  if (std::find(taken.begin(), taken.end(), -1) != taken.end()) {
    for (int place = 0; place < static_cast<int>(places_.size()); ++place) {
      if (places_[place].used != step_) free.push_back(place);
    }
    std::sort(free.begin(), free.end(), [&](int a, int b) { return places_[a].used > places_[b].used; });
  }
  for (int s = 0; s < sequences; ++s) {
    int place = taken[s];
    if (place < 0) {
      if (free.empty()) continue;
      place = free.back();
      free.pop_back();
      places_[place].used = step_;
    }
    forget(place);
    const int end = step.query_start[s + 1], count = std::min(end - step.query_start[s], rows_each_);
    for (int i = 0; i < count; ++i) {
      const int token = end - count + i, position = step.positions[token];
      const Row row{place, i, position};
      const int64_t key = slot(step, s, position);
      rows_[key] = row;
      places_[place].tokens.push_back(key);
      kept_.push_back({token, at(row)});
    }
  }
}

void HiddenRows::forget(int place) {
  for (const int64_t key : places_[place].tokens) {
    const auto found = rows_.find(key);
    if (found != rows_.end() && found->second.place == place) rows_.erase(found);
  }
  places_[place].tokens.clear();
}

void HiddenRows::copy_blocks(std::span<const int32_t> pairs) {
  for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
    for (int position = 0; position < kBlockTokens; ++position) {
      const int64_t to = slot(pairs[i + 1], position);
      const auto found = rows_.find(slot(pairs[i], position));
      if (found == rows_.end()) {
        rows_.erase(to);
        continue;
      }
      const Row row = found->second;
      std::vector<int64_t>& tokens = places_[row.place].tokens;
      if (std::find(tokens.begin(), tokens.end(), to) == tokens.end()) tokens.push_back(to);
      rows_[to] = row;
    }
  }
}

}  // namespace tidewheel
