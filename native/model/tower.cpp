#include "model/tower.h"

#include <algorithm>

#include "model/require.h"

namespace tidewheel {
namespace {

// Otherwise results are added before they could be clipped.
constexpr const char* kNoPostNorm = "behind clipped linear layers there must be a norm";

int blocks_of(int rows) { return (rows + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

Tower::Tower(TowerPlan plan, const Kernels& kernels, CacheType cache_type, TowerShape shape, std::shared_ptr<ThreadPool> pool)
    : plan_(std::move(plan)), kernels_(kernels), shape_(shape), num_blocks_(blocks_of(std::max(shape.max_rows, shape.piece_rows))),
      pool_(std::move(pool)), weights_(kernels, plan_.formats, plan_.input_orders),
      workspace_(std::max(shape.piece_rows, 0)), adapters_(kernels, workspace_), gemms_(kernels, workspace_, adapters_, capture_),
      attention_{cache_type, std::vector<std::vector<Heads>>(1), {}, std::vector<std::vector<int>>(1), {}, {}, {}, {}, true},
      context_{kernels, plan_.hidden_size, weights_, workspace_, gemms_, capture_, adapters_, attention_, states_, profile_} {
  require(shape.max_rows > 0 && shape.piece_rows > 0 && plan_.hidden_size > 0, "rows and their size must be at least 1");
  // Projections and layers never run together, so they use the same memory.
  for (const auto& [name, projection] : plan_.projections) add_projection(name, projection);
  for (size_t i = 0; i < plan_.layers.size(); ++i) add_layer(plan_.layers[i], "layers." + std::to_string(i) + ".");
  for (const auto& [name, attention] : plan_.cross_attentions) add_cross_attention(name, attention);

  const Ownership& ownership = pool_->ownership();
  weights_.place(ownership);
  gemms_.allocate(weights_.matrices());
  adapters_.allocate(weights_.matrices(), 0, shape.max_lora_rank, pool_->size());
  workspace_.allocate(ownership);
  attention_.ropes.allocate(shape.piece_rows);
  attention_.caches.emplace_back(attention_.heads[0], cache_type, num_blocks_, ownership);
  const size_t most_rows = std::max(shape.max_rows, shape.piece_rows);
  attention_.queries = Arena(most_rows * attention_.query_bytes);
  attention_.positions = Arena((most_rows + kBlockTokens) * attention_.position_floats * sizeof(float));
  attention_.tasks = AttentionTasks(attention_.divided, attention_.windows, shape.piece_rows, shape.piece_rows, ownership);
  attention_.read_tasks = attention_.tasks;
  read_ = Arena(size_t(shape.piece_rows) * plan_.hidden_size * sizeof(float));
}

bool Tower::use_threads(std::shared_ptr<ThreadPool> pool) {
  if (pool->ownership() != pool_->ownership()) return false;
  pool_ = std::move(pool);
  return true;
}

void Tower::add_projection(const std::string& name, const ProjectionPlan& plan) {
  require(plan.inputs > 0 && plan.outputs > 0, "a projection has inputs and outputs");
  Projection& projection = projections_[name];
  projection.plan = plan;
  weights_.add_linear(name, projection.linear, plan.outputs, plan.inputs, plan.bias);
  weights_.add_norm(name + ".norm", projection.norm, plan.norm, plan.inputs);
  const Workspace::Turn turn(workspace_);
  projection.input = workspace_.add<float>(plan.inputs);
  projection.output = workspace_.add<float>(round_up(plan.outputs, kPanel));
}

void Tower::add_layer(const std::vector<ResidualBlockPlan>& layer, const std::string& prefix) {
  std::deque<ResidualBlock>& residuals = layers_.emplace_back();
  reaches_.push_back(0);
  for (const ResidualBlockPlan& residual : layer) {
    if (const ParallelPlan* parallel = std::get_if<ParallelPlan>(&residual.mixer)) {
      for (const ResidualBlockPlan& part : parallel->residuals) add_part(part, residuals.empty() && &part == &parallel->residuals.front());
    } else {
      add_part(residual, residuals.empty());
    }
    residuals.emplace_back(residual, prefix, context_);
  }
}

void Tower::add_part(const ResidualBlockPlan& residual, bool is_first) {
  if (const AttentionPlan* attention = std::get_if<AttentionPlan>(&residual.mixer)) {
    require(is_first, "attention must be the first part of a tower's layer");
    require(!attention->clipped || residual.post_norm, kNoPostNorm);
    require(attention->cache_group == 0 && attention->sliding_window >= 0 && attention->shared_layer < 0 && !attention->output_gate,
            "attention in a tower has neither another layer's K and V nor an output gate");
    reaches_.back() = attention->two_way ? attention->sliding_window : 1;
  } else if (const MlpPlan* mlp = std::get_if<MlpPlan>(&residual.mixer)) {
    require(!mlp->clipped || residual.post_norm, kNoPostNorm);
  } else {
    require(std::holds_alternative<ExpertsPlan>(residual.mixer), "a tower's layers have only attention, MLPs and experts");
  }
}

void Tower::add_cross_attention(const std::string& name, const CrossAttentionPlan& plan) {
  AttentionPlan attention;
  attention.num_heads = attention.num_kv_heads = plan.num_heads, attention.head_dim = plan.head_dim;
  attention.scale = plan.scale, attention.two_way = attention.projected = true;
  const Workspace::Turn turn(workspace_);
  cross_attentions_[name] = {attention.q_size(), std::make_unique<Attention>(attention, name + ".", context_)};
}

std::pair<const Tower::CrossAttention&, int> Tower::cross_attention(const std::string& name, int length, size_t num_floats) const {
  const auto found = cross_attentions_.find(name);
  if (found == cross_attentions_.end()) fail("the tower has no cross attention " + name);
  const size_t width = 3 * size_t(found->second.width), rows = num_floats / width;
  require(length > 0 && length <= shape_.max_rows && rows > 0 && rows <= size_t(shape_.piece_rows) && rows * width == num_floats,
          "cross attention takes rows of q, k and v, at most a piece of them, and keys for which there is room");
  return {found->second, static_cast<int>(rows)};
}

void Tower::remember_keys(const std::string& name, int length, int first, std::span<const float> rows) {
  const auto [cross, count] = cross_attention(name, length, rows.size());
  require(first >= 0 && first <= length - count, "the rows of a piece must be among all rows");
  const int32_t query_start[] = {0, count}, lengths[] = {length};
  const Step step = step_of({query_start, lengths, first, {}}, count, 0);
  pool_->run([&](Worker& worker) {
    cross.attention->remember(worker, step, {rows.data(), 3 * size_t(cross.width), count});
  });
}

void Tower::attend(const std::string& name, int length, std::span<const float> rows, std::span<float> out) {
  const auto [cross, count] = cross_attention(name, length, rows.size());
  require(out.size() == size_t(count) * cross.width, "attention gives as many rows as there are queries");
  const int32_t query_start[] = {0, count}, lengths[] = {length};
  Step step = step_of({query_start, lengths, 0, {}}, count, 0);
  step.only_queries = true;
  pool_->run([&](Worker& worker) {
    cross.attention->run(worker, step, {rows.data(), 3 * size_t(cross.width), count},
                         {Epilogue::kStore, out.data(), size_t(cross.width)});
  });
}

void Tower::project(const std::string& name, std::span<const float> rows, std::span<float> out) {
  const auto found = projections_.find(name);
  if (found == projections_.end()) fail("the tower has no projection " + name);
  const Projection& projection = found->second;
  const size_t inputs = projection.plan.inputs, outputs = projection.plan.outputs, count = rows.size() / inputs;
  require(count > 0 && count <= size_t(shape_.piece_rows) && rows.size() == count * inputs && out.size() == count * outputs,
          "a projection takes rows of its inputs, at most a piece of them, and gives as many rows of its outputs");
  adapters_.begin({}, {}, {}, 1);
  float* const input = workspace_.rows(projection.input);
  float* const output = workspace_.rows(projection.output);
  const auto copy = [&](Worker& worker, const float* from, size_t from_stride, float* to, size_t to_stride, size_t size) {
    worker.share(static_cast<int64_t>(count), 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) std::copy_n(from + row * from_stride, size, to + row * to_stride);
    });
  };
  const Epilogue epilogue = projection.plan.activates ? Epilogue::kActivation : Epilogue::kStore;
  pool_->run([&](Worker& worker) {
    copy(worker, rows.data(), inputs, input, projection.input.stride, inputs);
    gemms_.run(worker, projection.linear, {input, projection.input.stride, static_cast<int>(count), nullptr, projection.norm},
               {epilogue, output, projection.output.stride, 1, projection.plan.activation});
    copy(worker, output, projection.output.stride, out.data(), outputs, outputs);
  });
}

size_t Tower::check(int layer, const TowerPiece& piece, size_t num_floats, bool whole) const {
  require(layer >= 0 && size_t(layer) < layers_.size(), "there is no such layer");
  const size_t hidden = plan_.hidden_size, rows = num_floats / hidden, segments = piece.lengths.size();
  require(rows > 0 && rows <= size_t(shape_.piece_rows) && rows * hidden == num_floats,
          "a layer takes rows of the hidden size, at most a piece of them");
  require(segments > 0 && piece.query_start.size() == segments + 1 && piece.query_start[0] == 0 &&
              piece.query_start[segments] == static_cast<int>(rows),
          "segments must begin with 0 and end with the number of rows");
  require(piece.seen.empty() || piece.seen.size() == segments, "there must be a number of seen rows for each segment");
  require(piece.first >= 0 && (whole ? piece.first == 0 : segments == 1), "only a segment alone can be in several pieces");
  int64_t blocks = 0;
  for (size_t s = 0; s < segments; ++s) {
    const int64_t count = int64_t{piece.query_start[s + 1]} - piece.query_start[s], length = piece.lengths[s];
    require(count > 0 && piece.first + count <= length && (!whole || count == length) && length <= shape_.max_rows,
            "segments must have rows, in ascending order, and not more of them than there is room for");
    blocks += blocks_of(static_cast<int>(length));
    const int64_t unseen = piece.seen.empty() ? 0 : length - piece.seen[s];
    require(unseen >= 0 && unseen < length, "of each segment, a row or more must be seen, and not more than it has");
    for (const int reach : reaches_) require(reach == 0 || unseen < reach, "no more rows of a segment may be unseen than a row sees ahead");
  }
  require(blocks <= num_blocks_, "the segments take more blocks than there are");
  require(piece.adapters.empty() || piece.adapters.size() == segments, "every segment needs the number of an adapter, or -1");
  for (size_t i = 0; i < piece.read.size(); ++i) {
    require(piece.read[i] >= (i ? piece.read[i - 1] + 1 : 0) && size_t(piece.read[i]) < rows,
            "rows that are read must lie within the piece, in ascending order");
  }
  const size_t positions = piece.rope_positions.size(), axes = attention_.ropes.axes();
  require(positions % rows == 0 && (positions == 0 || positions / rows >= axes), "rope needs positions on each of its axes, one for each row");
  return rows;
}

Step Tower::step_of(const TowerPiece& piece, size_t num_rows, int reach) {
  const size_t segments = piece.lengths.size();
  const int stride = blocks_of(*std::max_element(piece.lengths.begin(), piece.lengths.end()));
  adapters_.begin(piece.adapters, piece.query_start, {}, 1, piece.read);
  token_ids_.assign(num_rows, 0);
  positions_.resize(num_rows), visible_until_.resize(num_rows);
  block_tables_.assign(segments * stride, 0);
  int block = 0;
  for (size_t s = 0; s < segments; ++s) {
    const int seen = piece.seen.empty() ? piece.lengths[s] : piece.seen[s];
    for (int row = piece.query_start[s]; row < piece.query_start[s + 1]; ++row) {
      const int position = piece.first + row - piece.query_start[s];
      positions_[row] = position;
      visible_until_[row] = reach && reach < seen - position ? position + reach : seen;
    }
    for (int b = 0; b < blocks_of(piece.lengths[s]); ++b) block_tables_[s * stride + b] = block++;
  }
  Step step;
  step.token_ids = token_ids_, step.positions = positions_;
  step.query_start = piece.query_start, step.context_len = piece.lengths;
  step.block_tables.push_back({block_tables_.data(), stride});
  step.rope_positions = piece.rope_positions, step.visible_until = visible_until_;
  step.first_query = piece.first;
  attention_.tasks.build(step.query_start, step.context_len, step.block_tables, step.visible_until, false);
  return step;
}

void Tower::compute_ropes(Worker& worker, const Step& step) const {
  if (attention_.ropes.empty()) return;
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) attention_.ropes.compute(step, static_cast<int>(row));
  });
}

