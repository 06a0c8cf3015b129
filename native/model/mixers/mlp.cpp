#include "model/mixers/mlp.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tidewheel {
namespace {

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1.0f + std::exp(-x));
    case Activation::kGelu: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case Activation::kGeluTanh: return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::kGeluQuick: return x / (1.0f + std::exp(-1.702f * x));
    case Activation::kRelu: return std::max(x, 0.0f);
    case Activation::kRelu2: return std::max(x, 0.0f) * std::max(x, 0.0f);
  }
  return x;
}

// The sum of `term(i)`, in a fixed order that lets the compiler use vectors.
template <typename Term>
float sum(int size, Term&& term) {
  std::array<float, 16> lanes{};
  int i = 0;
  for (; i + 16 <= size; i += 16) {
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += term(i + lane);
  }
  float total = 0;
  for (const float lane : lanes) total += lane;
  for (; i < size; ++i) total += term(i);
  return total;
}

}  // namespace

Mlp::Mlp(const MlpPlan& plan, const std::string& prefix, Context& context) : context_(context), plan_(plan) {
  const int size = plan.intermediate_size, hidden = context.hidden_size;
  Weights& weights = context.weights;
  activated_ = context.workspace.add<float>(round_up(size, kPanel));
  if (plan.clipped) {
    require(context.attention.is_tower && plan.gated && !plan.bias && !plan.cutoff && plan.gate_scale == 1,
            "only in a tower an MLP is clipped; it has a gate that is not scaled, and no biases");
    clipped_gate_.add(prefix + "gate", size, hidden, context);
    clipped_up_.add(prefix + "up", size, hidden, context);
    clipped_down_.add(prefix + "down", hidden, size, context);
    upper_ = context.workspace.add<float>(size);
    clipped_ = context.workspace.add<float>(std::max(size, hidden));
    return;
  }
  require(!plan.cutoff || plan.gated, "only the values of a gate are cut off");
  interleaved_ = plan.gated && !plan.cutoff && weights.agree(prefix + "gate.weight", prefix + "up.weight");
  if (interleaved_) {
    const int columns = 2 * static_cast<int>(round_up(size, kGateColumns));
    weights.add_linear(prefix + "gate", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, 0});
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias, {columns, kGateColumns, kPanel, kGateColumns});
  } else {
    if (plan.gated) weights.add_linear(prefix + "gate", gate_, size, hidden, plan.bias);
    weights.add_linear(prefix + "up", up_, size, hidden, plan.bias);
  }
  weights.add_linear(prefix + "down", down_, hidden, size, plan.bias || plan.down_bias);
  if (plan.gated && !interleaved_) upper_ = context.workspace.add<float>(size);
}

// For gate and up matrices that are stored in different ways, and for gates whose values are compared with each other:
// computes one product for each, then multiplies them in a separate pass.
void Mlp::run_gated(Worker& worker, const Rows& input) const {
  float* activated = context_.workspace.rows(activated_);
  float* upper = context_.workspace.rows(upper_);
  const Epilogue epilogue = plan_.cutoff ? Epilogue::kStore : Epilogue::kActivation;
  context_.gemms.run(worker, gate_, input,
                     {epilogue, activated, activated_.stride, plan_.gate_scale, plan_.activation});
  context_.gemms.run(worker, up_, input, {Epilogue::kStore, upper, upper_.stride});
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      multiply_gate(activated + row * activated_.stride, upper + row * upper_.stride);
    }
  });
}

void Mlp::multiply_gate(float* gate, const float* up) const {
  const int size = plan_.intermediate_size;
  if (!plan_.cutoff) {
    for (int i = 0; i < size; ++i) gate[i] *= up[i];
    return;
  }
  const float count = static_cast<float>(size);
  const float mean = sum(size, [&](int i) { return gate[i]; }) / count;
  const float variance = sum(size, [&](int i) { return (gate[i] - mean) * (gate[i] - mean); }) / count;
  const float least = mean + *plan_.cutoff * std::sqrt(variance);
  // Most values become 0, and every activation function maps 0 to 0.
  for (int i = 0; i < size; ++i) gate[i] = gate[i] > least ? activate(plan_.activation, gate[i] - least) * up[i] : 0.0f;
}

void Mlp::run_clipped(Worker& worker, const Rows& input, const Output& output) const {
  float* activated = context_.workspace.rows(activated_);
  float* upper = context_.workspace.rows(upper_);
  clipped_gate_.run(worker, input, clipped_, {Epilogue::kStore, activated, activated_.stride});
  clipped_up_.run(worker, input, clipped_, {Epilogue::kStore, upper, upper_.stride});
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      multiply_activated(activated + row * activated_.stride, upper + row * upper_.stride);
    }
  });
  context_.profile.end(worker, Phase::kUp);
  clipped_down_.run(worker, {upper, upper_.stride, input.count, nullptr, {}, input.turn}, clipped_, output);
  context_.profile.end(worker, Phase::kDown);
}

// Activations that are x * sigmoid(f(x)) have a kernel. With tanh, GELU is one: (1 + tanh(z)) / 2 = sigmoid(2 z).
void Mlp::multiply_activated(float* gate, float* up) const {
  const int size = plan_.intermediate_size;
  const auto multiply = [&](auto&& inner) {
    for (int i = 0; i < size; ++i) up[i] *= gate[i], gate[i] = inner(gate[i]);
    context_.kernels.multiply_gate(Gate::kSigmoid, gate, size, up);
  };
  switch (plan_.activation) {
    case Activation::kSilu: return multiply([](float x) { return x; });
    case Activation::kGeluTanh: return multiply([](float x) { return 1.5957691216f * (x + 0.044715f * x * x * x); });
    case Activation::kGeluQuick: return multiply([](float x) { return 1.702f * x; });
    default:
      for (int i = 0; i < size; ++i) up[i] *= activate(plan_.activation, gate[i]);
  }
}

void Mlp::run(Worker& worker, const Step&, const Rows& input, const Output& output) const {
  if (plan_.clipped) return run_clipped(worker, input, output);
  float* activated = context_.workspace.rows(activated_);
  const Epilogue epilogue = plan_.gated ? Epilogue::kGated : Epilogue::kActivation;
  if (plan_.gated && !interleaved_) {
    run_gated(worker, input);
  } else {
    const float scale = plan_.gated ? plan_.gate_scale : 1;
    context_.gemms.run(worker, up_, input, {epilogue, activated, activated_.stride, scale, plan_.activation});
  }
  context_.profile.end(worker, Phase::kUp);
  context_.gemms.run(worker, down_, {activated, activated_.stride, input.count, nullptr, {}, input.turn}, output);
  context_.profile.end(worker, Phase::kDown);
}

}  // namespace tidewheel
