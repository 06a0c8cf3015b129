#include "model/executor.h"

#include <algorithm>

#include "model/eagle3.h"
#include "model/mtp.h"
#include "model/require.h"

namespace tidewheel {

Executor::Executor(DecoderPlan plan, const Kernels& kernels, CacheType cache_type, ExecutorShape shape,
                   std::shared_ptr<ThreadPool> pool)
    : plan_(std::move(plan)), kernels_(kernels), shape_(shape), pool_(std::move(pool)), weights_(kernels, plan_.formats, plan_.input_orders),
      workspace_(std::max(shape.max_num_batched_tokens, shape.max_num_seqs)), adapters_(kernels, workspace_), gemms_(kernels, workspace_, adapters_, capture_),
      attention_{cache_type, std::vector<std::vector<Heads>>(shape_.num_blocks.size()), {},
                 std::vector<std::vector<int>>(shape_.num_blocks.size()), {}, {}, {}},
      context_{kernels, plan_.hidden_size, weights_, workspace_, gemms_, capture_, adapters_, attention_, states_, profile_},
      sampler_(kernels, plan_.vocab_size, pool_->size()) {
  const auto& blocks = shape_.num_blocks;
  require(!blocks.empty() && *std::min_element(blocks.begin(), blocks.end()) > 0 && shape_.max_num_seqs > 0 && shape_.max_num_batched_tokens > 0,
          "blocks, sequences and batched tokens must all be at least 1");
  require(plan_.head.divisor > 0 && plan_.head.softcap >= 0, "the logits' divisor must be above 0, and their cap at least 0");
  const EmbeddingPlan& embedding = plan_.embedding;
  const int size = plan_.hidden_size, vocab = plan_.vocab_size;
  const bool embeds = plan_.embeds, has_head = plan_.has_head;
  if (embeds || (has_head && (plan_.head.tied || plan_.mtp))) weights_.add_matrix("embed.weight", embed_, vocab, embedding.size);
  if (embeds && embedding.num_positions) {
    weights_.add_matrix("embed.positions", positions_, embedding.num_positions + embedding.position_offset, size);
  }
  require(!embed_.input_order && !positions_.input_order, "a table that is looked up has its inputs in the model's order");
  if (embeds) weights_.add_norm("embed.norm", embedding_norm_, embedding.norm, size);
  if (plan_.streams) streams_.emplace(*plan_.streams, context_, embeds, has_head);
  const int width = streams_ ? streams_->width() : size;
  hidden_ = workspace_.add<float>(width);
  if (streams_) embedded_ = workspace_.add<float>(size);
  if (projects()) {
    if (embeds) weights_.add_linear("embed.project_in", project_in_, size, embedding.size, false);
    if (has_head) weights_.add_linear("embed.project_out", project_out_, embedding.size, size, false);
    projected_ = workspace_.add<float>(embedding.size);
  }
  if (const auto& per_layer = embedding.per_layer) {
    const int layers = static_cast<int>(plan_.layers.size()), per_layer_size = layers * per_layer->size;
    require(per_layer->size > 0 && per_layer->vocab_size > 0, "per-layer embeddings must have a size");
    if (embeds) {
      weights_.add_matrix("embed.per_layer", per_layer_, per_layer->vocab_size, per_layer_size);
      weights_.add_linear("embed.per_layer_projection", per_layer_projection_, per_layer_size, size, false);
      weights_.add_norm("embed.per_layer_norm", per_layer_norm_, per_layer->norm, per_layer->size);
    }
    context_.per_layer = {workspace_.add<float>(per_layer_size), layers, per_layer->size};
    workspace_.need_scratch(per_layer_size * sizeof(float));
  }
  Buffer<float> fused;  // nothing else uses this memory while the layers run
  if (plan_.eagle3) fused = workspace_.add<float>(plan_.eagle3->hidden_size);
  for (size_t i = 0; i < plan_.layers.size(); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    for (const ResidualBlockPlan& residual : plan_.layers[i]) residuals_.emplace_back(residual, prefix, context_, width);
    for (int r = last_keeping_ + 1; r < static_cast<int>(residuals_.size()); ++r) {
      if (residuals_[r].keeps()) last_keeping_ = r, last_keeping_layer_ = static_cast<int>(i);
    }
  }
  if (has_head) {
    weights_.add_norm("final_norm", final_norm_, plan_.final_norm, size);
    if (!plan_.head.tied) weights_.add_linear("head", untied_head_, vocab, embedding.size, false);
    if (plan_.head.bias) weights_.add_bias("head", plan_.head.tied ? embed_ : untied_head_);
  }

  if (plan_.mtp || plan_.eagle3) make_draft_head(fused);

  const Ownership& ownership = pool_->ownership();
  weights_.place(ownership);
  gemms_.allocate(weights_.matrices());
  adapters_.allocate(weights_.matrices(), embedding.size, shape_.max_lora_rank, pool_->size());
  workspace_.allocate(ownership);
  if (has_head) {
    logits_ = Arena(size_t(shape_.max_num_seqs) * vocab * sizeof(float));
    read_ = Arena(size_t(shape_.max_num_seqs) * width * sizeof(float));
  }
  require(states_.empty() || shape_.num_states > 0, "recurrent layers need slots for their state");
  require(shape_.max_draft_tokens >= 0, "the number of draft tokens cannot be negative");
  states_.allocate(shape_.num_states, shape_.max_draft_tokens);
  if (draft_head_) draft_head_->allocate(shape_.max_num_seqs);
  attention_.ropes.allocate(shape_.max_num_batched_tokens);
  for (size_t group = 0; group < blocks.size(); ++group) {
    attention_.caches.emplace_back(attention_.heads[group], cache_type, blocks[group], ownership);
  }
  attention_.tasks = AttentionTasks(attention_.divided, attention_.windows, shape_.max_num_batched_tokens, shape_.max_num_seqs, ownership);
  attention_.read_tasks = attention_.tasks;
}

bool Executor::use_threads(std::shared_ptr<ThreadPool> pool) {
  if (pool->ownership() != pool_->ownership()) return false;
  pool_ = std::move(pool);
  return true;
}

void Executor::make_draft_head(const Buffer<float>& fused) {
  const EmbeddingPlan& embedding = plan_.embedding;
  require(!projects() && !streams_ && !embedding.per_layer && !embedding.norm && !embedding.num_positions,
          "a layer that predicts tokens needs the embedding of tokens alone");
  const auto embed = [this](Worker& worker, const Step& step, int64_t token, float* row) {
    embed_token(worker, step, token, row);
  };
  if (plan_.mtp) {
    draft_head_ = std::make_unique<Mtp>(*plan_.mtp, context_, embed);
    return;
  }
  std::vector<int> first_residuals = {0};  // of each layer, then their number
  for (const auto& layer : plan_.layers) first_residuals.push_back(first_residuals.back() + static_cast<int>(layer.size()));
  draft_head_ = std::make_unique<Eagle3>(*plan_.eagle3, context_, plan_.vocab_size, first_residuals, fused, embed);
}

const Linear& Executor::matrix_of(const std::string& name) const {
  const std::optional<MatrixPlace> place = weights_.place_of(name);
  if (!place) fail("the model has no matrix " + name);
  return *place->linear;
}

void Executor::capture_inputs(const std::vector<std::string>& names) {
  std::vector<const Linear*> matrices;
  for (const std::string& name : names) matrices.push_back(&matrix_of(name));
  capture_.choose(matrices);
}

std::vector<float> Executor::take_inputs(const std::string& name) { return capture_.take(matrix_of(name)); }

void Executor::check(const Step& step, bool with_states) const {
  const size_t tokens = step.token_ids.size(), sequences = step.context_len.size(), rows = step.logits_rows.size();
  if (tokens == 0 || tokens > size_t(shape_.max_num_batched_tokens)) {
    fail("a step takes 1 to " + std::to_string(shape_.max_num_batched_tokens) + " tokens, got " + std::to_string(tokens));
  }
  require(step.positions.size() == tokens, "positions must have one entry for each of token_ids");
  require(step.block_tables.size() == shape_.num_blocks.size(), "every cache group needs block tables");
  require(sequences > 0 && step.query_start.size() == sequences + 1, "query_start must have one entry more than context_len");
  require(step.query_start[0] == 0 && step.query_start[sequences] == static_cast<int>(tokens),
          "query_start must run from 0 to the number of tokens");
  for (const int32_t id : step.token_ids) {
    if (id < 0 || id >= plan_.vocab_size) fail("token id " + std::to_string(id) + " is outside the vocabulary");
  }
  for (size_t s = 0; s < sequences; ++s) {
    const int begin = step.query_start[s], end = step.query_start[s + 1], context = step.context_len[s];
    require(begin < end && end <= static_cast<int>(tokens), "every sequence needs at least one token, in ascending order");
    require(context >= end - begin, "context_len is outside the model's context");
    check_room(step, static_cast<int>(s), context);
    for (int t = begin; t < end; ++t) {
      require(step.positions[t] == context - (end - t), "positions must ascend by one up to context_len - 1");
    }
  }
  require(step.rope_positions.size() % tokens == 0 &&
              (step.rope_positions.empty() || step.rope_positions.size() / tokens >= size_t(attention_.ropes.axes())),
          "rope_positions must have one row for each axis, and one entry for each of token_ids there");
  check_media(step);
  check_visible(step);
  if (with_states) states_.check(step);
  require(step.adapters.empty() || step.adapters.size() == sequences, "every sequence needs the number of an adapter, or -1");
  for (size_t r = 0; r < rows; ++r) {
    require(step.logits_rows[r] >= 0 && step.logits_rows[r] < static_cast<int>(tokens),
            "logits_rows must lie within the tokens");
  }
  sampler_.check(step.sampling, rows);
  require(plan_.has_head || rows == 0, "only the stage with the head gives logits");
}

void Executor::check_media(const Step& step) const {
  if (step.media_width == 0 && step.media_index.empty() && step.media_layers.empty()) return;
  const size_t size = plan_.hidden_size, width = step.media_width;
  require(width == size * (step.media_layers.size() + 1) && step.media_rows.size() % width == 0,
          "a row of media has a hidden size for the embedding, and for each of media_layers, whose output it changes");
  const auto is_layer = [&](int32_t layer) { return layer >= 0 && layer < static_cast<int>(plan_.layers.size()); };
  require(std::ranges::all_of(step.media_layers, is_layer), "media_layers must be numbers of layers");
  require(!streams_ || width == size, "a layer over several streams cannot have a row of media added");
  require(step.media_index.size() == step.token_ids.size(), "media_index must have one entry for each of token_ids");
  const int rows = static_cast<int>(step.media_rows.size() / width);
  for (const int32_t row : step.media_index) require(row >= -1 && row < rows, "media_index must lie within media_rows");
}

void Executor::check_visible(const Step& step) const {
  if (step.visible_until.empty()) return;
  require(step.visible_until.size() == step.token_ids.size(), "visible_until must have one entry for each of token_ids");
  for (size_t s = 0; s < step.context_len.size(); ++s) {
    int last = 0;
    for (int t = step.query_start[s]; t < step.query_start[s + 1]; ++t) {
      const int until = step.visible_until[t];
      require(until > step.positions[t] && until >= last && until <= step.context_len[s],
              "visible_until must be above the token's position, at most context_len, and not descend within a sequence");
      last = until;
    }
  }
}

void Executor::check_room(const Step& step, int sequence, int context) const {
  require(context <= plan_.max_positions, "context_len is outside the model's context");
  const int64_t blocks = (context + kBlockTokens - 1) / kBlockTokens;
  for (size_t group = 0; group < step.block_tables.size(); ++group) {
    const BlockTables& tables = step.block_tables[group];
    require(blocks <= tables.stride, "the block table is too short for context_len");
    for (int64_t b = 0; b < blocks; ++b) check_block(tables.of(sequence)[b], group);
  }
}

void Executor::step(const Step& step, const std::function<void()>& before_sampling) {
  check(step);
  const bool is_stage = !plan_.embeds || !plan_.has_head;
  require(step.rows.size() == (is_stage ? step.token_ids.size() * row_floats() : 0), "a stage needs a row for each token");
  reads_some_ = find_read_rows(step);
  if (!reads_some_) return run(step, before_sampling);
  Step reading = step;
  reading.read_rows = read_rows_;
  attention_.read_tasks.build_some(read_rows_, step.query_start, step.context_len, step.block_tables, step.visible_until);
  run(reading, before_sampling);
}

bool Executor::find_read_rows(const Step& step) {
  const auto& rows = step.logits_rows;
  if (last_keeping_ < 0 || !plan_.has_head || !capture_.empty() || rows.size() >= step.token_ids.size()) return false;
  if (draft_head_ && draft_head_->reads_behind(last_keeping_)) return false;
  const auto is_late = [&](int32_t layer) { return layer >= last_keeping_layer_; };
  if (std::ranges::any_of(step.media_layers, is_late)) return false;
  read_rows_.assign(rows.begin(), rows.end());
  std::ranges::sort(read_rows_);
  read_rows_.erase(std::unique(read_rows_.begin(), read_rows_.end()), read_rows_.end());
  if (read_rows_.size() > size_t(shape_.max_num_seqs)) return false;
  read_places_.clear();
  for (const int32_t row : rows) {
    read_places_.push_back(static_cast<int32_t>(std::ranges::lower_bound(read_rows_, row) - read_rows_.begin()));
  }
  return true;
}

void Executor::run(const Step& step, const std::function<void()>& before_sampling) {
  adapters_.begin(step.adapters, step.query_start, step.logits_rows, shape_.max_num_seqs, step.read_rows);
  attention_.tasks.build(step.query_start, step.context_len, step.block_tables, step.visible_until);
  states_.begin(step);
  if (draft_head_) draft_head_->begin(step);
  const bool pause = before_sampling && !step.logits_rows.empty();
  pool_->run([&](Worker& worker) {
    profile_.begin(worker);
    forward(worker, step);
    if (!pause) sample(worker, step);
  });
  if (!pause) return;
  before_sampling();
  pool_->run([&](Worker& worker) {
    profile_.begin(worker);
    sample(worker, step);
  });
}

void Executor::forward(Worker& worker, const Step& step) {
  if (plan_.embeds) {
    embed(worker, step);
    if (plan_.embedding.per_layer) tell_layers(worker, step);
    if (streams_) streams_->widen(worker, embedded(), static_cast<int>(step.token_ids.size()), hidden());
  } else {
    take_rows(worker, step);
  }
  profile_.end(worker, Phase::kEmbed);
  size_t i = 0;
  for (size_t layer = 0; layer < plan_.layers.size(); ++layer) {
    const size_t end = i + plan_.layers[layer].size();
    const bool is_own = i < end;
    for (; i < end; ++i) {
      if (draft_head_) draft_head_->watch(worker, step, static_cast<int>(i), hidden());
      if (!reads_some_ || static_cast<int>(i) < last_keeping_) {
        residuals_[i].run(worker, step, hidden(), hidden());
      } else if (static_cast<int>(i) == last_keeping_) {
        select_rows(worker, step);
      } else {
        const Rows rows{read(), row_width(), static_cast<int>(read_rows_.size()), nullptr, {}, Rows::kRead};
        residuals_[i].run(worker, step, rows, read());
      }
    }
    for (size_t part = 0; is_own && part < step.media_layers.size(); ++part) {
      if (step.media_layers[part] == static_cast<int>(layer)) take_media(worker, step, part + 1);
    }
  }
  if (draft_head_) {
    draft_head_->watch(worker, step, static_cast<int>(residuals_.size()), hidden());
    draft_head_->remember(worker, step, hidden(), final_norm_);
  }
  if (!plan_.has_head) give_rows(worker, step);
  if (!step.logits_rows.empty()) logits(worker, step, 0);
}

void Executor::select_rows(Worker& worker, const Step& step) {
  const ResidualBlock& block = residuals_[last_keeping_];
  const size_t width = row_width();
  const Rows rows{hidden(), width, static_cast<int>(step.token_ids.size()), nullptr, {}, Rows::kTokens, block.selects()};
  if (!block.selects()) block.run(worker, step, rows, hidden());
  worker.share(static_cast<int64_t>(read_rows_.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) std::copy_n(hidden() + read_rows_[row] * width, width, read() + row * width);
  });
  if (block.selects()) block.run(worker, step, rows, read());
}

