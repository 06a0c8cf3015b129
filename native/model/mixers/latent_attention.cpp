#include "model/mixers/latent_attention.h"

#include <algorithm>

#include "runtime/isa.h"

namespace tidewheel {
namespace {

constexpr int kMaxHeadsTogether = 16;  // query heads of a task

// Divides the query heads, so that several workers can share a token, and a task can have several tokens.
Heads divide(const Heads& heads) {
  int together = std::min(heads.num_heads, kMaxHeadsTogether);
  while (heads.num_heads % together) --together;
  return {heads.num_heads, heads.num_heads / together, heads.head_dim, heads.value_dim, heads.value_start};
}

}  // namespace

LatentAttention::LatentAttention(const LatentAttentionPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan), heads_(plan.heads()), divided_(divide(heads_)),
      kv_scale_(context.attention.scales({plan.kv_scale, plan.kv_scale}).k) {
  require(plan.num_heads > 0 && plan.nope_dim > 0 && plan.rope_dim > 0 && plan.value_dim > 0 && plan.kv_rank > 0 &&
              plan.q_rank >= 0 && plan.scale > 0,
          "the sizes and the scale of attention to latents must be above 0");
  require(plan.rope.inv_freq.size() * 2 == size_t(plan.rope_dim), "rope must rotate all of the part that is for it");
  AttentionState& state = context.attention;
  require(state.cache_type != CacheType::kInt4, "latents cannot be cached in int4");
  require(plan.cache_group >= 0 && size_t(plan.cache_group) < state.heads.size(),
          "attention must be of a cache group that has blocks");
  layer_ = static_cast<int>(state.heads[plan.cache_group].size());
  state.heads[plan.cache_group].push_back(heads_);
  state.divided.push_back(divided_);
  state.windows[plan.cache_group].push_back(0);
  rope_table_ = state.ropes.add(plan.rope);

  Weights& weights = context.weights;
  const int heads = plan.num_heads, hidden = context.hidden_size, rank = plan.kv_rank;
  const int q = plan.q_rank ? plan.q_rank : plan.q_size(), kv = rank + plan.rope_dim;
  const auto by_head = [&](int size) {
    const int columns = static_cast<int>(round_up(size, kPanel));
    return Columns{heads * columns, size, columns, 0};
  };
  const std::string name = prefix + "latent_";
  weights.add_linear(name + (plan.q_rank ? "q_down" : "q"), in_, q, hidden, plan.q_rank && plan.bias, {q + kv, q, 0, 0});
  weights.add_linear(name + "kv_down", in_, kv, hidden, plan.bias, {q + kv, kv, 0, q});
  if (plan.q_rank) {
    weights.add_norm(name + "q_norm", q_norm_, plan.norm, plan.q_rank);
    weights.add_linear(name + "q_up", q_up_, plan.q_size(), plan.q_rank, false);
  }
  weights.add_norm(name + "kv_norm", kv_norm_, plan.norm, rank);
  weights.add_linear(name + "k_up", k_up_, heads * rank, plan.nope_dim, false, by_head(rank));
  weights.add_linear(name + "v_up", v_up_, heads * plan.value_dim, rank, false, by_head(plan.value_dim));
  weights.add_linear(name + "o", out_, hidden, heads * plan.value_dim, plan.bias);

  const size_t query_bytes = context.kernels.query_bytes[static_cast<int>(state.cache_type)];
  in_rows_ = context.workspace.add<float>(round_up(q + kv, 16));
  q_rows_ = context.workspace.add<float>(round_up(std::max(plan.q_size(), heads * plan.value_dim), 16));
  wide_rows_ = context.workspace.add<float>(round_up((heads + 1) * wide_dim(), 16));
  query_rows_ = context.workspace.add<char>(heads * heads_.padded_dim() * query_bytes);
  context.workspace.need_scratch(context.kernels.attention_scratch_bytes(divided_));
  context.workspace.need_scratch(std::max(context.gemms.heads_scratch_bytes(k_up_), context.gemms.heads_scratch_bytes(v_up_)));
}

void LatentAttention::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  const Gemms& gemms = context_.gemms;
  const int heads = plan_.num_heads, rank = plan_.kv_rank;
  const int results = input.selects ? static_cast<int>(step.read_rows.size()) : input.count;
  remember(worker, step, input);
  if (results == 0) return;
  attend(worker, step, input.selects ? context_.attention.read_tasks : context_.attention.tasks);
  context_.profile.end(worker, Phase::kAttention);
  const HeadLayout to_values{heads, plan_.value_dim, size_t(rank), size_t(plan_.value_dim)};
  gemms.run_heads(worker, v_up_, to_values, {row(wide_rows_, 0), wide_rows_.stride, results},
                  {Epilogue::kStore, row(q_rows_, 0), q_rows_.stride});
  const int turn = input.selects ? Rows::kRead : input.turn;
  gemms.run(worker, out_, {row(q_rows_, 0), q_rows_.stride, results, nullptr, {}, turn}, output);
  context_.profile.end(worker, Phase::kOut);
}

