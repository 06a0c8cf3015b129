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
  const size_t size = context_.hidden_size;
  const int read = static_cast<int>(step.read_rows.size());
  const bool stores = output.epilogue == Epilogue::kStore;
  const float* x = take(worker, input, stores && !input.selects ? output.y : nullptr);
  if (stores && input.selects) {
    worker.share(read, 4, [&](int64_t begin, int64_t end) {
      std::fill_n(output.y + begin * size, (end - begin) * size, 0.0f);
    });
  }
  for (const ResidualBlock& residual : residuals_) {
    Rows rows{x, size, input.count, nullptr, {}, input.turn, input.selects};
    if (input.selects && !residual.keeps()) rows = {x, size, read, step.read_rows.data(), {}, Rows::kRead};
    residual.run(worker, step, rows, output.y, output.scale);
  }
}

void Parallel::remember(Worker& worker, const Step& step, const Rows& input) const {
  residuals_.front().remember(worker, step, take(worker, input, nullptr));
}

const float* Parallel::take(Worker& worker, const Rows& input, float* cleared) const {
  const int size = context_.hidden_size;
  float* x = context_.workspace.rows(input_);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(input.row(row), size, x + row * size);
      if (input.norm.kind != NormKind::kNone) context_.kernels.normalize(input.norm, x + row * size, size);
      if (cleared) std::fill_n(cleared + row * size, size, 0.0f);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
  return x;
}

}  // namespace tidewheel
