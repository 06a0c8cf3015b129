#include "model/mixers/delta_net.h"

#include <cmath>

namespace tidewheel {
namespace {

constexpr float kLengthEps = 1e-6f;  // added to the square of a query's or key's length

}  // namespace

DeltaNet::DeltaNet(const DeltaNetPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan), values_(2 * plan.key_size()),
      convolution_(prefix + "delta_conv", values_ + plan.value_size(), plan.conv_kernel, false, true, context),
      recurrence_(plan.num_value_heads, plan.key_dim, plan.value_dim, 2 * plan.num_value_heads, context) {
  require(plan.num_key_heads > 0 && plan.num_value_heads % plan.num_key_heads == 0,
          "the number of value heads must be a multiple of the number of key heads");
  require(plan.key_dim > 0 && plan.value_dim > 0, "a head needs at least one dimension");
  const int keys = plan.key_size(), values = plan.value_size(), all = values_ + 2 * values, hidden = context.hidden_size;
  const int heads = plan.num_value_heads;
  Weights& weights = context.weights;
  weights.add_linear(prefix + "delta_q", in_, keys, hidden, false, {all, keys, 0, 0});
  weights.add_linear(prefix + "delta_k", in_, keys, hidden, false, {all, keys, 0, keys});
  weights.add_linear(prefix + "delta_v", in_, values, hidden, false, {all, values, 0, values_});
  weights.add_linear(prefix + "delta_z", in_, values, hidden, false, {all, values, 0, values_ + values});
  // A separate matrix, because quantized checkpoints leave these in full precision.
  weights.add_linear(prefix + "delta_b", gate_in_, heads, hidden, false, {2 * heads, heads, 0, 0});
  weights.add_linear(prefix + "delta_a", gate_in_, heads, hidden, false, {2 * heads, heads, 0, heads});
  weights.add_linear(prefix + "delta_out", out_, hidden, values, false);
  weights.add_vector(prefix + "delta.A_log", a_log_, heads);
  weights.add_vector(prefix + "delta.dt_bias", dt_bias_, heads);
  weights.add_norm(prefix + "delta_head_norm", head_norm_, plan.norm, plan.value_dim);
  // An RMS norm divides by length / sqrt(key_dim).
  const float dim = static_cast<float>(plan.key_dim);
  key_scale_.assign(plan.key_dim, 1 / std::sqrt(dim));
  query_scale_.assign(plan.key_dim, 1 / dim);
  rows_ = context.workspace.add<float>(round_up(all, 16));
  gates_ = context.workspace.add<float>(round_up(2 * heads, 16));
}

void DeltaNet::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  context_.gemms.run(worker, in_, input, {Epilogue::kStore, rows(0).first, rows_.stride});
  context_.gemms.run(worker, gate_in_, input, {Epilogue::kStore, gates(0).first, gates_.stride});
  context_.profile.end(worker, Phase::kQkv);
  if (!context_.states.replayed().empty()) recur_all(worker, context_.states.replayed());
  recur_all(worker, context_.states.running());
  const Rows results = results_of(step, input, rows(0).first + values_, rows_.stride);
  if (results.count == 0) return;
  context_.gemms.run(worker, out_, results, output);
  context_.profile.end(worker, Phase::kOut);
}

void DeltaNet::recur_all(Worker& worker, std::span<const SequenceTokens> sequences) const {
  share_parts(worker, sequences, plan_.num_key_heads,
              [&](const SequenceTokens& tokens, int key_head) { prepare(worker, tokens, key_head); });
  context_.profile.end(worker, Phase::kConvolution);
  share_parts(worker, sequences, plan_.num_value_heads,
              [&](const SequenceTokens& tokens, int value_head) { recur(worker, tokens, value_head); });
  context_.profile.end(worker, Phase::kRecurrence);
}

// With each key head, an equal part of the values is convolved, whichever heads these values belong to.
void DeltaNet::prepare(Worker& worker, const SequenceTokens& tokens, int key_head) const {
  const int dim = plan_.key_dim, keys = plan_.key_size();
  const int width = plan_.num_value_heads / plan_.num_key_heads * plan_.value_dim;
  const TokenRows row = tokens.logged ? convolution_.log(tokens.slot) : rows(tokens.begin);
  const auto convolve = [&](int begin, int size) {
    convolution_.run(worker, tokens, {begin, begin + size}, row.from(0, begin));
  };
  convolve(key_head * dim, dim);
  convolve(keys + key_head * dim, dim);
  convolve(values_ + key_head * width, width);
  const float eps = kLengthEps / static_cast<float>(dim);
  const Norm query{NormKind::kRms, eps, const_cast<float*>(query_scale_.data())};
  const Norm key{NormKind::kRms, eps, const_cast<float*>(key_scale_.data())};
  for (int t = 0; t < tokens.count; ++t) {
    context_.kernels.normalize(query, row[t] + key_head * dim, dim);
    context_.kernels.normalize(key, row[t] + keys + key_head * dim, dim);
  }
}

void DeltaNet::recur(Worker& worker, const SequenceTokens& tokens, int value_head) const {
  const int heads = plan_.num_value_heads, dim = plan_.value_dim;
  const int keys = plan_.num_key_heads;
  const int key_head = plan_.tiled ? value_head % keys : value_head / (heads / keys);
  const TokenRows row = tokens.logged ? convolution_.log(tokens.slot) : rows(tokens.begin);
  const TokenRows gate = tokens.logged ? recurrence_.log(tokens.slot) : gates(tokens.begin);
  for (int t = tokens.count - tokens.draft_tokens; t < tokens.count; ++t) {
    float* const logged = recurrence_.log(tokens.slot)[t - (tokens.count - tokens.draft_tokens)];
    for (const int i : {value_head, heads + value_head}) logged[i] = gate[t][i];
  }
  const float rate = std::exp(a_log_[value_head]);
  for (int t = 0; t < tokens.count; ++t) {
    float& beta = gate[t][value_head];
    float& decay = gate[t][heads + value_head];
    beta = 1 / (1 + std::exp(-beta));
    decay = std::exp(-rate * softplus(decay + dt_bias_[value_head]));
  }
  float* const values = row.first + values_ + value_head * dim;
  recurrence_.run(worker, tokens, value_head,
                  {row.first + key_head * plan_.key_dim, row.first + plan_.key_size() + key_head * plan_.key_dim, values,
                   row.stride, 0, plan_.key_dim, dim, gate.first + heads + value_head, gate.first + value_head, gate.stride,
                   nullptr, true});
  if (tokens.logged) return;  // the results of replayed tokens are not needed
  for (int t = 0; t < tokens.count; ++t) {
    float* const result = values + t * row.stride;
    context_.kernels.normalize(head_norm_, result, dim);
    context_.kernels.multiply_gate(Gate::kSilu, result + plan_.value_size(), dim, result);
  }
}

}  // namespace tidewheel
