#include "model/mixers/mamba2.h"

#include <cmath>

namespace tidewheel {
Mamba2::Mamba2(const Mamba2Plan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan),
      scales_(std::any_of(plan.input_scales.begin(), plan.input_scales.end(), [](float scale) { return scale != 1; })),
      convolution_(prefix + "mamba_conv", plan.size() + 2 * plan.group_size(), plan.conv_kernel, plan.conv_bias, true,
                   context),
      recurrence_(plan.num_heads, plan.state_dim, plan.head_dim, 2 * plan.num_heads, context) {
  require(plan.num_groups > 0 && plan.num_heads % plan.num_groups == 0,
          "the number of heads must be a multiple of the number of groups");
  require(plan.head_dim > 0 && plan.state_dim > 0, "a head needs at least one dimension, and its state too");
  require(plan.norm_groups > 0 && plan.size() % plan.norm_groups == 0, "the norm's groups must divide the heads' width");
  const int size = plan.size(), group = plan.group_size(), heads = plan.num_heads, hidden = context.hidden_size;
  const int conv = size + 2 * group, all = conv + size + heads;
  Weights& weights = context.weights;
  weights.add_linear(prefix + "mamba_x", in_, size, hidden, plan.bias, {all, size, 0, 0});
  weights.add_linear(prefix + "mamba_B", in_, group, hidden, plan.bias, {all, group, 0, size});
  weights.add_linear(prefix + "mamba_C", in_, group, hidden, plan.bias, {all, group, 0, size + group});
  weights.add_linear(prefix + "mamba_z", in_, size, hidden, plan.bias, {all, size, 0, conv});
  weights.add_linear(prefix + "mamba_dt", in_, heads, hidden, plan.bias, {all, heads, 0, conv + size});
  weights.add_linear(prefix + "mamba_out", out_, hidden, size, plan.bias);
  weights.add_vector(prefix + "mamba.A_log", a_log_, heads);
  weights.add_vector(prefix + "mamba.D", skip_, heads);
  weights.add_vector(prefix + "mamba.dt_bias", dt_bias_, heads);
  weights.add_norm(prefix + "mamba_gated_norm", norm_, plan.norm, size);
  rows_ = context.workspace.add<float>(round_up(all, 16));
  gates_ = context.workspace.add<float>(round_up(2 * heads, 16));
}

void Mamba2::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  context_.gemms.run(worker, in_, input, {Epilogue::kStore, rows(0).first, rows_.stride});
  if (scales_) scale_inputs(worker, input.count);
  context_.profile.end(worker, Phase::kQkv);
  if (!context_.states.replayed().empty()) recur_all(worker, context_.states.replayed());
  recur_all(worker, context_.states.running());
  const Rows results = results_of(step, input, rows(0).first, rows_.stride);
  if (results.count == 0) return;
  worker.share(results.count, 1, [&](int64_t i, int64_t) {
    gate(results.gather ? results.gather[i] : static_cast<int>(i));
  });
  context_.profile.end(worker, Phase::kNorm);
  context_.gemms.run(worker, out_, results, output);
  context_.profile.end(worker, Phase::kOut);
}

void Mamba2::recur_all(Worker& worker, std::span<const SequenceTokens> sequences) const {
  const int conv = conv_size();
  share_parts(worker, sequences, (conv + kPartChannels - 1) / kPartChannels, [&](const SequenceTokens& tokens, int part) {
    const Range channels{part * kPartChannels, std::min((part + 1) * kPartChannels, conv)};
    const TokenRows row = tokens.logged ? convolution_.log(tokens.slot) : rows(tokens.begin);
    convolution_.run(worker, tokens, channels, row.from(0, channels.begin));
  });
  context_.profile.end(worker, Phase::kConvolution);
  share_parts(worker, sequences, plan_.num_heads,
              [&](const SequenceTokens& tokens, int head) { recur(worker, tokens, head); });
  context_.profile.end(worker, Phase::kRecurrence);
}

void Mamba2::scale_inputs(Worker& worker, int tokens) const {
  const auto& [z, x, b, c, dt] = plan_.input_scales;
  const int size = plan_.size(), group = plan_.group_size();
  const std::pair<int, float> parts[] = {{size, x}, {group, b}, {group, c}, {size, z}, {plan_.num_heads, dt}};
  worker.share(tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float* value = rows(static_cast<int>(token)).first;
      for (const auto& [count, scale] : parts) {
        for (const float* const last = value + count; value < last; ++value) *value *= scale;
      }
    }
  });
}

void Mamba2::recur(Worker& worker, const SequenceTokens& tokens, int head) const {
  const int size = plan_.size(), groups = plan_.group_size(), dim = plan_.state_dim, heads = plan_.num_heads;
  const int group = head / (heads / plan_.num_groups), sure = tokens.count - tokens.draft_tokens;
  const TokenRows row = tokens.logged ? convolution_.log(tokens.slot) : rows(tokens.begin);
  const TokenRows gate = tokens.logged ? recurrence_.log(tokens.slot) : gates(tokens.begin);
  const float rate = std::exp(a_log_[head]);
  for (int t = 0; t < tokens.count; ++t) {
    float& dt = gate[t][head];
    if (!tokens.logged) dt = row[t][conv_size() + size + head];
    if (t >= sure) recurrence_.log(tokens.slot)[t - sure][head] = dt;
    dt = std::clamp(softplus(dt + dt_bias_[head]), plan_.min_dt, plan_.max_dt);
    gate[t][heads + head] = std::exp(-rate * dt);
  }
  recurrence_.run(worker, tokens, head,
                  {row.first + size + groups + group * dim, row.first + size + group * dim, row.first + head * plan_.head_dim,
                   row.stride, 0, dim, plan_.head_dim, gate.first + heads + head, gate.first + head, gate.stride, nullptr,
                   false, skip_[head]});
}

void Mamba2::gate(int token) const {
  const int size = plan_.size();
  float* const x = rows(token).first;
  const float* const z = x + size + 2 * plan_.group_size();
  if (plan_.gate_first) context_.kernels.multiply_gate(Gate::kSilu, z, size, x);
  if (norm_.kind != NormKind::kNone) {
    const int part = size / plan_.norm_groups;
    for (int begin = 0; begin < size; begin += part) {
      Norm norm = norm_;
      if (norm.weight) norm.weight += begin;
      if (norm.bias) norm.bias += begin;
      context_.kernels.normalize(norm, x + begin, part);
    }
  }
  if (!plan_.gate_first) context_.kernels.multiply_gate(Gate::kSilu, z, size, x);
}

}  // namespace tidewheel