void Executor::predict(const Step& step, std::span<const int> from) {
  require(predicts(), "this model has no layer that predicts tokens");
  const size_t tokens = step.token_ids.size();
  require(tokens == step.context_len.size() && tokens == step.logits_rows.size() && tokens <= size_t(shape_.max_num_seqs),
          "a prediction takes exactly one token of each sequence, of at most max_num_seqs sequences");
  check(step, false);
  adapters_.begin(step.adapters, step.query_start, step.logits_rows, shape_.max_num_seqs);
  attention_.tasks.build(step.query_start, step.context_len, step.block_tables, {}, draft_head_->takes_prefixes());
  draft_head_->begin_prediction(step, from);
  pool_->run([&](Worker& worker) {
    profile_.begin(worker);
    const Rows rows = draft_head_->predict(worker, step);
    draft_head_->has_head() ? draft_head_->head(worker, rows, logits_row(0)) : head(worker, rows);
    sample(worker, step);
  });
}

void Executor::take_rows(Worker& worker, const Step& step) {
  const size_t width = row_width(), per_layer_size = per_layer_width();
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = step.rows.data() + t * row_floats();
      std::copy_n(row, width, hidden() + t * width);
      if (per_layer_size) std::copy_n(row + width, per_layer_size, workspace_.rows(context_.per_layer.rows) + t * per_layer_size);
      const Adapter* const adapter = adapters_.of_token(t);
      attention_.ropes.compute(step, static_cast<int>(t), adapter ? adapter->rope_factor() : 1);
    }
  });
}

