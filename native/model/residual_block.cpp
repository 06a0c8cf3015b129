#include "model/residual_block.h"

#include <algorithm>

namespace tidewheel {

ResidualBlock::ResidualBlock(const ResidualBlockPlan& plan, const std::string& prefix, Context& context, int width)
    : context_(context), width_(width ? width : context.hidden_size), scale_(plan.scale), sum_factor_(plan.sum_factor) {
  const std::string kind = prefix + std::visit([](const auto& mixer) { return mixer.kKind; }, plan.mixer);
  const Workspace::Turn turn(context.workspace);
  context.weights.add_norm(kind + "_norm", norm_, plan.norm, width_);
  context.weights.add_norm(kind + "_post_norm", post_norm_, plan.post_norm, width_);
  context.weights.add_norm(kind + "_sum_norm", sum_norm_, plan.sum_norm, width_);
  if (plan.sum_scale) context.weights.add_vector(kind + "_sum_scale", sum_scale_, 1);
  if (plan.post_norm) mixed_ = context.workspace.add<float>(width_);
  mixer_ = make_mixer(plan.mixer, prefix, context);
}

template <typename Body>
void ResidualBlock::each_row(Worker& worker, int rows, Body&& body) const {
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row * width_);
  });
  context_.profile.end(worker, Phase::kNorm);
}

void ResidualBlock::remember(Worker& worker, const Step& step, const float* x) const {
  mixer_->remember(worker, step, {x, size_t(width_), static_cast<int>(step.token_ids.size()), nullptr, norm_});
}

void ResidualBlock::run(Worker& worker, const Step& step, const float* x, float* y, float scale) const {
  run(worker, step, {x, size_t(width_), static_cast<int>(step.token_ids.size())}, y, scale);
}

void ResidualBlock::run(Worker& worker, const Step& step, Rows rows, float* y, float scale) const {
  const int size = width_, results = rows.selects ? static_cast<int>(step.read_rows.size()) : rows.count;
  if (results == 0 && !keeps()) return;
  const Kernels& kernels = context_.kernels;
  rows.norm = norm_;
  const bool changes_sum = sum_norm_.kind != NormKind::kNone || sum_scale_ || sum_factor_ != 1;
  const auto finish = [&](int64_t at) {
    if (sum_factor_ != 1) std::transform(y + at, y + at + size, y + at, [&](float value) { return value * sum_factor_; });
    if (sum_norm_.kind != NormKind::kNone) kernels.normalize(sum_norm_, y + at, size);
    if (sum_scale_) std::transform(y + at, y + at + size, y + at, [&](float value) { return value * *sum_scale_; });
  };
  if (post_norm_.kind == NormKind::kNone) {
    mixer_->run(worker, step, rows, {Epilogue::kAdd, y, size_t(size), scale * scale_});
    if (changes_sum) each_row(worker, results, finish);
  } else {
    float* mixed = context_.workspace.rows(mixed_);
    mixer_->run(worker, step, rows, {Epilogue::kStore, mixed, size_t(size)});
    each_row(worker, results, [&](int64_t at) {
      kernels.add_normalized(post_norm_, mixed + at, size, scale * scale_, y + at);
      finish(at);
    });
  }
}

}  // namespace tidewheel
