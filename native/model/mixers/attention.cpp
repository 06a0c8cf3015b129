#include "model/mixers/attention.h"

#include <algorithm>
#include <cmath>

#include "runtime/isa.h"

namespace tidewheel {
namespace {

float scale_at(const TemperaturePlan& temperature, int position) {
  const int64_t steps = (int64_t{position} + temperature.offset) / temperature.length;
  return static_cast<float>(1 + double{temperature.beta} * std::log1p(static_cast<double>(steps)));
}

void copy(Worker& worker, const Rows& rows, int size, float* to, size_t stride) {
  worker.share(rows.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) std::copy_n(rows.x + row * rows.stride, size, to + row * stride);
  });
}

}  // namespace

Attention::Attention(const AttentionPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan), heads_(plan.heads()), scales_(context.attention.scales(plan.kv_scales)) {
  require(plan.num_kv_heads > 0 && plan.num_heads % plan.num_kv_heads == 0,
          "the number of query heads must be a multiple of the number of KV heads");
  require(!plan.rope || plan.rope->inv_freq.size() * 2 <= size_t(plan.head_dim),
          "rope cannot rotate more dimensions than a head has");
  require(plan.scale > 0 && plan.softcap >= 0, "the scores' scale must be above 0, and their cap at least 0");
  require(plan.alibi_slopes.empty() || plan.alibi_slopes.size() == size_t(plan.num_heads),
          "ALiBi needs a slope for each query head");
  require(plan.bias_span >= 0 && plan.bias_span <= kMaxBiasSpan, "biases by distance have a span");
  require(!plan.qk_norm_after_rope || (plan.rope && plan.qk_norm && plan.qk_norm_over != QkNormOver::kWhole),
          "only rotated heads can be normalized after rope, each on its own");
  require(!plan.query_temperature || (plan.query_temperature->length > 0 && plan.query_temperature->offset >= 0),
          "a temperature by position needs a length above 0");
  AttentionState& state = context.attention;
  require(plan.cache_group >= 0 && size_t(plan.cache_group) < state.heads.size(),
          "attention must be of a cache group that has blocks");
  std::vector<Heads>& cached = state.heads[plan.cache_group];
  layer_ = shares() ? plan.shared_layer : static_cast<int>(cached.size());
  if (state.is_tower) layer_ = static_cast<int>(std::find(cached.begin(), cached.end(), heads_) - cached.begin());
  if (size_t(layer_) == cached.size()) cached.push_back(heads_);
  state.divided.push_back(heads_);
  state.windows[plan.cache_group].push_back(plan.sliding_window);
  require(size_t(layer_) < cached.size() && cached[layer_].num_kv_heads == heads_.num_kv_heads &&
              cached[layer_].head_dim == heads_.head_dim && cached[layer_].num_heads == heads_.num_heads,
          "attention can only share the K and V of an earlier layer of its cache group with the same heads");
  if (plan.rope) rope_table_ = state.ropes.add(*plan.rope);

  Weights& weights = context.weights;
  const int q = plan.q_size(), kv = plan.kv_size(), hidden = plan.input_size ? plan.input_size : context.hidden_size;
  require(!plan.output_gate || (!shares() && !plan.values_from_keys), "an output gate is behind projections of q, k and v");
  const int all = shares() ? q : plan.values_from_keys ? q + kv : q + 2 * kv + (plan.output_gate ? q : 0);
  if (plan.projected) {
    require(state.is_tower, "only in a tower, rows may be q, k and v");
  } else if (plan.clipped) {
    add_clipped(prefix, context);
  } else {
    weights.add_linear(prefix + "q", qkv_, q, hidden, plan.qkv_bias, {all, q, 0, 0});
    if (!shares()) weights.add_linear(prefix + "k", qkv_, kv, hidden, plan.qkv_bias, {all, kv, 0, q});
    if (all >= q + 2 * kv) weights.add_linear(prefix + "v", qkv_, kv, hidden, plan.qkv_bias, {all, kv, 0, q + kv});
    if (plan.output_gate) weights.add_linear(prefix + "q_gate", qkv_, q, hidden, plan.qkv_bias, {all, q, 0, q + 2 * kv});
    weights.add_linear(prefix + "o", out_, context.hidden_size, q, plan.out_bias);
  }
  weights.add_norm(prefix + "q_norm", q_norm_, plan.qk_norm, plan.q_norm_size());
  if (!shares()) weights.add_norm(prefix + "k_norm", k_norm_, plan.qk_norm, plan.k_norm_size());
  weights.add_norm(prefix + "v_norm", v_norm_, plan.v_norm, plan.head_dim);
  if (plan.sinks) weights.add_vector(prefix + "sinks", sinks_, plan.num_heads);
  if (plan.bias_span) weights.add_vector(prefix + "distance_bias", distance_bias_, plan.num_heads * distance_biases(plan.bias_span));

  if (plan.disentangled) disentangled_.emplace(plan, prefix, context);

  const size_t query_bytes = context.kernels.query_bytes[static_cast<int>(state.cache_type)];
  qkv_rows_ = context.workspace.add<float>(round_up(shares() ? q : std::max(all, q + 2 * kv), 16));
  query_rows_.stride = plan.num_heads * heads_.padded_dim() * query_bytes;
  state.query_bytes = std::max(state.query_bytes, query_rows_.stride);
  if (!state.is_tower) query_rows_ = context.workspace.add<char>(query_rows_.stride);
  context.workspace.need_scratch(context.kernels.attention_scratch_bytes(heads_));
}

