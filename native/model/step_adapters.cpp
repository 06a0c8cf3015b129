#include "model/step_adapters.h"

#include <algorithm>
#include <cmath>

#include "model/gemms.h"
#include "model/require.h"

namespace tidewheel {
namespace {

// The maximum of LoRA panels of h that are computed before their values are scaled.
constexpr int kSome = 4;

// Logits that a worker computes at a time with an adapter's own head.
constexpr int kLogits = 256;
static_assert(kLogits % kLoraPanel == 0);

}  // namespace

void StepAdapters::allocate(const std::map<const Linear*, std::string>& matrices, int embedding_size, int max_rank, int workers) {
  if (max_rank == 0) return;
  int max_tensors = 0, max_inputs = 0;
  for (const auto& [linear, name] : matrices) {
    max_tensors = std::max(max_tensors, linear->tensors);
    max_inputs = std::max(max_inputs, linear->k);
  }
  workers_ = workers;
  max_values_ = max_tensors * (max_rank + 2);  // with a bias and a shift
  stride_ = Adapter::packed_row_floats(max_values_);
  scratch_stride_ = Adapter::packed_row_floats(max_inputs);
  const size_t max_rows = workspace_.rows() * rows_per_token_;
  values_ = Arena(max_rows * stride_ * sizeof(float));
  if (max_experts_ > 0) {
    experts_.reserve(max_experts_);
    mixture_.blocks.reserve(max_rows);
    mixture_.rows.reserve(max_rows);
  }
  workspace_.need_scratch((kBlockRows + 1) * scratch_stride_ * sizeof(float));
  workspace_.need_scratch(Adapter::embedding_scratch(embedding_size, max_values_) * sizeof(float));
}

void StepAdapters::set(int number, std::shared_ptr<const Adapter> adapter) {
  require(max_values_ > 0, "this executor was made without adapters");
  const std::lock_guard lock(mutex_);
  if (adapter) {
    adapters_[number] = std::move(adapter);
  } else {
    adapters_.erase(number);
  }
}

void StepAdapters::begin(std::span<const int32_t> numbers, std::span<const int32_t> query_start,
                         std::span<const int32_t> logits_rows, size_t room, std::span<const int32_t> read_rows) {
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
  of_read_.clear();
  for (const int32_t row : read_rows) of_read_.push_back(of_token_[row]);
  assign(of_read_, read_);
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

StepAdapters::Projection StepAdapters::projection(const Linear& linear, const Rows& rows) {
  int most = 0;
  for (const auto& adapter : used_) {
    if (const Adapter::Part* part = adapter->part(linear)) most = std::max(most, part->values);
  }
  if (most == 0) return {};
  Assignment& assigned = rows.turn == Rows::kTokens ? tokens_ : rows.turn == Rows::kRead ? read_ : turns_[rows.turn];
  return projection(assigned, most);
}

StepAdapters::Projection StepAdapters::projection(Assignment& assigned, int max_values) const {
  const int lora_panels = (max_values + kLoraPanel - 1) / kLoraPanel;
  const auto blocks = static_cast<int64_t>(assigned.blocks.size());
  // With few rows, use small pieces, so that all workers have something to do.
  const int chunk = blocks < 2 * workers_ ? 1 : lora_panels, chunks = (lora_panels + chunk - 1) / chunk;
  return {assigned.rows.data(), blocks * chunks, &assigned, chunk, chunks};
}

void StepAdapters::project(Worker& worker, const Projection& projection, int64_t piece, const Linear& linear, const Rows& rows) {
  project_piece(projection, piece, linear, [&](const Block& block, const void** packed) {
    pack_rows(worker, block, linear.k, rows, packed);
  });
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
    if (up) max_up_ = std::max(max_up_, up->values);
    if (down) max_down_ = std::max(max_down_, down->values);
    Block* block = nullptr;
    for (int i = 0; i < rows.count; ++i) {
      if ((*of_mixture_)[rows.tokens ? rows.tokens[i] : i] != adapter.get()) continue;
      if (!block || block->count == kBlockRows) {
        block = &mixture_.blocks.emplace_back();
        block->adapter = adapter.get();
        block->expert = expert;
      }
      block->rows[block->count++] = rows.begin + i;
    }
  }
}

const LowRankRow* StepAdapters::project_up(Worker& worker, const float* x, size_t stride) {
  return project_mixture(
      worker, max_up_, [](const ExpertRows& expert) -> const Linear& { return *expert.up; },
      [&](const ExpertRows& expert, int row) {
        const float* const its = x + (expert.tokens ? expert.tokens[row] : row) * stride;
        if (!expert.weights) return its;
        float* const weighted = row_scratch(worker);
        for (int i = 0; i < expert.up->k; ++i) weighted[i] = expert.weights[row] * its[i];
        return static_cast<const float*>(weighted);
      });
}

const LowRankRow* StepAdapters::project_down(Worker& worker) {
  return project_mixture(
      worker, max_down_, [](const ExpertRows& expert) -> const Linear& { return *expert.down; },
      [](const ExpertRows& expert, int row) { return expert.activated + row * expert.stride; });
}

template <typename LinearOf, typename RowOf>
const LowRankRow* StepAdapters::project_mixture(Worker& worker, int max_values, LinearOf&& linear_of, RowOf&& row_of) {
  // A late worker does not know the rows yet. On the others, rows to which nothing is added must be set too.
  const Projection all = worker.is_late() ? Projection{} : projection(mixture_, std::max(max_values, 1));
  worker.share(all.pieces, 1, [&](int64_t piece, int64_t) {
    const ExpertRows& expert = experts_[mixture_.blocks[piece / all.chunks].expert];
    const Linear& linear = linear_of(expert);
    project_piece(all, piece, linear, [&](const Block& block, const void** packed) {
      for (int r = 0; r < block.count; ++r) {
        packed[r] = pack_row(worker, block, r, row_of(expert, block.rows[r] - expert.begin), linear.k);
      }
    });
  });
  return mixture_.rows.data();
}

template <typename Pack>
void StepAdapters::project_piece(const Projection& projection, int64_t piece, const Linear& linear, Pack&& pack) {
  const Block& block = projection.assigned->blocks[piece / projection.chunks];
  const int first = static_cast<int>(piece % projection.chunks) * projection.chunk;
  const Adapter::Part* part = block.adapter->part(linear);
  const DType type = block.adapter->type();
  if (first == 0) {
    for (int r = 0; r < block.count; ++r) {
      LowRankRow& row = projection.assigned->rows[block.rows[r]];
      row = part ? LowRankRow{part->lora_panels.data(), h(block.rows[r]), type, part->next, part->next_bytes} : LowRankRow{};
    }
  }
  const int end = std::min(first + projection.chunk, part ? part->value_lora_panels() : 0);
  if (first >= end) return;
  const void* x[kBlockRows];
  pack(block, x);
  float values[kBlockRows][kSome * kLoraPanel];
  float* out[kBlockRows];
  for (int r = 0; r < block.count; ++r) out[r] = values[r];
  for (int lora_panel = first; lora_panel < end; lora_panel += kSome) {
    const int some = std::min(kSome, end - lora_panel), value = lora_panel * kLoraPanel;
    kernels_.project({x, block.count, linear.k, part->a + lora_panel * lora_panel_bytes(linear.k, type), type, some, out});
    const int count = std::min(some * kLoraPanel, part->values - value);
    const int zeros = value + count == part->values ? kLoraPanelInputs : 0;
    for (int r = 0; r < block.count; ++r) {
      for (int j = 0; j < count; ++j) out[r][j] = part->scale[value + j] * (out[r][j] + part->one[value + j]);
      kernels_.pack_lora_panel_inputs(type, out[r], value, count, zeros, h(block.rows[r]));
    }
  }
}

float* StepAdapters::row_scratch(Worker& worker) const {
  return reinterpret_cast<float*>(workspace_.scratch(worker)) + kBlockRows * scratch_stride_;
}

const void* StepAdapters::pack_row(Worker& worker, const Block& block, int r, const float* x, int k) const {
  float* const packed = reinterpret_cast<float*>(workspace_.scratch(worker)) + r * scratch_stride_;
  kernels_.pack_lora_panel_inputs(block.adapter->type(), x, 0, k, kLoraPanelInputs, packed);
  return packed;
}

void StepAdapters::pack_rows(Worker& worker, const Block& block, int k, const Rows& rows, const void** packed) const {
  for (int r = 0; r < block.count; ++r) {
    const int row = rows.gather ? rows.gather[block.rows[r]] : block.rows[r];
    const float* x = rows.x + row * rows.stride;
    if (rows.norm.kind != NormKind::kNone) {
      float* const normalized = row_scratch(worker);
      std::copy_n(x, k, normalized);
      kernels_.normalize(rows.norm, normalized, k);
      x = normalized;
    }
    packed[r] = pack_row(worker, block, r, x, k);
  }
}

void StepAdapters::own_logits(Worker& worker, const Linear& head, const Rows& rows, const Output& output) {
  const Assignment& assigned = turns_[rows.turn];
  const int pieces = (head.n + kLogits - 1) / kLogits;
  worker.share(static_cast<int64_t>(assigned.blocks.size()) * pieces, 1, [&](int64_t i, int64_t) {
    const Block& block = assigned.blocks[i / pieces];
    const char* const own = block.adapter->head();
    if (!own) return;
    const int first = static_cast<int>(i % pieces) * kLogits, count = std::min(kLogits, head.n - first);
    const void* x[kBlockRows];
    float logits[kBlockRows][kLogits];
    float* out[kBlockRows];
    pack_rows(worker, block, head.k, rows, x);
    for (int r = 0; r < block.count; ++r) out[r] = logits[r];
    const DType type = block.adapter->type();
    const char* const w = own + first / kLoraPanel * lora_panel_bytes(head.k, type);
    kernels_.project({x, block.count, head.k, w, type, (count + kLoraPanel - 1) / kLoraPanel, out});
    for (int r = 0; r < block.count; ++r) {
      float* const to = output.y + block.rows[r] * output.stride + first;
      for (int j = 0; j < count; ++j) {
        const float y = (out[r][j] + (head.bias ? head.bias[first + j] : 0)) * output.scale;
        to[j] = output.softcap > 0 ? output.softcap * std::tanh(y / output.softcap) : y;
      }
    }
  });
}

}  // namespace tidewheel