void Executor::give_rows(Worker& worker, const Step& step) {
  const size_t width = row_width(), per_layer_size = plan_.embeds ? per_layer_width() : 0;  // later stages get rows
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = step.rows.data() + t * row_floats();
      std::copy_n(hidden() + t * width, width, row);
      if (per_layer_size) std::copy_n(workspace_.rows(context_.per_layer.rows) + t * per_layer_size, per_layer_size, row + width);
    }
  });
}

void Executor::look_up(const Linear& linear, int row, float* out) const {
  const Linear::Slice& slice = linear.slice_of(row);
  kernels_.unpack_row(linear.format, slice.weight, linear.k, row - slice.panels.begin * kPanel, out);
}

void Executor::embed_token(const Worker& worker, const Step& step, int64_t token, float* row) const {
  const EmbeddingPlan& embedding = plan_.embedding;
  const int id = step.token_ids[token];
  const Adapter* const adapter = adapters_.of_token(token);
  if (!adapter || !adapter->look_up(id, row)) look_up(embed_, id, row);
  if (adapter) adapter->add_embedding(kernels_, id, row, reinterpret_cast<float*>(workspace_.scratch(worker)));
  if (embedding.scale != 1) std::transform(row, row + embedding.size, row, [&](float x) { return x * embedding.scale; });
}

