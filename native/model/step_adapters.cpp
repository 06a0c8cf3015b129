#include "model/step_adapters.h"

#include <algorithm>
#include <cmath>

#include "model/gemms.h"
#include "model/require.h"

namespace tidewheel {
namespace {

// Values of h that a worker computes at a time where there are few rows: so all workers have something to do.
constexpr int kChunk = 8;

// Values of h that are computed before they are scaled.
constexpr int kSome = 64;

// Logits that a worker computes at a time, of a head of an adapter's own.
constexpr int kLogits = 256;

}  // namespace

void StepAdapters::allocate(const std::map<const Linear*, std::string>& matrices, int embedding_size, int max_rank, int workers) {
  if (max_rank == 0) return;
  int most_tensors = 0, most_inputs = 0;
  for (const auto& [linear, name] : matrices) {
    most_tensors = std::max(most_tensors, linear->tensors);
    most_inputs = std::max(most_inputs, linear->k);
  }
  workers_ = workers;
  most_values_ = most_tensors * (max_rank + 2);  // with a bias and a shift
  stride_ = round_up(most_values_ + kLowRankValues, 16);
  scratch_stride_ = round_up(most_inputs, 16);
  const size_t most_rows = workspace_.rows() * rows_per_token_;
  values_ = Arena(most_rows * stride_ * sizeof(float));
  if (most_experts_ > 0) {
    experts_.reserve(most_experts_);
    mixture_.blocks.reserve(most_rows);
    mixture_.rows.reserve(most_rows);
  }
  workspace_.need_scratch(kBlockRows * scratch_stride_ * sizeof(float));
  workspace_.need_scratch(Adapter::embedding_scratch(embedding_size, most_values_) * sizeof(float));
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

void StepAdapters::begin(std::span<const int32_t> numbers, std::span<const int32_t> query_start,
                         std::span<const int32_t> logits_rows, size_t room) {
  used_.clear();
  if (numbers.empty()) return;
  of_token_.assign(query_start.back(), nullptr);
  {
    const std::lock_guard lock(mutex_);
    for (size_t s = 0; s < numbers.size(); ++s) {
      if (numbers[s] < 0) continue;
      const auto found = adapters_.find(numbers[s]);
      if (found == adapters_.end()) fail("there is no adapter " + std::to_string(numbers[s]));
      if (std::find(used_.begin(), used_.end(), found->second) == used_.end()) used_.push_back(found->second);
      std::fill(of_token_.begin() + query_start[s], of_token_.begin() + query_start[s + 1], found->second.get());
    }
  }
  if (used_.empty()) return;
  assign(of_token_, tokens_);
  of_logits_.clear();
  for (const int32_t row : logits_rows) of_logits_.push_back(of_token_[row]);
  turns_.resize((of_logits_.size() + room - 1) / room);
  for (size_t turn = 0; turn < turns_.size(); ++turn) {
    const size_t first = turn * room;
    assign({of_logits_.data() + first, std::min(room, of_logits_.size() - first)}, turns_[turn]);
  }
}

void StepAdapters::assign(std::span<const Adapter* const> adapters, Assignment& to) const {
  to.clear();
  to.rows.resize(adapters.size());
  for (const auto& adapter : used_) {
    Block* block = nullptr;
    for (size_t row = 0; row < adapters.size(); ++row) {
      if (adapters[row] != adapter.get()) continue;
      if (!block || block->count == kBlockRows) {
        block = &to.blocks.emplace_back();
        block->adapter = adapter.get();
      }
      block->rows[block->count++] = static_cast<int>(row);
      to.own_heads += adapter->head() != nullptr;
    }
  }
}

const LowRankRow* StepAdapters::project(Worker& worker, const Linear& linear, const Rows& rows) {
  int most = 0;
  for (const auto& adapter : used_) {
    if (const Adapter::Part* part = adapter->part(linear)) most = std::max(most, part->values);
  }
  if (most == 0) return nullptr;
  Assignment& assigned = rows.turn < 0 ? tokens_ : turns_[rows.turn];
  project_blocks(worker, assigned, static_cast<int64_t>(assigned.blocks.size()), most,
                 [&](const Block&) -> const Linear& { return linear; },
                 [&](const Block& block, const float** x) { inputs(worker, block, linear.k, rows, x); });
  return assigned.rows.data();
}

bool StepAdapters::changes(const Linear& first, const Linear& last) const {
  return std::any_of(used_.begin(), used_.end(), [&](const auto& adapter) { return adapter->changes(first, last); });
}

void StepAdapters::add_expert(const ExpertRows& rows) {
  const int expert = static_cast<int>(experts_.size());
  experts_.push_back(rows);
  mixture_.rows.resize(rows.begin + rows.count);
  for (const auto& adapter : used_) {
    const Adapter::Part *up = adapter->part(*rows.up), *down = adapter->part(*rows.down);
    if (!up && !down) continue;
    if (up) most_up_ = std::max(most_up_, up->values);
    if (down) most_down_ = std::max(most_down_, down->values);
    Block* block = nullptr;
    for (int i = 0; i < rows.count; ++i) {
      if (of_token_[rows.tokens ? rows.tokens[i] : i] != adapter.get()) continue;
      if (!block || block->count == kBlockRows) {
        block = &mixture_.blocks.emplace_back();
        block->adapter = adapter.get();
        block->expert = expert;
      }
      block->rows[block->count++] = rows.begin + i;
    }
  }
}

// A late worker does not know the rows yet.
const LowRankRow* StepAdapters::project_up(Worker& worker, const float* x, size_t stride) {
  const bool late = worker.is_late();
  project_blocks(worker, mixture_, late ? 0 : static_cast<int64_t>(mixture_.blocks.size()), late ? 0 : most_up_,
                 [&](const Block& block) -> const Linear& { return *experts_[block.expert].up; },
                 [&](const Block& block, const float** inputs) {
                   const ExpertRows& expert = experts_[block.expert];
                   float* scratch = reinterpret_cast<float*>(workspace_.scratch(worker));
                   for (int r = 0; r < block.count; ++r, scratch += scratch_stride_) {
                     const int row = block.rows[r] - expert.begin;
                     inputs[r] = x + (expert.tokens ? expert.tokens[row] : row) * stride;
                     if (!expert.weights) continue;
                     for (int i = 0; i < expert.up->k; ++i) scratch[i] = expert.weights[row] * inputs[r][i];
                     inputs[r] = scratch;
                   }
                 });
  return mixture_.rows.data();
}

const LowRankRow* StepAdapters::project_down(Worker& worker) {
  const bool late = worker.is_late();
  project_blocks(worker, mixture_, late ? 0 : static_cast<int64_t>(mixture_.blocks.size()), late ? 0 : most_down_,
                 [&](const Block& block) -> const Linear& { return *experts_[block.expert].down; },
                 [&](const Block& block, const float** inputs) {
                   const ExpertRows& expert = experts_[block.expert];
                   for (int r = 0; r < block.count; ++r) {
                     inputs[r] = expert.activated + (block.rows[r] - expert.begin) * expert.stride;
                   }
                 });
  return mixture_.rows.data();
}

template <typename LinearOf, typename InputsOf>
void StepAdapters::project_blocks(Worker& worker, Assignment& assigned, int64_t count, int most, LinearOf&& linear_of,
                                  InputsOf&& inputs_of) {
  most = std::max(most, 1);  // rows are told where nothing is added, too
  const int chunk = count < 2 * workers_ ? kChunk : most, chunks = (most + chunk - 1) / chunk;
  worker.share(count * chunks, 1, [&](int64_t i, int64_t) {
    const Block& block = assigned.blocks[i / chunks];
    const int first = static_cast<int>(i % chunks) * chunk;
    const Linear& linear = linear_of(block);
    const Adapter::Part* part = block.adapter->part(linear);
    if (first == 0) {
      for (int r = 0; r < block.count; ++r) {
        const int row = block.rows[r];
        assigned.rows[row] = {};
        if (part) assigned.rows[row] = {part->stripes.data(), h(row), block.adapter->type(), part->next, part->next_bytes};
      }
    }
    if (!part || first >= part->values) return;
    const float* x[kBlockRows];
    inputs_of(block, x);
    // What this worker probably takes next.
    const char* next = nullptr;
    if (const int64_t later = i + workers_; later < count * chunks) {
      const Block& other = assigned.blocks[later / chunks];
      const Linear& its = linear_of(other);
      const Adapter::Part* there = other.adapter->part(its);
      const int from = static_cast<int>(later % chunks) * chunk;
      if (there && its.k == linear.k && from < there->values) {
        next = there->a + size_t(from) * its.k * dtype_bytes(other.adapter->type());
      }
    }
    project_block(block, *part, linear.k, x, first, std::min(chunk, part->values - first), next);
  });
}

void StepAdapters::inputs(Worker& worker, const Block& block, int k, const Rows& rows, const float** x) const {
  float* const scratch = reinterpret_cast<float*>(workspace_.scratch(worker));
  for (int r = 0; r < block.count; ++r) {
    const int row = rows.gather ? rows.gather[block.rows[r]] : block.rows[r];
    x[r] = rows.x + row * rows.stride;
    if (rows.norm.kind == NormKind::kNone) continue;
    float* const normalized = scratch + r * scratch_stride_;
    std::copy_n(x[r], k, normalized);
    kernels_.normalize(rows.norm, normalized, k);
    x[r] = normalized;
  }
}

void StepAdapters::project_block(const Block& block, const Adapter::Part& part, int k, const float* const* x, int first,
                                 int count, const char* next) {
  const DType type = block.adapter->type();
  const int end = first + count;
  float values[kBlockRows][kSome];
  float* out[kBlockRows];
  for (int r = 0; r < block.count; ++r) out[r] = values[r];
  for (; first < end; first += kSome) {
    const int some = std::min(kSome, end - first);
    const char* const a = part.a + size_t(first) * k * dtype_bytes(type);
    const char* const later = first + some < end ? a + size_t(some) * k * dtype_bytes(type) : next;
    kernels_.project({x, block.count, k, a, type, some, out, later});
    for (int r = 0; r < block.count; ++r) {
      for (int j = 0; j < some; ++j) out[r][j] = part.scale[first + j] * (out[r][j] + part.one[first + j]);
      kernels_.store_low_rank(type, out[r], first, some, h(block.rows[r]));
    }
  }
  if (end < part.values) return;
  constexpr float kZeros[kLowRankValues] = {};
  for (int r = 0; r < block.count; ++r) kernels_.store_low_rank(type, kZeros, end, kLowRankValues, h(block.rows[r]));
}

void StepAdapters::own_logits(Worker& worker, const Linear& head, const Rows& rows, const Output& output) {
  const Assignment& assigned = turns_[rows.turn];
  const int pieces = (head.n + kLogits - 1) / kLogits;
  worker.share(static_cast<int64_t>(assigned.blocks.size()) * pieces, 1, [&](int64_t i, int64_t) {
    const Block& block = assigned.blocks[i / pieces];
    const char* const own = block.adapter->head();
    if (!own) return;
    const int first = static_cast<int>(i % pieces) * kLogits, count = std::min(kLogits, head.n - first);
    const float* x[kBlockRows];
    float* out[kBlockRows];
    inputs(worker, block, head.k, rows, x);
    for (int r = 0; r < block.count; ++r) out[r] = output.y + block.rows[r] * output.stride + first;
    const DType type = block.adapter->type();
    kernels_.project({x, block.count, head.k, own + size_t(first) * head.k * dtype_bytes(type), type, count, out});
    for (int r = 0; r < block.count; ++r) {
      for (int j = 0; j < count; ++j) {
        float& y = out[r][j];
        y = (y + (head.bias ? head.bias[first + j] : 0)) * output.scale;
        if (output.softcap > 0) y = output.softcap * std::tanh(y / output.softcap);
      }
    }
  });
}

}  // namespace tidewheel
