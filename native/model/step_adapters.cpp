#include "model/step_adapters.h"

#include <algorithm>

#include "model/gemms.h"
#include "model/require.h"

namespace tidewheel {
namespace {

// Values of h that a worker computes at a time where there are few rows: so all workers have something to do.
constexpr int kChunk = 8;

}  // namespace

void StepAdapters::allocate(const std::map<const Linear*, std::string>& matrices, int max_rank, int workers) {
  if (max_rank == 0) return;
  int most_tensors = 0, most_inputs = 0;
  for (const auto& [linear, name] : matrices) {
    most_tensors = std::max(most_tensors, linear->tensors);
    most_inputs = std::max(most_inputs, linear->k);
  }
  workers_ = workers;
  most_values_ = most_tensors * (max_rank + 1);  // with a bias
  stride_ = round_up(most_values_, 16);
  scratch_stride_ = round_up(most_inputs, 16);
  values_ = Arena(workspace_.rows() * stride_ * sizeof(float));
  rows_.resize(workspace_.rows());
  workspace_.need_scratch(kBlockRows * scratch_stride_ * sizeof(float));
}

void StepAdapters::set(int number, std::shared_ptr<const Adapter> adapter) {
  require(most_values_ > 0, "this executor was made without adapters");
  const std::lock_guard lock(mutex_);
  if (adapter) {
    adapters_[number] = std::move(adapter);
  } else {
    adapters_.erase(number);
  }
}

void StepAdapters::begin(std::span<const int32_t> numbers, std::span<const int32_t> query_start) {
  blocks_.clear();
  used_.clear();
  if (numbers.empty()) return;
  std::map<int, std::vector<int>> tokens;  // by number
  for (size_t s = 0; s < numbers.size(); ++s) {
    for (int t = query_start[s]; t < query_start[s + 1]; ++t) {
      if (numbers[s] >= 0) tokens[numbers[s]].push_back(t);
      rows_[t] = {};
    }
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [number, rows] : tokens) {
    const auto found = adapters_.find(number);
    if (found == adapters_.end()) fail("there is no adapter " + std::to_string(number));
    used_.push_back(found->second);
    for (size_t i = 0; i < rows.size(); i += kBlockRows) {
      Block& block = blocks_.emplace_back();
      block.adapter = found->second.get();
      block.count = static_cast<int>(std::min<size_t>(kBlockRows, rows.size() - i));
      std::copy_n(rows.begin() + i, block.count, block.rows);
    }
  }
}

const LowRankRow* StepAdapters::project(Worker& worker, const Linear& linear, const Rows& rows) {
  int most = 0;
  for (const auto& adapter : used_) {
    if (const Adapter::Part* part = adapter->part(linear)) most = std::max(most, part->values);
  }
  if (most == 0) return nullptr;
  const auto count = static_cast<int64_t>(blocks_.size());
  const int chunk = count < 2 * workers_ ? kChunk : most, chunks = (most + chunk - 1) / chunk;
  worker.share(count * chunks, 1, [&](int64_t i, int64_t) {
    const Block& block = blocks_[i / chunks];
    const int first = static_cast<int>(i % chunks) * chunk;
    const Adapter::Part* part = block.adapter->part(linear);
    if (first == 0) {
      for (int r = 0; r < block.count; ++r) {
        const int row = block.rows[r];
        rows_[row] = part ? LowRankRow{part->stripes.data(), h(row), block.adapter->type()} : LowRankRow{};
      }
    }
    if (part && first < part->values) {
      project_block(worker, block, *part, linear, rows, first, std::min(chunk, part->values - first));
    }
  });
  return rows_.data();
}

void StepAdapters::project_block(Worker& worker, const Block& block, const Adapter::Part& part, const Linear& linear,
                                 const Rows& rows, int first, int count) {
  float* const scratch = reinterpret_cast<float*>(workspace_.scratch(worker));
  const float* x[kBlockRows];
  float* out[kBlockRows];
  for (int r = 0; r < block.count; ++r) {
    x[r] = rows.x + block.rows[r] * rows.stride;
    out[r] = h(block.rows[r]) + first;
    if (rows.norm.kind == NormKind::kNone) continue;
    float* const normalized = scratch + r * scratch_stride_;
    std::copy_n(x[r], linear.k, normalized);
    kernels_.normalize(rows.norm, normalized, linear.k);
    x[r] = normalized;
  }
  const DType type = block.adapter->type();
  kernels_.project({x, block.count, linear.k, part.a + size_t(first) * linear.k * dtype_bytes(type), type, count, out});
  for (int r = 0; r < block.count; ++r) {
    for (int j = 0; j < count; ++j) out[r][j] = part.scale[first + j] * (out[r][j] + part.one[first + j]);
  }
}

}  // namespace tidewheel