void Executor::embed(Worker& worker, const Step& step) {
  const int tokens = static_cast<int>(step.token_ids.size());
  const EmbeddingPlan& embedding = plan_.embedding;
  float* rows = projects() ? workspace_.rows(projected_) : embedded();
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Adapter* const adapter = adapters_.of_token(t);
      embed_token(worker, step, t, rows + t * embedding.size);
      attention_.ropes.compute(step, static_cast<int>(t), adapter ? adapter->rope_factor() : 1);
    }
  });
  const size_t size = plan_.hidden_size;
  if (projects()) {
    gemms_.run(worker, project_in_, {rows, size_t(embedding.size), tokens}, {Epilogue::kStore, embedded(), size});
  }
  if (embedding.num_positions) {
    worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
      float* learned = reinterpret_cast<float*>(workspace_.scratch(worker));
      for (int64_t t = begin; t < end; ++t) {
        look_up(positions_, step.positions[t] + embedding.position_offset, learned);
        for (size_t i = 0; i < size; ++i) embedded()[t * size + i] += learned[i];
      }
    });
  }
  if (embedding.norm) {
    worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) kernels_.normalize(embedding_norm_, embedded() + t * size, plan_.hidden_size);
    });
  }
  if (!step.media_index.empty()) take_media(worker, step, 0);
}

