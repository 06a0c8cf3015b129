#include "model/eagle3.h"

#include <algorithm>
#include <limits>

#include "model/require.h"

namespace tidewheel {
namespace {

Context with_size(const Context& of, int hidden_size) {
  return {of.kernels, hidden_size, of.weights, of.workspace, of.gemms, of.capture, of.adapters, of.attention, of.states, of.profile, {}};
}

AttentionPlan over_both(AttentionPlan plan, int hidden_size) {
  plan.input_size = 2 * hidden_size;
  plan.skips_first = true;
  return plan;
}

}  // namespace

Eagle3::Eagle3(const Eagle3Plan& plan, Context& context, int model_vocab, std::span<const int> first_residuals,
               const Buffer<float>& fused, Embed embed)
    : DraftHead(context, plan.hidden_size, plan.num_draft_tokens), own_(with_size(context, plan.hidden_size)),
      model_size_(context.hidden_size), model_vocab_(model_vocab), vocab_(plan.vocab_size), embed_(std::move(embed)),
      adds_normed_(plan.adds_normed), token_ids_(plan.token_ids), fused_(fused) {
  const int size = width_;
  require(size > 0 && vocab_ > 0 && !plan.layers.empty(), "a layer that predicts tokens needs sizes, and layers to watch");
  require(plan.own_embedding || size == model_size_, "a layer of another hidden size needs an embedding of its own");
  require(token_ids_.empty() ? vocab_ == model_vocab : token_ids_.size() == size_t(vocab_),
          "every token of a layer that predicts must be one of the model's");
  for (const int32_t token : token_ids_) {
    require(token >= 0 && token < model_vocab, "a layer that predicts has a token that the model does not have");
  }
  Weights& weights = context.weights;
  if (plan.own_embedding) {
    weights.add_matrix("eagle3.embed.weight", embedding_, model_vocab, size);
    require(!embedding_.input_order, "a table that is looked up has its inputs in the model's order");
  }
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const int layer = plan.layers[i];
    require(layer >= 0 && size_t(layer) < first_residuals.size(), "a layer that predicts watches a layer that does not exist");
    weights.add_linear("eagle3.fuse." + std::to_string(i), fuse_.emplace_back(), size, model_size_, false);
    watched_.emplace_back(first_residuals[layer], &fuse_.back());
  }
  std::sort(watched_.begin(), watched_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  weights.add_norm("eagle3.embedding_norm", embedding_norm_, plan.embedding_norm, size);
  weights.add_norm("eagle3.hidden_norm", hidden_norm_, plan.hidden_norm, size);
  // This layer runs after the model's layers, so it reuses their memory.
  const Workspace::Turn turn(context.workspace);
  hidden_ = context.workspace.add<float>(size);
  inputs_ = context.workspace.add<float>(2 * size);
  {
    const Workspace::Turn of_attention(context.workspace);
    attention_ = make_mixer(over_both(plan.attention, size), "eagle3.layer.", own_);
  }
  mlp_ = std::make_unique<ResidualBlock>(plan.mlp, "eagle3.layer.", own_);
  weights.add_norm("eagle3.final_norm", final_norm_, plan.final_norm, size);
  weights.add_linear("eagle3.head", head_, vocab_, size, false);
}

void Eagle3::allocate(int max_sequences) {
  DraftHead::allocate(max_sequences);
  if (!token_ids_.empty()) own_logits_ = Arena(size_t(max_sequences) * vocab_ * sizeof(float));
}

void Eagle3::watch(Worker& worker, const Step& step, int residual, const float* hidden) const {
  const Rows rows{hidden, size_t(model_size_), static_cast<int>(step.token_ids.size())};
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (watched_[i].first != residual) continue;
    context_.gemms.run(worker, *watched_[i].second, rows, {i == 0 ? Epilogue::kStore : Epilogue::kAdd, fused(), size_t(width_)});
    context_.profile.end(worker, Phase::kOut);
  }
}

Rows Eagle3::inputs(const Step& step) const {
  return {context_.workspace.rows(inputs_), size_t(2) * width_, static_cast<int>(step.token_ids.size())};
}

void Eagle3::embed(Worker& worker, const Step& step, int64_t token, float* row) const {
  if (embedding_.n == 0) {
    embed_(worker, step, token, row);
    return;
  }
  const int id = step.token_ids[token];
  const Linear::Slice& slice = embedding_.slice_of(id);
  context_.kernels.unpack_row(embedding_.format, slice.weight, embedding_.k, id - slice.panels.begin * kPanel, row);
}

void Eagle3::prepare(Worker& worker, const Step& step, bool predicts) const {
  const size_t size = width_;
  const Kernels& kernels = context_.kernels;
  float* const rows = context_.workspace.rows(inputs_);
  worker.share(static_cast<int64_t>(step.token_ids.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* const embedded = rows + t * 2 * size;
      float* const left = embedded + size;
      const Before& before = before_[t];
      if (!before.known) {
        std::fill_n(embedded, 2 * size, 0.0f);
        if (predicts) std::fill_n(hidden() + t * size, size, 0.0f);
        continue;
      }
      embed(worker, step, t, embedded);
      kernels.normalize(embedding_norm_, embedded, width_);
      std::copy_n(before.row ? before.row : fused() + (t - 1) * size, size, left);
      if (predicts && !adds_normed_) std::copy_n(left, size, hidden() + t * size);
      kernels.normalize(hidden_norm_, left, width_);
      if (predicts && adds_normed_) std::copy_n(left, size, hidden() + t * size);
    }
  });
  context_.profile.end(worker, Phase::kEmbed);
}

void Eagle3::remember(Worker& worker, const Step& step, const float*, const Norm&) const {
  prepare(worker, step, false);
  keep(worker, fused(), {});
  attention_->remember(worker, step, inputs(step));
}

Rows Eagle3::predict(Worker& worker, const Step& step) const {
  const size_t size = width_;
  const int tokens = static_cast<int>(step.token_ids.size());
  turn(worker, step);
  prepare(worker, step, true);
  attention_->run(worker, step, inputs(step), {Epilogue::kAdd, hidden(), size});
  mlp_->run(worker, step, hidden(), hidden());
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    std::copy_n(hidden() + begin * size, (end - begin) * size, predicted() + begin * size);
  });
  context_.profile.end(worker, Phase::kNorm);
  return {predicted(), size, tokens, nullptr, final_norm_};
}

void Eagle3::head(Worker& worker, const Rows& rows, float* logits) const {
  const bool maps = !token_ids_.empty();
  float* const own = maps ? reinterpret_cast<float*>(own_logits_.data()) : logits;
  context_.gemms.run(worker, head_, rows, {Epilogue::kStore, own, size_t(vocab_)});
  if (maps) {
    worker.share(rows.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* const row = logits + r * model_vocab_;
        std::fill_n(row, model_vocab_, -std::numeric_limits<float>::infinity());
        for (int i = 0; i < vocab_; ++i) row[token_ids_[i]] = own[r * vocab_ + i];
      }
    });
  }
  context_.profile.end(worker, Phase::kHead);
}

}  // namespace tidewheel
