#include "model/mixers/laurel.h"

#include <algorithm>

namespace tidewheel {

Laurel::Laurel(const LaurelPlan& plan, const std::string& prefix, Context& context) : context_(context) {
  const int hidden = context.hidden_size;
  require(plan.rank > 0, "the matrices of LAuReL must have a rank above 0");
  context.weights.add_linear(prefix + "laurel_down", down_, plan.rank, hidden, false);
  context.weights.add_linear(prefix + "laurel_up", up_, hidden, plan.rank, false);
  context.weights.add_norm(prefix + "laurel_out_norm", norm_, plan.norm, hidden);
  input_ = context.workspace.add<float>(hidden);
  between_ = context.workspace.add<float>(round_up(plan.rank, kPanel));
  learned_ = context.workspace.add<float>(hidden);
}

void Laurel::run(Worker& worker, const Step&, const Rows& input, const Output& output) const {
  const size_t hidden = context_.hidden_size;
  const Workspace& workspace = context_.workspace;
  float *x = workspace.rows(input_), *between = workspace.rows(between_), *learned = workspace.rows(learned_);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(input.row(row), hidden, x + row * hidden);
      if (input.norm.kind != NormKind::kNone) context_.kernels.normalize(input.norm, x + row * hidden, static_cast<int>(hidden));
    }
  });
  context_.gemms.run(worker, down_, {x, hidden, input.count, nullptr, {}, input.turn}, {Epilogue::kStore, between, between_.stride});
  context_.gemms.run(worker, up_, {between, between_.stride, input.count, nullptr, {}, input.turn}, {Epilogue::kStore, learned, hidden});
  context_.profile.end(worker, Phase::kUp);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = output.y + row * output.stride;
      if (output.epilogue == Epilogue::kStore) std::fill_n(y, hidden, 0.0f);
      for (size_t h = 0; h < hidden; ++h) y[h] += output.scale * x[row * hidden + h];
      context_.kernels.add_normalized(norm_, learned + row * hidden, static_cast<int>(hidden), output.scale, y);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
}

}  // namespace tidewheel