void Tower::run_blocks(int layer, int end, const Step& step, float* rows) {
  pool_->run([&](Worker& worker) {
    if (!step.remembered) compute_ropes(worker, step);  // otherwise queries and keys are rotated already
    for (int i = layer; i < end; ++i) {
      if (i + 1 == end && !step.read_rows.empty()) {
        run_read(worker, i, step, rows);
      } else {
        for (const ResidualBlock& residual : layers_[i]) residual.run(worker, step, rows, rows);
      }
    }
  });
}

void Tower::run_read(Worker& worker, int layer, const Step& step, float* rows) {
  const size_t size = plan_.hidden_size;
  const int tokens = static_cast<int>(step.token_ids.size()), count = static_cast<int>(step.read_rows.size());
  float* const read = reinterpret_cast<float*>(read_.data());
  const auto each = [&](auto&& body) {
    worker.share(count, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(rows + step.read_rows[row] * size, read + row * size);
    });
  };
  each([&](const float* of_piece, float* of_read) { std::copy_n(of_piece, size, of_read); });
  for (const ResidualBlock& residual : layers_[layer]) {
    if (residual.keeps()) {  // the first, if any
      residual.run(worker, step, {rows, size, tokens, nullptr, {}, Rows::kTokens, true}, read);
    } else {
      residual.run(worker, step, {read, size, count, nullptr, {}, Rows::kRead}, read);
    }
  }
  each([&](float* of_piece, const float* of_read) { std::copy_n(of_read, size, of_piece); });
}

