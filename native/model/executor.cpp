#include "model/executor.h"

#include <algorithm>
#include <cmath>

#include "model/require.h"

namespace tidewheel {
namespace {

// Elements of GEMM inputs that take about as long to pack as a barrier takes.
constexpr int kMostPackedAlone = 8192;

// Few rows are packed by every worker for itself, which is quicker than to meet.
int most_rows_alone(const Linear& linear) { return linear.k ? kMostPackedAlone / linear.k : 0; }

}  // namespace

Executor::Executor(ModelConfig config, const Kernels& kernels, const WeightFormats& formats, CacheType cache_type,
                   ExecutorShape shape, const std::vector<std::vector<int>>& groups)
    : config_(std::move(config)), kernels_(kernels), cache_type_(cache_type), shape_(shape), pool_(groups),
      weights_(config_, kernels, formats, pool_.ownership()), sampler_(kernels, config_.vocab_size, pool_.size()),
      attention_plan_(config_.layers, shape.max_num_batched_tokens, shape.max_num_seqs, pool_.ownership()) {
  require(shape_.num_blocks > 0 && shape_.max_num_seqs > 0 && shape_.max_num_batched_tokens > 0,
          "blocks, sequences and batched tokens must all be at least 1");
  const size_t tokens = shape_.max_num_batched_tokens, rows = shape_.max_num_seqs;
  size_t row_bytes = 0, bytes_alone = 0;
  int inputs = 0;
  const auto takes_rows = [&](const Linear& linear) {
    const size_t bytes = kernels_.row_bytes(linear.format, linear.k);
    row_bytes = std::max(row_bytes, bytes);
    bytes_alone = std::max(bytes_alone, most_rows_alone(linear) * bytes);
    inputs = std::max(inputs, linear.k);
  };
  for (const Linear* linear : {&weights_.project_in, &weights_.project_out, &weights_.head}) takes_rows(*linear);
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const LayerConfig& layer = config_.layers[i];
    require(layer.num_kv_heads > 0 && layer.num_heads % layer.num_kv_heads == 0,
            "the number of query heads must be a multiple of the number of KV heads");
    require(layer.inv_freq.size() * 2 <= size_t(layer.head_dim), "rope cannot rotate more dimensions than a head has");
    require(layer.scale > 0 && layer.softcap >= 0, "the scores' scale must be above 0, and their cap at least 0");
    require(layer.alibi_slopes.empty() || layer.alibi_slopes.size() == size_t(layer.num_heads),
            "ALiBi needs a slope for each query head");
    const Layer& w = weights_.layers[i];
    for (const Linear* linear : {&w.qkv, &w.out, &w.up, &w.down}) takes_rows(*linear);
    qkv_stride_ = std::max<size_t>(qkv_stride_, round_up(layer.qkv_size(), 16));
    query_stride_ = std::max<size_t>(query_stride_, size_t(layer.num_heads) * layer.heads().padded_dim());
    mlp_stride_ = std::max<size_t>(mlp_stride_, round_up(layer.intermediate_size, kPanel));
    // Most models rotate alike in every layer: the angles of a token are worked out once.
    const Rope rope{layer.inv_freq, layer.rope_factor};
    layer_rope_.push_back(static_cast<int>(std::find(ropes_.begin(), ropes_.end(), rope) - ropes_.begin()));
    if (layer_rope_.back() == static_cast<int>(ropes_.size())) ropes_.push_back(rope);
    angle_stride_ = std::max(angle_stride_, 2 * layer.inv_freq.size());
    scratch_stride_ = std::max(scratch_stride_, round_up(kernels_.attention_scratch_bytes(layer.heads()), 64));
  }
  row_scratch_bytes_ = round_up((inputs + kRowGroup) * sizeof(float), 64);
  // Either attention is under way, or rows are: one at a time is normalized in front of those packed alone.
  scratch_stride_ = std::max(scratch_stride_, row_scratch_bytes_ + round_up(bytes_alone, 64));
  cache_ = KvCache(config_.layers, cache_type, shape_.num_blocks, pool_.ownership());
  hidden_ = Arena(tokens * config_.hidden_size * sizeof(float));
  packed_ = Arena(std::max(tokens, rows) * row_bytes);
  if (config_.embedding_size != config_.hidden_size) {
    projected_ = Arena(std::max(tokens, rows) * config_.embedding_size * sizeof(float));
  }
  qkv_ = Arena(tokens * qkv_stride_ * sizeof(float));
  queries_ = Arena(tokens * query_stride_ * query_bytes());
  mlp_ = Arena(tokens * mlp_stride_ * sizeof(float));
  angles_ = Arena(ropes_.size() * tokens * angle_stride_ * sizeof(float));
  logits_ = Arena(rows * config_.vocab_size * sizeof(float));
  for (int group = 0; group < pool_.ownership().groups(); ++group) {
    scratch_.emplace_back(scratch_stride_ * pool_.ownership().workers(group));
  }
}