void Executor::take_media(Worker& worker, const Step& step, size_t part) {
  const size_t size = plan_.hidden_size;
  float* const rows = part == 0 ? embedded() : hidden();
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (step.media_index[t] < 0) continue;
      const float* from = step.media_rows.data() + step.media_index[t] * step.media_width + part * size;
      float* to = rows + t * size;
      if (part == 0) {
        std::copy_n(from, size, to);
      } else {
        for (size_t h = 0; h < size; ++h) to[h] += from[h];
      }
    }
  });
}

void Executor::tell_layers(Worker& worker, const Step& step) {
  const PerLayerEmbeddingPlan& plan = *plan_.embedding.per_layer;
  const Buffer<float>& buffer = context_.per_layer.rows;
  float* per_layer_values = workspace_.rows(buffer);
  const int tokens = static_cast<int>(step.token_ids.size()), width = context_.per_layer.layers * plan.size;
  const Output output{Epilogue::kStore, per_layer_values, buffer.stride, plan.projection_scale};
  gemms_.run(worker, per_layer_projection_, {embedded(), size_t(plan_.hidden_size), tokens}, output);
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    float* own = reinterpret_cast<float*>(workspace_.scratch(worker));
    for (int64_t t = begin; t < end; ++t) {
      float* row = per_layer_values + t * buffer.stride;
      const bool has_row = step.token_ids[t] < plan.vocab_size && (step.media_index.empty() || step.media_index[t] < 0);
      look_up(per_layer_, has_row ? step.token_ids[t] : 0, own);
      for (int i = 0; i < width; i += plan.size) kernels_.normalize(per_layer_norm_, row + i, plan.size);
      for (int i = 0; i < width; ++i) row[i] = (row[i] + own[i] * plan.scale) * plan.sum_scale;
    }
  });
}