// Also prepares the queries, which take little time compared with the rest of a layer.
void LatentAttention::remember(Worker& worker, const Step& step, const Rows& input) const {
  const Gemms& gemms = context_.gemms;
  const int tokens = input.count, heads = plan_.num_heads, rank = plan_.kv_rank;
  gemms.run(worker, in_, input, {Epilogue::kStore, row(in_rows_, 0), in_rows_.stride});
  if (plan_.q_rank) {
    gemms.run(worker, q_up_, {row(in_rows_, 0), in_rows_.stride, tokens, nullptr, q_norm_},
              {Epilogue::kStore, row(q_rows_, 0), q_rows_.stride});
  }
  const Buffer<float>& q = plan_.q_rank ? q_rows_ : in_rows_;
  const HeadLayout to_latents{heads, rank, size_t(head_dim()), size_t(wide_dim())};
  gemms.run_heads(worker, k_up_, to_latents, {row(q, 0), q.stride, tokens},
                  {Epilogue::kStore, row(wide_rows_, 0) + plan_.rope_dim, wide_rows_.stride});
  context_.profile.end(worker, Phase::kQkv);
  arrange(worker, tokens);
  store(worker, step);
  context_.profile.end(worker, Phase::kRope);
}

void LatentAttention::arrange(Worker& worker, int tokens) const {
  const int rope = plan_.rope_dim, rank = plan_.kv_rank, heads = plan_.num_heads;
  const Buffer<float>& q = plan_.q_rank ? q_rows_ : in_rows_;
  worker.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int t = static_cast<int>(begin); t < end; ++t) {
      const float* rotating = row(q, t) + plan_.nope_dim;
      float* wide = row(wide_rows_, t);
      for (int h = 0; h < heads; ++h) std::copy_n(rotating + h * head_dim(), rope, wide + h * wide_dim());
      float* latent = row(in_rows_, t) + (plan_.q_rank ? plan_.q_rank : plan_.q_size());
      context_.kernels.normalize(kv_norm_, latent, rank);
      float* key = wide + heads * wide_dim();
      std::copy_n(latent + rank, rope, key);
      std::copy_n(latent, rank, key + rope);
    }
  });
}

void LatentAttention::store(Worker& worker, const Step& step) const {
  const AttentionState& state = context_.attention;
  const AttentionTasks& tasks = state.tasks;
  const bool own = cache().heads(worker.group(), layer_).size() > 0;
  worker.share_in_group(own ? static_cast<int64_t>(tasks.count()) : 0, 1, [&](int64_t i, int64_t) {
    const AttentionTask& task = tasks.task(static_cast<int>(i));
    for (int token = task.token_begin; token < task.token_begin + task.num_tokens; ++token) {
      const int position = step.positions[token], block = block_table(step, task.sequence)[position / kBlockTokens];
      StoreQkvArgs args{};
      args.heads = heads_;
      args.kv_begin = 0, args.kv_end = 1;
      args.qkv = row(wide_rows_, token);
      args.cos = state.ropes.cosines(rope_table_, token), args.sin = state.ropes.sines(rope_table_, token);
      args.rotary_pairs = plan_.rope_dim / 2;
      args.interleaved = plan_.rope.interleaved;
      args.q = row(query_rows_, token);
      args.cache_heads = cache().head(worker.group(), layer_, block, 0);
      args.slot = position % kBlockTokens;
      args.k_scale = kv_scale_;
      context_.kernels.store_qkv(state.cache_type, args);
    }
  });
}