void Executor::check(const Step& step) const {
  const size_t tokens = step.token_ids.size(), sequences = step.context_len.size(), rows = step.logits_rows.size();
  if (tokens == 0 || tokens > size_t(shape_.max_num_batched_tokens)) {
    fail("a step takes 1 to " + std::to_string(shape_.max_num_batched_tokens) + " tokens, got " + std::to_string(tokens));
  }
  require(step.positions.size() == tokens, "positions must be as many as token_ids");
  require(sequences > 0 && step.query_start.size() == sequences + 1, "query_start must have one entry more than context_len");
  require(step.query_start[0] == 0 && step.query_start[sequences] == static_cast<int>(tokens),
          "query_start must run from 0 to the number of tokens");
  for (const int32_t id : step.token_ids) {
    if (id < 0 || id >= config_.vocab_size) fail("token id " + std::to_string(id) + " is outside the vocabulary");
  }
  for (size_t s = 0; s < sequences; ++s) {
    const int begin = step.query_start[s], end = step.query_start[s + 1], context = step.context_len[s];
    require(begin < end && end <= static_cast<int>(tokens), "every sequence needs at least one token, in ascending order");
    require(context <= config_.max_positions && context >= end - begin, "context_len is outside the model's context");
    const int64_t blocks = (context + kBlockTokens - 1) / kBlockTokens;
    require(blocks <= step.block_table_stride, "the block table is too short for context_len");
    for (int64_t b = 0; b < blocks; ++b) {
      const int block = step.block_tables[s * step.block_table_stride + b];
      if (block < 0 || block >= shape_.num_blocks) fail("block " + std::to_string(block) + " is outside the cache");
    }
    for (int t = begin; t < end; ++t) {
      require(step.positions[t] == context - (end - t), "positions must ascend by one up to context_len - 1");
    }
  }
  for (size_t r = 0; r < rows; ++r) {
    require(step.logits_rows[r] >= 0 && step.logits_rows[r] < static_cast<int>(tokens),
            "logits_rows must lie within the tokens");
  }
  sampler_.check(step.sampling, rows);
}

void Executor::step(const Step& step, const std::function<void()>& before_sampling) {
  check(step);
  attention_plan_.build(step.query_start, step.context_len);
  const bool pause = before_sampling && !step.logits_rows.empty();
  pool_.run([&](Worker& worker) {
    profile_.begin(worker);
    forward(worker, step);
    if (!pause) sample(worker, step);
  });
  if (!pause) return;
  before_sampling();
  pool_.run([&](Worker& worker) {
    profile_.begin(worker);
    sample(worker, step);
  });
}

void Executor::forward(Worker& worker, const Step& step) {
  const int tokens = static_cast<int>(step.token_ids.size());
  embed(worker, step);
  profile_.end(worker, Phase::kEmbed);
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    attend(worker, step, static_cast<int>(i));
    mlp(worker, tokens, static_cast<int>(i));
  }
  if (!step.logits_rows.empty()) logits(worker, step, 0);
}

void Executor::look_up(const Linear& linear, int row, float* out) const {
  const Linear::Slice& slice = linear.slice_of(row);
  kernels_.unpack_row(linear.format, slice.weight, linear.k, row - slice.panels.begin * kPanel, out);
}

