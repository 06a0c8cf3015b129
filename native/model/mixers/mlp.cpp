#include "model/mixers/mlp.h"

namespace tidewheel {
namespace {

constexpr int kGateColumns = kPanel / 2;

}  // namespace

Mlp::Mlp(const MlpPlan& plan, const std::string& prefix, Context& context) : context_(context), plan_(plan) {
  const int size = plan.intermediate_size, hidden = context.hidden_size;
  Weights& weights = context.weights;
  if (plan.gated) {
    const int columns = 2 * static_cast<int>(round_up(size, kGateColumns));
    weights.add_linear(prefix + "gate", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, 0});
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, kGateColumns});
  } else {
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias);
  }
  weights.add_linear(prefix + "down", down_, hidden, size, plan.bias);
  activated_ = context.workspace.add<float>(round_up(size, kPanel));
}

void Mlp::run(Worker& worker, const Step&, const Rows& input, const Output& output) const {
  float* activated = context_.workspace.rows(activated_);
  const Epilogue epilogue = plan_.gated ? Epilogue::kGated : Epilogue::kActivation;
  context_.gemms.run(worker, up_, input, {epilogue, activated, activated_.stride, 1, plan_.activation});
  context_.profile.end(worker, Phase::kUp);
  context_.gemms.run(worker, down_, {activated, activated_.stride, input.count}, output);
  context_.profile.end(worker, Phase::kDown);
}

}  // namespace tidewheel