void Attention::add_clipped(const std::string& prefix, Context& context) {
  const int q = plan_.q_size(), kv = plan_.kv_size(), hidden = context.hidden_size;
  require(context.attention.is_tower && !plan_.qkv_bias && !plan_.out_bias && !plan_.values_from_keys,
          "only in a tower linear layers are clipped, and they have no biases");
  clipped_q_.add(prefix + "q", q, hidden, context);
  clipped_k_.add(prefix + "k", kv, hidden, context);
  clipped_v_.add(prefix + "v", kv, hidden, context);
  clipped_out_.add(prefix + "o", hidden, q, context);
  clipped_ = context.workspace.add<float>(std::max(hidden, q));
}

void Attention::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  const AttentionState& state = context_.attention;
  const bool some = input.selects || input.turn == Rows::kRead;
  const AttentionTasks& tasks = some ? state.read_tasks : state.tasks;
  if (input.selects) {
    if (!step.remembered) remember(worker, step, input);
    if (step.read_rows.empty()) return;
  } else if (!step.remembered) {
    project(worker, step, input);
    const auto shared = tasks.shared_tasks();
    if (!shared.empty()) {
      const Range own = cache().heads(worker.group(), layer_);
      worker.share_in_group(own.size() ? static_cast<int64_t>(shared.size()) : 0, 1, [&](int64_t i, int64_t) {
        const AttentionTask& task = tasks.task(shared[i]);
        for (int t = 0; t < task.num_tokens; ++t) store(worker, step, task, t, own);
      });
      context_.profile.end(worker, Phase::kRope);
    }
  }
  attend(worker, step, tasks);
  const int count = some ? static_cast<int>(step.read_rows.size()) : input.count;
  if (plan_.output_gate) gate(worker, step, count, input.selects);
  context_.profile.end(worker, Phase::kAttention);
  const Rows results{qkv(0), qkv_rows_.stride, count, nullptr, {}, some ? Rows::kRead : input.turn};
  if (plan_.projected) {
    copy(worker, results, plan_.q_size(), output.y, output.stride);
  } else if (plan_.clipped) {
    clipped_out_.run(worker, results, clipped_, output);
  } else {
    context_.gemms.run(worker, out_, results, output);
  }
  context_.profile.end(worker, Phase::kOut);
}

void Attention::project(Worker& worker, const Step& step, const Rows& input) const {
  if (plan_.projected) {
    copy(worker, input, plan_.q_size() + 2 * plan_.kv_size(), qkv(0), qkv_rows_.stride);
  } else if (plan_.clipped) {
    const int q = plan_.q_size(), kv = plan_.kv_size();
    clipped_q_.run(worker, input, clipped_, {Epilogue::kStore, qkv(0), qkv_rows_.stride});
    clipped_k_.run(worker, input, clipped_, {Epilogue::kStore, qkv(0) + q, qkv_rows_.stride});
    clipped_v_.run(worker, input, clipped_, {Epilogue::kStore, qkv(0) + q + kv, qkv_rows_.stride});
  } else {
    context_.gemms.run(worker, qkv_, input, {Epilogue::kStore, qkv(0), qkv_rows_.stride});
  }
  context_.profile.end(worker, Phase::kQkv);
  if (plan_.qk_norm && plan_.qk_norm_over == QkNormOver::kWhole) normalize_whole(worker, input.count);
  if (disentangled_) disentangled_->compute(worker, step, {qkv(0), qkv_rows_.stride, input.count});
}