void Executor::embed(Worker& worker, const Step& step) {
  const int tokens = static_cast<int>(step.token_ids.size());
  const bool project = projected_.bytes() > 0;
  float* rows = project ? reinterpret_cast<float*>(projected_.data()) : hidden();
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      look_up(weights_.embed, step.token_ids[t], rows + t * config_.embedding_size);
      for (size_t rope = 0; rope < ropes_.size(); ++rope) {
        float* cos = angles(static_cast<int>(rope), static_cast<int>(t));
        float* sin = cos + ropes_[rope].inv_freq.size();
        for (const float frequency : ropes_[rope].inv_freq) {
          const float angle = static_cast<float>(step.positions[t]) * frequency;  // in float, as the models were trained
          *cos++ = std::cos(angle) * ropes_[rope].factor;
          *sin++ = std::sin(angle) * ropes_[rope].factor;
        }
      }
    }
  });
  const size_t size = config_.hidden_size;
  if (project) {
    gemm(worker, weights_.project_in, {rows, size_t(config_.embedding_size), tokens}, {Epilogue::kStore, hidden(), size});
  }
  if (config_.num_positions) {
    worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
      float* learned = reinterpret_cast<float*>(qkv_.data());  // free until the first layer
      for (int64_t t = begin; t < end; ++t) {
        float* row = learned + t * qkv_stride_;
        look_up(weights_.positions, step.positions[t] + config_.position_offset, row);
        for (size_t i = 0; i < size; ++i) hidden()[t * size + i] += row[i];
      }
    });
  }
}

void Executor::normalize(Worker& worker, const Norm& norm, int rows) {
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernels_.normalize(norm, hidden() + r * config_.hidden_size, config_.hidden_size);
  });
  profile_.end(worker, Phase::kNorm);
}

const char* Executor::pack_rows(Worker& worker, const Linear& linear, const Rows& rows) {
  const bool alone = rows.count <= most_rows_alone(linear);
  char* out = alone ? scratch(worker) + row_scratch_bytes_ : packed_.data();
  const RowsArgs args{rows.x, rows.stride, rows.gather, rows.count, linear.k, rows.norm,
                      reinterpret_cast<float*>(scratch(worker)), out};
  if (alone) {
    if (!worker.is_late()) kernels_.pack_rows(linear.format, args, 0, rows.count);
  } else {
    worker.share(rows.count, kernels_.tile_rows(linear.format), [&](int64_t begin, int64_t end) {
      kernels_.pack_rows(linear.format, args, static_cast<int>(begin), static_cast<int>(end));
    });
  }
  return out;
}

void Executor::gemm(Worker& worker, const Linear& linear, const Rows& rows, const GemmOutput& output) {
  const char* x = pack_rows(worker, linear, rows);
  // The group's own panels are a GEMM of their own, with fewer columns.
  const Linear::Slice& slice = linear.slices[worker.group()];
  const int panels = slice.panels.size(), first_column = slice.panels.begin * kPanel;
  const int columns = std::min(linear.n, slice.panels.end * kPanel) - first_column;
  const float* bias = linear.bias ? linear.bias + first_column : nullptr;
  float* y = output.y + (output.epilogue == Epilogue::kGated ? first_column / 2 : first_column);
  const int block_rows = kernels_.row_block(linear.format, linear.k);
  const int blocks = (rows.count + block_rows - 1) / block_rows;
  // Panel by panel of one block of rows after the other.
  worker.share_in_group_guided(int64_t{blocks} * panels, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int row = static_cast<int>(begin / panels) * block_rows;
      const int panel = static_cast<int>(begin % panels);
      const int panel_end = static_cast<int>(std::min<int64_t>(panels, panel + (end - begin)));
      kernels_.gemm(linear.format, {x, row, std::min(rows.count, row + block_rows), slice.weight, linear.k, columns, panel,
                                    panel_end, bias, output.epilogue, output.activation, y, output.stride});
      begin += panel_end - panel;
    }
  });
}