void Executor::logits(Worker& worker, const Step& step, size_t first) {
  const int rows = static_cast<int>(std::min<size_t>(shape_.max_num_seqs, step.logits_rows.size() - first));
  const int turn = static_cast<int>(first / shape_.max_num_seqs);
  Rows last{hidden(), size_t(plan_.hidden_size), rows, step.logits_rows.data() + first, final_norm_, turn};
  if (reads_some_) last.x = read(), last.gather = read_places_.data() + first;
  if (streams_) {
    streams_->narrow(worker, last.x, last.gather, rows, embedded());
    last.x = embedded(), last.gather = nullptr;
  }
  if (projects()) {
    float* projected = workspace_.rows(projected_);
    const size_t size = plan_.embedding.size;
    gemms_.run(worker, project_out_, last, {Epilogue::kStore, projected, size});
    last = {projected, size, rows, nullptr, {}, turn};
  }
  head(worker, last);
}

void Executor::head(Worker& worker, const Rows& rows) {
  Output output{Epilogue::kStore, logits_row(0), size_t(plan_.vocab_size)};
  output.scale = 1 / plan_.head.divisor;
  output.softcap = plan_.head.softcap;
  const Linear& head = plan_.head.tied ? embed_ : untied_head_;
  const int own = adapters_.rows_with_own_head(rows.turn);
  if (own < rows.count) gemms_.run(worker, head, rows, output);
  if (own > 0) adapters_.own_logits(worker, head, rows, output);
  profile_.end(worker, Phase::kHead);
}