void Attention::remember(Worker& worker, const Step& step, const Rows& input) const {
  const AttentionState& state = context_.attention;
  project(worker, step, input);
  const Range own = cache().heads(worker.group(), layer_);
  worker.share_in_group(own.size() && !shares() ? state.tasks.count() : 0, 1, [&](int64_t i, int64_t) {
    const AttentionTask& task = state.tasks.task(static_cast<int>(i));
    for (int t = 0; t < task.num_tokens; ++t) store(worker, step, task, t, own);
  });
  context_.profile.end(worker, Phase::kRope);
}

// Runs before the heads are divided among workers, because each worker then changes its heads' part of the row.
void Attention::normalize_whole(Worker& worker, int tokens) const {
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = qkv(static_cast<int>(t));
      context_.kernels.normalize(q_norm_, row, plan_.q_size());
      if (!shares()) context_.kernels.normalize(k_norm_, row + plan_.q_size(), plan_.kv_size());
    }
  });
  context_.profile.end(worker, Phase::kRope);
}

void Attention::gate(Worker& worker, const Step& step, int results, bool selects) const {
  const int q = plan_.q_size(), gates = q + 2 * plan_.kv_size();
  worker.share(results, 4, [&](int64_t begin, int64_t end) {
    for (int row = static_cast<int>(begin); row < end; ++row) {
      const float* const gating = qkv(selects ? step.read_rows[row] : row) + gates;
      context_.kernels.multiply_gate(Gate::kSigmoid, gating, q, qkv(row));
    }
  });
}

void Attention::store(const Worker& worker, const Step& step, const AttentionTask& task, int index, Range kv_heads) const {
  const AttentionState& state = context_.attention;
  const int token = task.token_begin + index, position = step.positions[token];
  StoreQkvArgs args{};
  args.heads = heads_;
  args.kv_begin = kv_heads.begin, args.kv_end = kv_heads.end;
  args.qkv = qkv(task.row + index);
  if (plan_.qk_norm_over != QkNormOver::kWhole) args.q_norm = q_norm_, args.k_norm = k_norm_;
  args.norm_stride = plan_.qk_norm_over == QkNormOver::kEach ? plan_.head_dim : 0;
  args.norm_after_rope = plan_.qk_norm_after_rope;
  if (plan_.query_temperature) args.q_scale = scale_at(*plan_.query_temperature, position);
  args.v_norm = v_norm_;
  args.values_from_keys = plan_.values_from_keys;
  args.k_scale = scales_.k, args.v_scale = scales_.v;
  if (plan_.rope) {
    args.cos = state.ropes.cosines(rope_table_, token), args.sin = state.ropes.sines(rope_table_, token);
    args.rotary_pairs = static_cast<int>(plan_.rope->inv_freq.size());
    args.interleaved = plan_.rope->interleaved;
  }
  args.q = queries(step, token);
  if (!shares() && !step.only_queries) {
    const int block = block_table(step, task.sequence)[position / kBlockTokens];
    args.cache_heads = cache().head(worker.group(), layer_, block, kv_heads.begin);
  }
  args.slot = position % kBlockTokens;
  context_.kernels.store_qkv(state.cache_type, args);
}

AttentionArgs Attention::arguments(const Worker& worker, const Step& step, const AttentionTasks& tasks,
                                   const AttentionTask& task, int kv_head) const {
  const AttentionState& state = context_.attention;
  const size_t unit = context_.kernels.query_bytes[static_cast<int>(state.cache_type)];
  return {heads_, kv_head, queries(step, task.token_begin), query_rows_.stride / unit, task.num_tokens,
          step.positions[task.token_begin], window(step, task), plan_.scale * scales_.k, plan_.softcap,
          plan_.alibi_slopes.empty() ? nullptr : plan_.alibi_slopes.data(), sinks_,
          cache().head(worker.group(), layer_, 0, kv_head), cache().block_bytes(worker.group()),
          block_table(step, task.sequence), context_.workspace.scratch(worker),
          qkv(task.row), qkv_rows_.stride,  // the q, k and v there are already stored
          {}, tasks.prefix_result(task, plan_.cache_group, plan_.sliding_window, heads_, kv_head),
          nullptr, nullptr, 0, scales_.v, brings_line_pairs(), visible_until(step, task), distance_bias_, plan_.bias_span,
          disentangled_ ? disentangled_->scores(step, task, kv_head) : PositionScores{}};
}