void Executor::attend(Worker& worker, const Step& step, int index) {
  const LayerConfig& config = config_.layers[index];
  const Layer& layer = weights_.layers[index];
  const int tokens = static_cast<int>(step.token_ids.size());
  const size_t hidden_size = config_.hidden_size;
  float* qkv = reinterpret_cast<float*>(qkv_.data());
  gemm(worker, layer.qkv, {hidden(), hidden_size, tokens, nullptr, config.post_norm ? Norm{} : layer.attention_norm},
       {Epilogue::kStore, qkv, qkv_stride_});
  profile_.end(worker, Phase::kQkv);
  const auto shared = attention_plan_.shared_tasks();
  if (!shared.empty()) {
    const Range own = cache_.heads(worker.group(), index);
    worker.share_in_group(own.size() ? static_cast<int64_t>(shared.size()) : 0, 1, [&](int64_t i, int64_t) {
      const AttentionTask& task = attention_plan_.task(shared[i]);
      for (int t = 0; t < task.num_tokens; ++t) prepare(worker, step, index, task, task.token_begin + t, own);
    });
    profile_.end(worker, Phase::kRope);
  }
  attend_to_cache(worker, step, index);
  profile_.end(worker, Phase::kAttention);
  gemm(worker, layer.out, {qkv, qkv_stride_, tokens}, {Epilogue::kAdd, hidden(), hidden_size});
  profile_.end(worker, Phase::kOut);
  if (config.post_norm) normalize(worker, layer.attention_norm, tokens);
}

void Executor::prepare(const Worker& worker, const Step& step, int index, const AttentionTask& task, int token,
                       Range kv_heads) {
  const LayerConfig& config = config_.layers[index];
  const Layer& layer = weights_.layers[index];
  const int pairs = static_cast<int>(config.inv_freq.size()), position = step.positions[token];
  const float* cos = pairs ? angles(layer_rope_[index], token) : nullptr;
  const int block = step.block_tables[task.sequence * step.block_table_stride + position / kBlockTokens];
  kernels_.prepare(cache_type_, {config.heads(), kv_heads.begin, kv_heads.end,
                                 reinterpret_cast<float*>(qkv_.data()) + token * qkv_stride_, layer.q_norm, layer.k_norm, cos,
                                 cos + pairs, pairs, queries_.data() + token * query_stride_ * query_bytes(),
                                 cache_.head(worker.group(), index, block, kv_heads.begin), position % kBlockTokens});
}

void Executor::attend_to_cache(Worker& worker, const Step& step, int index) {
  const LayerConfig& config = config_.layers[index];
  const Heads heads = config.heads();
  const Range own = cache_.heads(worker.group(), index);
  const int kv_heads = own.size();
  float* out = reinterpret_cast<float*>(qkv_.data());  // free since prepare
  const auto arguments = [&](const AttentionTask& task, int kv_head) -> AttentionArgs {
    return {heads, kv_head, queries_.data() + task.token_begin * query_stride_ * query_bytes(), query_stride_,
            task.num_tokens, step.positions[task.token_begin], config.sliding_window, config.scale, config.softcap,
            config.alibi_slopes.empty() ? nullptr : config.alibi_slopes.data(),
            cache_.head(worker.group(), index, 0, kv_head), cache_.block_bytes(worker.group()),
            step.block_tables + task.sequence * step.block_table_stride, scratch(worker), out + task.token_begin * qkv_stride_,
            qkv_stride_};
  };
  const auto units = attention_plan_.units();
  const int64_t count = static_cast<int64_t>(units.size()) * kv_heads;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(heads.head_bytes(cache_type_));
  worker.share_in_group(count, 1, [&](int64_t i, int64_t) {
    const AttentionPlan::Unit& unit_of_work = units[i / kv_heads];
    const AttentionTask& task = attention_plan_.task(unit_of_work.task);
    const int kv_head = own.begin + static_cast<int>(i % kv_heads);
    AttentionArgs args = arguments(task, kv_head);
    // The group's workers take turns, more or less.
    if (const int64_t next = i + pool_.ownership().workers(worker.group()); next < count) {
      const AttentionTask& task_then = attention_plan_.task(units[next / kv_heads].task);
      args.next = {step.block_tables + task_then.sequence * step.block_table_stride,
                   (task_then.context + kBlockTokens - 1) / kBlockTokens, (next % kv_heads - i % kv_heads) * head_bytes};
    }
    const int piece = unit_of_work.piece - args.piece_begin();
    if (task.alone) prepare(worker, step, index, task, task.token_begin, {kv_head, kv_head + 1});
    if (!task.split()) {
      kernels_.attention(cache_type_, args);
    } else if (piece >= 0) {  // else out of this layer's window
      kernels_.attention_piece(cache_type_, args, unit_of_work.piece, attention_plan_.partial(task, heads, kv_head, piece));
    }
  });
  const auto split = attention_plan_.split_tasks();
  if (split.empty()) return;
  worker.share_in_group(static_cast<int64_t>(split.size()) * kv_heads, 1, [&](int64_t i, int64_t) {
    const AttentionTask& task = attention_plan_.task(split[i / kv_heads]);
    const int kv_head = own.begin + static_cast<int>(i % kv_heads);
    kernels_.attention_merge(arguments(task, kv_head), attention_plan_.partial(task, heads, kv_head, 0));
  });
}