void Tower::run(int layer, int end, const TowerPiece& piece, std::span<float> rows) {
  const size_t count = check(layer, piece, rows.size(), true);
  require(end > layer && size_t(end) <= layers_.size(), "there are no such layers");
  // A step is for one reach.
  for (int next; layer < end; layer = next) {
    next = static_cast<int>(std::find_if(reaches_.begin() + layer, reaches_.begin() + end,
                                         [&](int reach) { return reach != reaches_[layer]; }) - reaches_.begin());
    Step step = step_of(piece, count, reaches_[layer]);
    if (next == end && !piece.read.empty()) {
      step.read_rows = piece.read;
      attention_.read_tasks.build_some(piece.read, step.query_start, step.context_len, step.block_tables, step.visible_until);
    }
    run_blocks(layer, next, step, rows.data());
  }
}

void Tower::remember(int layer, const TowerPiece& piece, std::span<const float> rows) {
  const size_t count = check(layer, piece, rows.size(), false);
  const Step step = step_of(piece, count, reaches_[layer]);
  if (layers_[layer].empty()) return;
  pool_->run([&](Worker& worker) {
    compute_ropes(worker, step);
    layers_[layer].front().remember(worker, step, rows.data());
  });
}

void Tower::finish(int layer, const TowerPiece& piece, std::span<float> rows) {
  const size_t count = check(layer, piece, rows.size(), false);
  Step step = step_of(piece, count, reaches_[layer]);
  step.remembered = true;
  run_blocks(layer, layer + 1, step, rows.data());
}

void Tower::release_scratch() {
  workspace_.forget();
  gemms_.forget();
  attention_.queries.forget();
  attention_.positions.forget();
  read_.forget();
  attention_.caches[0].forget();
}

size_t Tower::scratch_bytes() const {
  return workspace_.bytes() + gemms_.bytes() + attention_.queries.bytes() + attention_.positions.bytes() +
         attention_.caches[0].bytes() + read_.bytes();
}

}  // namespace tidewheel