// The blocks that a unit of this layer reads.
NextBlocks Attention::blocks_of(const Step& step, const AttentionTasks& tasks, const AttentionTasks::Unit& unit) const {
  const AttentionTask& task = tasks.task(unit.task);
  const int window = this->window(step, task), position = step.positions[task.token_begin];
  const int begin = std::max(unit.split * kKvSplit, window ? std::max(position + 1 - window, 0) : 0) / kBlockTokens;
  const int end = task.split() ? std::min(task.context, (unit.split + 1) * kKvSplit) : task.context;
  return {block_table(step, task.sequence) + begin, std::max((end + kBlockTokens - 1) / kBlockTokens - begin, 0)};
}

void Attention::attend_to_prefixes(Worker& worker, const Step& step, const AttentionTasks& tasks) const {
  const AttentionState& state = context_.attention;
  const CommonPrefixes& prefixes = tasks.prefixes(plan_.cache_group);
  const Range own = cache().heads(worker.group(), layer_);
  const auto units = prefixes.units();
  if (units.empty()) return;
  worker.share_in_group(static_cast<int64_t>(units.size()) * own.size(), 1, [&](int64_t i, int64_t) {
    const CommonPrefixes::Unit& unit = units[i / own.size()];
    const CommonPrefix& prefix = prefixes.prefix(unit.prefix);
    if (unit.split < prefix.first_split(plan_.sliding_window)) return;
    const int kv_head = own.begin + static_cast<int>(i % own.size());
    const AttentionArgs args = of_prefix(arguments(worker, step, tasks, tasks.task(prefix.task), kv_head), prefix,
                                         prefixes.tokens(prefix), step.positions, queries(step, 0));
    context_.kernels.attention(state.cache_type).split(args, unit.split, tasks.partial(prefix, heads_, kv_head, unit.split));
  });
}

void Attention::attend(Worker& worker, const Step& step, const AttentionTasks& tasks) const {
  attend_to_prefixes(worker, step, tasks);
  const AttentionState& state = context_.attention;
  const Range own = cache().heads(worker.group(), layer_);
  const int kv_heads = own.size();
  const auto units = tasks.units();
  const int64_t num_units = static_cast<int64_t>(units.size()), count = num_units * kv_heads;
  // Tasks of many tokens read the same K and V one after the other. Head by head, they find them in the second-level cache.
  // Single tokens read all heads, which lie side by side, once.
  const bool by_head = num_units > 0 && tasks.task(units.front().task).num_tokens > 1;
  const auto unit_at = [&](int64_t i) -> const AttentionTasks::Unit& { return units[by_head ? i % num_units : i / kv_heads]; };
  const auto head_at = [&](int64_t i) { return static_cast<int>(by_head ? i / num_units : i % kv_heads); };
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(heads_.head_bytes(state.cache_type));
  worker.share_in_group(count, 1, [&](int64_t i, int64_t) {
    const AttentionTasks::Unit& unit_of_work = unit_at(i);
    const AttentionTask& task = tasks.task(unit_of_work.task);
    const int kv_head = own.begin + head_at(i);
    AttentionArgs args = arguments(worker, step, tasks, task, kv_head);
    // The group's workers take units roughly in turn, so this worker's next unit is probably group_size() further.
    if (const int64_t next = i + worker.group_size(); next < count) {
      args.next = blocks_of(step, tasks, unit_at(next));
      args.next.offset = (head_at(next) - head_at(i)) * head_bytes;
    }
    const int split = unit_of_work.split - args.split_begin();
    if (task.alone && !step.remembered) store(worker, step, task, 0, {kv_head, kv_head + 1});
    if (!task.split()) {
      context_.kernels.attention(state.cache_type).whole(args);
    } else if (split >= 0 && unit_of_work.split < args.split_end() && !args.prefix.has_whole(unit_of_work.split)) {
      // Otherwise it is outside of what this layer sees, or done.
      context_.kernels.attention(state.cache_type).split(args, unit_of_work.split,
                                       tasks.partial(task, heads_, kv_head, split));
    }
  });
  const auto split = tasks.split_tasks();
  if (split.empty()) return;
  worker.share_in_group(static_cast<int64_t>(split.size()) * kv_heads, 1, [&](int64_t i, int64_t) {
    const AttentionTask& task = tasks.task(split[i / kv_heads]);
    const int kv_head = own.begin + static_cast<int>(i % kv_heads);
    context_.kernels.attention_reduce(arguments(worker, step, tasks, task, kv_head), tasks.partial(task, heads_, kv_head, 0));
  });
}

}  // namespace tidewheel
