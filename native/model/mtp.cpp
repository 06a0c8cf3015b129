#include "model/mtp.h"

#include <algorithm>

#include "model/require.h"

namespace tidewheel {

Mtp::Mtp(const MtpPlan& plan, Context& context, Embed embed)
    : DraftHead(context, context.hidden_size, plan.num_draft_tokens), embed_(std::move(embed)), feeds_normed_(plan.feeds_normed) {
  require(!plan.layer.empty() && (std::holds_alternative<AttentionPlan>(plan.layer[0].mixer) ||
                                  std::holds_alternative<LatentAttentionPlan>(plan.layer[0].mixer)),
          "a layer that predicts tokens begins with attention");
  const int size = context.hidden_size;
  Weights& weights = context.weights;
  weights.add_norm("mtp.embedding_norm", embedding_norm_, plan.embedding_norm, size);
  weights.add_norm("mtp.hidden_norm", hidden_norm_, plan.hidden_norm, size);
  weights.add_linear("mtp.project", project_, size, 2 * size, false);
  // This layer runs after the model's layers, so it reuses their memory.
  const Workspace::Turn turn(context.workspace);
  hidden_ = context.workspace.add<float>(size);
  {
    const Workspace::Turn before_layer(context.workspace);
    inputs_ = context.workspace.add<float>(2 * size);
  }
  for (const ResidualBlockPlan& residual : plan.layer) residuals_.emplace_back(residual, "mtp.layer.", context);
  weights.add_norm("mtp.final_norm", final_norm_, plan.final_norm, size);
}

void Mtp::project(Worker& worker, const Step& step, const float* model_rows, const Norm& final_norm) const {
  const int size = context_.hidden_size, tokens = static_cast<int>(step.token_ids.size());
  const Kernels& kernels = context_.kernels;
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* embedded = context_.workspace.rows(inputs_) + t * 2 * size;
      float* left = embedded + size;
      embed_(worker, step, t, embedded);
      kernels.normalize(embedding_norm_, embedded, size);
      const Before& before = before_[t];
      if (!before.known) {
        std::fill_n(left, size, 0.0f);
        continue;
      }
      std::copy_n(before.row ? before.row : model_rows + (t - 1) * size, size, left);
      if (!before.row && final_norm.kind != NormKind::kNone) kernels.normalize(final_norm, left, size);
      kernels.normalize(hidden_norm_, left, size);
    }
  });
  context_.gemms.run(worker, project_, {context_.workspace.rows(inputs_), size_t(2 * size), tokens},
                     {Epilogue::kStore, hidden(), size_t(size)});
  if (unknown_.empty()) return;
  worker.share(static_cast<int64_t>(unknown_.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::fill_n(hidden() + size_t(unknown_[i]) * size, size, 0.0f);
  });
}

void Mtp::remember(Worker& worker, const Step& step, const float* hidden_rows, const Norm& final_norm) const {
  project(worker, step, hidden_rows, final_norm);
  keep(worker, hidden_rows, final_norm);
  residuals_.front().remember(worker, step, hidden());
}

Rows Mtp::predict(Worker& worker, const Step& step) const {
  const int size = context_.hidden_size, tokens = static_cast<int>(step.token_ids.size());
  turn(worker, step);
  project(worker, step, nullptr, {});
  context_.profile.end(worker, Phase::kEmbed);
  for (const ResidualBlock& residual : residuals_) residual.run(worker, step, hidden(), hidden());
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(hidden() + t * size, size, predicted() + t * size);
      if (feeds_normed_) context_.kernels.normalize(final_norm_, predicted() + t * size, size);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
  return {predicted(), size_t(size), tokens, nullptr, feeds_normed_ ? Norm{} : final_norm_, 0};
}

}  // namespace tidewheel