void Executor::mlp(Worker& worker, int tokens, int index) {
  const LayerConfig& config = config_.layers[index];
  const Layer& layer = weights_.layers[index];
  const size_t size = config_.hidden_size;
  float* activated = reinterpret_cast<float*>(mlp_.data());
  gemm(worker, layer.up, {hidden(), size, tokens, nullptr, config.post_norm ? Norm{} : layer.mlp_norm},
       {config.gated ? Epilogue::kGated : Epilogue::kActivation, activated, mlp_stride_, config.activation});
  profile_.end(worker, Phase::kUp);
  gemm(worker, layer.down, {activated, mlp_stride_, tokens}, {Epilogue::kAdd, hidden(), size});
  profile_.end(worker, Phase::kDown);
  if (config.post_norm) normalize(worker, layer.mlp_norm, tokens);
}

void Executor::logits(Worker& worker, const Step& step, size_t first) {
  const int rows = static_cast<int>(std::min<size_t>(shape_.max_num_seqs, step.logits_rows.size() - first));
  Rows last{hidden(), size_t(config_.hidden_size), rows, step.logits_rows.data() + first, weights_.final_norm};
  if (projected_.bytes()) {
    float* projected = reinterpret_cast<float*>(projected_.data());
    const size_t size = config_.embedding_size;
    gemm(worker, weights_.project_out, last, {Epilogue::kStore, projected, size});
    last = {projected, size, rows};
  }
  gemm(worker, weights_.head, last, {Epilogue::kStore, reinterpret_cast<float*>(logits_.data()), size_t(config_.vocab_size)});
  profile_.end(worker, Phase::kHead);
}

void Executor::sample(Worker& worker, const Step& step) {
  const size_t rows = step.logits_rows.size(), room = shape_.max_num_seqs;
  for (size_t first = 0; first < rows; first += room) {
    if (first > 0) logits(worker, step, first);
    worker.share(static_cast<int64_t>(std::min(room, rows - first)), 1, [&](int64_t i, int64_t) {
      const float* logits = reinterpret_cast<float*>(logits_.data()) + i * config_.vocab_size;
      const size_t row = first + i;
      sampler_.sample(step.sampling, row, logits, worker.index());
      if (step.out_logits) std::copy(logits, logits + config_.vocab_size, step.out_logits + row * config_.vocab_size);
    });
    profile_.end(worker, Phase::kSample);
  }
}

void Executor::copy_blocks(std::span<const int32_t> pairs) {
  for (const int32_t block : pairs) {
    if (block < 0 || block >= shape_.num_blocks) fail("block " + std::to_string(block) + " is outside the cache");
  }
  pool_.run([&](Worker& worker) {
    worker.share_in_group(static_cast<int64_t>(pairs.size() / 2), 1, [&](int64_t i, int64_t) {
      cache_.copy_block(worker.group(), pairs[2 * i], pairs[2 * i + 1]);
    });
  });
}

}  // namespace tidewheel
