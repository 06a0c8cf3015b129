#include "model/mixers/per_layer.h"

namespace tidewheel {

PerLayer::PerLayer(const PerLayerPlan& plan, const std::string& prefix, Context& context) : context_(context), plan_(plan) {
  const PerLayerInputs& inputs = context.per_layer;
  require(plan.size > 0 && plan.size == inputs.size && plan.layer >= 0 && plan.layer < inputs.layers,
          "a residual block needs per-layer embeddings, which the embedding does not have for its layer");
  Weights& weights = context.weights;
  weights.add_linear(prefix + "per_layer_gate", gate_, plan.size, context.hidden_size, false);
  weights.add_linear(prefix + "per_layer_projection", projection_, context.hidden_size, plan.size, false);
  gated_ = context.workspace.add<float>(round_up(plan.size, kPanel));
}

void PerLayer::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  float* gated = context_.workspace.rows(gated_);
  const PerLayerInputs& inputs = context_.per_layer;
  const float* values = context_.workspace.rows(inputs.rows) + plan_.layer * plan_.size;
  context_.gemms.run(worker, gate_, input, {Epilogue::kActivation, gated, gated_.stride, 1, plan_.activation});
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = input.turn == Rows::kRead ? step.read_rows[row] : row;
      for (int i = 0; i < plan_.size; ++i) gated[row * gated_.stride + i] *= values[token * inputs.rows.stride + i];
    }
  });
  context_.profile.end(worker, Phase::kUp);
  context_.gemms.run(worker, projection_, {gated, gated_.stride, input.count, nullptr, {}, input.turn}, output);
  context_.profile.end(worker, Phase::kDown);
}

}  // namespace tidewheel
