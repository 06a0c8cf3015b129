#include "model/mixers/parallel.h"

#include <algorithm>

namespace tidewheel {

Parallel::Parallel(const ParallelPlan& plan, const std::string& prefix, Context& context)
    : context_(context), input_(context.workspace.add<float>(context.hidden_size)) {
  require(!plan.residuals.empty(), "parallel residual blocks must be one or more");
  for (const ResidualBlockPlan& residual : plan.residuals) {
    require(!residual.sum_norm && !residual.sum_scale && residual.sum_factor == 1, "a residual block beside others has no sum to normalize or to scale");
    residuals_.emplace_back(residual, prefix, context);
  }
}

void Parallel::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  const float* x = take(worker, input, output.epilogue == Epilogue::kStore ? output.y : nullptr);
  for (const ResidualBlock& residual : residuals_) residual.run(worker, step, x, output.y, output.scale);
}

void Parallel::remember(Worker& worker, const Step& step, const Rows& input) const {
  residuals_.front().remember(worker, step, take(worker, input, nullptr));
}

const float* Parallel::take(Worker& worker, const Rows& input, float* cleared) const {
  const int size = context_.hidden_size;
  float* x = context_.workspace.rows(input_);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(input.x + row * input.stride, size, x + row * size);
      if (input.norm.kind != NormKind::kNone) context_.kernels.normalize(input.norm, x + row * size, size);
      if (cleared) std::fill_n(cleared + row * size, size, 0.0f);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
  return x;
}

}  // namespace tidewheel
