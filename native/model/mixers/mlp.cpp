#include "model/mixers/mlp.h"

namespace tidewheel {
namespace {

constexpr int kGateColumns = kPanel / 2;

}  // namespace

Mlp::Mlp(const MlpPlan& plan, const std::string& prefix, Context& context) : context_(context), plan_(plan) {
  const int size = plan.intermediate_size, hidden = context.hidden_size;
  Weights& weights = context.weights;
  interleaved_ = plan.gated && weights.agree(prefix + "gate.weight", prefix + "up.weight");
  if (interleaved_) {
    const int columns = 2 * static_cast<int>(round_up(size, kGateColumns));
    weights.add_linear(prefix + "gate", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, 0});
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, kGateColumns});
  } else {
    if (plan.gated) weights.add_linear(prefix + "gate", gate_, size, hidden, plan.bias);
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias);
  }
  weights.add_linear(prefix + "down", down_, hidden, size, plan.bias);
  activated_ = context.workspace.add<float>(round_up(size, kPanel));
  if (plan.gated && !interleaved_) upper_ = context.workspace.add<float>(size);
}

// Gate and up are stored in different ways: a product each, and a pass that multiplies them.
void Mlp::run_gated(Worker& worker, const Rows& input) const {
  float* activated = context_.workspace.rows(activated_);
  float* upper = context_.workspace.rows(upper_);
  context_.gemms.run(worker, gate_, input,
                     {Epilogue::kActivation, activated, activated_.stride, plan_.gate_scale, plan_.activation});
  context_.gemms.run(worker, up_, input, {Epilogue::kStore, upper, upper_.stride});
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* gate = activated + row * activated_.stride;
      const float* up = upper + row * upper_.stride;
      for (int i = 0; i < plan_.intermediate_size; ++i) gate[i] *= up[i];
    }
  });
}

void Mlp::run(Worker& worker, const Step&, const Rows& input, const Output& output) const {
  float* activated = context_.workspace.rows(activated_);
  const Epilogue epilogue = plan_.gated ? Epilogue::kGated : Epilogue::kActivation;
  if (plan_.gated && !interleaved_) {
    run_gated(worker, input);
  } else {
    const float scale = plan_.gated ? plan_.gate_scale : 1;
    context_.gemms.run(worker, up_, input, {epilogue, activated, activated_.stride, scale, plan_.activation});
  }
  context_.profile.end(worker, Phase::kUp);
  context_.gemms.run(worker, down_, {activated, activated_.stride, input.count}, output);
  context_.profile.end(worker, Phase::kDown);
}

}  // namespace tidewheel