void Executor::sample(Worker& worker, const Step& step) {
  const size_t rows = step.logits_rows.size(), room = shape_.max_num_seqs;
  for (size_t first = 0; first < rows; first += room) {
    if (first > 0) logits(worker, step, first);
    worker.share(static_cast<int64_t>(std::min(room, rows - first)), 1, [&](int64_t i, int64_t) {
      const float* logits = logits_row(i);
      const size_t row = first + i;
      sampler_.sample(step.sampling, row, logits, worker.index());
      if (step.out_logits) std::copy(logits, logits + plan_.vocab_size, step.out_logits + row * plan_.vocab_size);
    });
    profile_.end(worker, Phase::kSample);
  }
}

std::shared_ptr<const Adapter> Executor::pack_adapter(DType type, AdapterContent content) const {
  for (LowRankUpdate& update : content.updates) {
    if (plan_.head.tied && update.name == "head.weight") update.name = "embed.weight";  // its product is computed there
  }
  return std::make_shared<const Adapter>(weights_, type, content, adapters_.values_limit());
}

void Executor::check_block(int block, size_t group) const {
  if (block < 0 || block >= shape_.num_blocks[group]) fail("block " + std::to_string(block) + " is outside the cache");
}

void Executor::release_scratch() {
  workspace_.forget();
  gemms_.forget();
  logits_.forget();
  read_.forget();
}

void Executor::copy_states(std::span<const int32_t> pairs) {
  require(!states_.empty(), "this model has no recurrent state");
  for (const int32_t slot : pairs) states_.check_slot(slot);
  states_.copy(*pool_, pairs);
}

size_t Executor::cache_bytes() const {
  size_t total = states_.bytes();
  for (const KvCache& cache : attention_.caches) total += cache.bytes();
  return total;
}

void Executor::copy_blocks(std::span<const int32_t> pairs, int group) {
  require(group >= 0 && size_t(group) < shape_.num_blocks.size(), "there is no such cache group");
  for (const int32_t block : pairs) check_block(block, group);
  if (draft_head_) draft_head_->copy_blocks(pairs);
  pool_->run([&](Worker& worker) {
    worker.share_in_group(static_cast<int64_t>(pairs.size() / 2), 1, [&](int64_t i, int64_t) {
      attention_.caches[group].copy_block(worker.group(), pairs[2 * i], pairs[2 * i + 1]);
    });
  });
}

void Executor::check_whole_blocks(std::span<const int32_t> blocks, size_t num_bytes) const {
  for (const int32_t block : blocks) check_block(block, 0);
  require(num_bytes == blocks.size() * cache().whole_block_bytes(), "the number of bytes must match the blocks");
}

void Executor::read_blocks(std::span<const int32_t> blocks, std::span<char> to) {
  check_whole_blocks(blocks, to.size());
  const KvCache& whole = cache();
  pool_->run([&](Worker& worker) {
    worker.share_in_group(static_cast<int64_t>(blocks.size()), 1, [&](int64_t i, int64_t) {
      whole.read_block(worker.group(), blocks[i], to.data() + i * whole.whole_block_bytes());
    });
  });
}

void Executor::write_blocks(std::span<const int32_t> blocks, std::span<const char> from) {
  check_whole_blocks(blocks, from.size());
  const KvCache& whole = cache();
  pool_->run([&](Worker& worker) {
    worker.share_in_group(static_cast<int64_t>(blocks.size()), 1, [&](int64_t i, int64_t) {
      whole.write_block(worker.group(), blocks[i], from.data() + i * whole.whole_block_bytes());
    });
  });
}

}  // namespace tidewheel
