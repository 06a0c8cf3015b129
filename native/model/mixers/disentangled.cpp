#include "model/mixers/disentangled.h"

#include <algorithm>

namespace tidewheel {

Disentangled::Disentangled(const AttentionPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(*plan.disentangled), heads_(plan.num_heads), head_dim_(plan.head_dim) {
  const int count = static_cast<int>(plan_.rows.size()), span = count / 2;
  require(plan_.content_to_position || plan_.position_to_content, "positions are met by queries, by keys or by both");
  require(plan_.num_rows > 0 && count % 2 == 1 && span <= kMaxBiasSpan, "positions have a row for each distance of a span");
  require(*std::min_element(plan_.rows.begin(), plan_.rows.end()) >= 0 &&
              *std::max_element(plan_.rows.begin(), plan_.rows.end()) < plan_.num_rows,
          "positions have no such row");
  require(context.attention.is_tower && plan.num_kv_heads == heads_ && !plan.rope && !plan.qk_norm && !plan.clipped &&
              !plan.query_temperature,
          "only in a tower positions are met by content, with as many KV heads, and neither rope, norms, bounds nor a temperature of q and k");
  for (int distance = -span - kBiasPadding; distance <= span + kBiasPadding; ++distance) {
    rows_.push_back(plan_.rows[std::clamp(distance, -span, span) + span]);
  }
  const int columns = static_cast<int>(round_up(plan_.num_rows, kPanel));
  const auto add = [&](const char* name, Linear& linear) {
    context.weights.add_linear(prefix + name, linear, heads_ * plan_.num_rows, head_dim_, false,
                               {heads_ * columns, plan_.num_rows, columns, 0});
    context.workspace.need_scratch(context.gemms.heads_scratch_bytes(linear));
  };
  if (plan_.content_to_position) add("pos_k", of_queries_);
  if (plan_.position_to_content) add("pos_q", of_keys_);
  const size_t floats = size_t(heads_) * plan_.num_rows * (plan_.content_to_position + plan_.position_to_content);
  context.attention.position_floats = std::max(context.attention.position_floats, floats);
}

void Disentangled::compute(Worker& worker, const Step& step, const Rows& qkv) const {
  const HeadLayout layout{heads_, plan_.num_rows, size_t(head_dim_), size_t(plan_.num_rows)};
  const size_t size = size_t(heads_) * head_dim_, products = size_t(heads_) * plan_.num_rows;
  float* out = row(step.first_query);
  const auto multiply = [&](const Linear& linear, const float* x) {
    context_.gemms.run_heads(worker, linear, layout, {x, qkv.stride, qkv.count},
                             {Epilogue::kStore, out, context_.attention.position_floats});
    out += products;
  };
  if (plan_.content_to_position) multiply(of_queries_, qkv.x);
  if (plan_.position_to_content) multiply(of_keys_, qkv.x + size);
  context_.profile.end(worker, Phase::kQkv);
}

PositionScores Disentangled::scores(const Step& step, const AttentionTask& task, int head) const {
  PositionScores scores{rows_.data(), static_cast<int>(plan_.rows.size()) / 2};
  scores.stride = context_.attention.position_floats;
  const size_t first = size_t(head) * plan_.num_rows;
  if (plan_.content_to_position) scores.of_queries = row(step.first_query + task.token_begin) + first;
  if (plan_.position_to_content) {
    // A segment's rows follow each other from its first one on, also those of other pieces.
    const int begin = step.query_start[task.sequence];
    const size_t of_keys = plan_.content_to_position ? size_t(heads_) * plan_.num_rows : 0;
    scores.of_keys = row(step.first_query + begin - step.positions[begin]) + of_keys + first;
  }
  return scores;
}

}  // namespace tidewheel