AttentionArgs LatentAttention::arguments(const Worker& worker, const Step& step, const AttentionTasks& tasks,
                                         const AttentionTask& task, int part) const {
  const AttentionState& state = context_.attention;
  const size_t unit = context_.kernels.query_bytes[static_cast<int>(state.cache_type)];
  AttentionArgs args{};
  args.heads = divided_;
  args.kv_head = part;
  args.q = row(query_rows_, task.token_begin);
  args.q_stride = query_rows_.stride / unit;
  args.num_tokens = task.num_tokens;
  args.first_position = step.positions[task.token_begin];
  args.scale = plan_.scale * kv_scale_;
  args.value_scale = kv_scale_;
  args.cache_head = cache().head(worker.group(), layer_, 0, 0);
  args.block_stride = cache().block_bytes(worker.group());
  args.block_table = block_table(step, task.sequence);
  args.scratch = context_.workspace.scratch(worker);
  args.out = row(wide_rows_, task.row);  // the queries, the key and the latent there are already stored
  args.out_stride = wide_rows_.stride;
  args.prefix = tasks.prefix_result(task, plan_.cache_group, 0, divided_, part);
  args.line_pairs = brings_line_pairs();
  return args;
}

void LatentAttention::attend_to_prefixes(Worker& worker, const Step& step, const AttentionTasks& tasks) const {
  const AttentionState& state = context_.attention;
  const CommonPrefixes& prefixes = tasks.prefixes(plan_.cache_group);
  const int parts = cache().heads(worker.group(), layer_).size() > 0 ? divided_.num_kv_heads : 0;
  const auto units = prefixes.units();
  if (units.empty()) return;
  worker.share_in_group(static_cast<int64_t>(units.size()) * parts, 1, [&](int64_t i, int64_t) {
    const CommonPrefixes::Unit& unit = units[i / parts];
    const CommonPrefix& prefix = prefixes.prefix(unit.prefix);
    const int part = static_cast<int>(i % parts);
    const AttentionArgs args = of_prefix(arguments(worker, step, tasks, tasks.task(prefix.task), part), prefix,
                                         prefixes.tokens(prefix), step.positions, row(query_rows_, 0));
    context_.kernels.attention(state.cache_type).split(args, unit.split, tasks.partial(prefix, divided_, part, unit.split));
  });
}

void LatentAttention::attend(Worker& worker, const Step& step, const AttentionTasks& tasks) const {
  attend_to_prefixes(worker, step, tasks);
  const AttentionState& state = context_.attention;
  // The group that owns the KV head computes all query heads.
  const int parts = cache().heads(worker.group(), layer_).size() > 0 ? divided_.num_kv_heads : 0;
  const auto units = tasks.units();
  worker.share_in_group(static_cast<int64_t>(units.size()) * parts, 1, [&](int64_t i, int64_t) {
    const AttentionTasks::Unit& unit = units[i / parts];
    const AttentionTask& task = tasks.task(unit.task);
    const int part = static_cast<int>(i % parts);
    const AttentionArgs args = arguments(worker, step, tasks, task, part);
    if (!task.split()) {
      context_.kernels.attention(state.cache_type).whole(args);
    } else if (unit.split < args.split_end() && !args.prefix.has_whole(unit.split)) {
      context_.kernels.attention(state.cache_type).split(args, unit.split, tasks.partial(task, divided_, part, unit.split));
    }
  });
  const auto split = tasks.split_tasks();
  if (split.empty()) return;
  worker.share_in_group(static_cast<int64_t>(split.size()) * parts, 1, [&](int64_t i, int64_t) {
    const AttentionTask& task = tasks.task(split[i / parts]);
    const int part = static_cast<int>(i % parts);
    context_.kernels.attention_reduce(arguments(worker, step, tasks, task, part), tasks.partial(task, divided_, part, 0));
  });
}

}  // namespace tidewheel
