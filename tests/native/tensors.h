// The tensors that a plan needs: engine/models/spec's `tensor_shapes`, for tests that know no Python.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/plan.h"

namespace tidewheel::test {

using Shapes = std::map<std::string, std::vector<int64_t>>;

inline void add_linear(Shapes& shapes, const std::string& name, int rows, int cols, bool bias) {
  shapes[name + ".weight"] = {rows, cols};
  if (bias) shapes[name + ".bias"] = {rows};
}

inline void add_norm(Shapes& shapes, const std::string& name, const std::optional<NormPlan>& norm, int size) {
  if (norm && norm->weight) shapes[name + ".weight"] = {size};
  if (norm && norm->bias) shapes[name + ".bias"] = {size};
}

inline void add_residual(Shapes& shapes, const std::string& prefix, const ResidualBlockPlan& residual, int hidden);

inline void add_mixer(Shapes& shapes, const std::string& prefix, const AttentionPlan& plan, int hidden) {
  add_linear(shapes, prefix + "q", plan.q_size(), hidden, plan.qkv_bias);
  add_linear(shapes, prefix + "k", plan.kv_size(), hidden, plan.qkv_bias);
  add_linear(shapes, prefix + "v", plan.kv_size(), hidden, plan.qkv_bias);
  add_linear(shapes, prefix + "o", hidden, plan.q_size(), plan.out_bias);
  add_norm(shapes, prefix + "q_norm", plan.qk_norm, plan.q_norm_size());
  add_norm(shapes, prefix + "k_norm", plan.qk_norm, plan.k_norm_size());
  if (plan.sinks) shapes[prefix + "sinks"] = {plan.num_heads};
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const MlpPlan& plan, int hidden) {
  if (plan.gated) add_linear(shapes, prefix + "gate", plan.intermediate_size, hidden, plan.bias);
  add_linear(shapes, prefix + "up", plan.intermediate_size, hidden, plan.bias);
  add_linear(shapes, prefix + "down", hidden, plan.intermediate_size, plan.bias);
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const ExpertsPlan& plan, int hidden) {
  add_linear(shapes, prefix + "router", plan.num_experts, hidden, plan.router.bias);
  const MlpPlan expert{plan.intermediate_size, plan.activation, plan.gated, plan.bias};
  for (int e = 0; e < plan.num_experts; ++e) {
    add_mixer(shapes, prefix + "experts." + std::to_string(e) + ".", expert, hidden);
  }
  const MlpPlan shared{plan.shared_size, plan.activation, plan.gated};
  if (plan.shared_size) add_mixer(shapes, prefix + "shared.", shared, hidden);
  if (plan.shared_gate) add_linear(shapes, prefix + "shared_gate", 1, hidden, false);
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const ParallelPlan& plan, int hidden) {
  for (const ResidualBlockPlan& residual : plan.residuals) add_residual(shapes, prefix, residual, hidden);
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const DeltaNetPlan& plan, int hidden) {
  const int keys = plan.key_size(), values = plan.value_size(), heads = plan.num_value_heads;
  const std::pair<const char*, int> inputs[] = {{"q", keys}, {"k", keys}, {"v", values}, {"z", values}, {"b", heads}, {"a", heads}};
  for (const auto& [name, size] : inputs) add_linear(shapes, prefix + "delta_" + name, size, hidden, false);
  shapes[prefix + "delta_conv.weight"] = {plan.conv_kernel * (2 * keys + values)};
  shapes[prefix + "delta.A_log"] = shapes[prefix + "delta.dt_bias"] = {heads};
  add_norm(shapes, prefix + "delta_head_norm", plan.norm, plan.value_dim);
  add_linear(shapes, prefix + "delta_out", hidden, values, false);
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const Mamba2Plan& plan, int hidden) {
  const int size = plan.size(), groups = plan.group_size(), heads = plan.num_heads;
  const std::pair<const char*, int> inputs[] = {{"z", size}, {"x", size}, {"B", groups}, {"C", groups}, {"dt", heads}};
  for (const auto& [name, count] : inputs) add_linear(shapes, prefix + "mamba_" + name, count, hidden, plan.bias);
  shapes[prefix + "mamba_conv.weight"] = {plan.conv_kernel * (size + 2 * groups)};
  if (plan.conv_bias) shapes[prefix + "mamba_conv.bias"] = {size + 2 * groups};
  for (const char* name : {"A_log", "D", "dt_bias"}) shapes[prefix + "mamba." + name] = {heads};
  add_norm(shapes, prefix + "mamba_gated_norm", plan.norm, size);
  add_linear(shapes, prefix + "mamba_out", hidden, size, plan.bias);
}

inline void add_mixer(Shapes& shapes, const std::string& prefix, const ShortConvPlan& plan, int hidden) {
  for (const char* name : {"b", "c", "x"}) add_linear(shapes, prefix + "conv_" + name, plan.size, hidden, plan.bias);
  shapes[prefix + "conv_taps.weight"] = {plan.conv_kernel * plan.size};
  if (plan.bias) shapes[prefix + "conv_taps.bias"] = {plan.size};
  add_linear(shapes, prefix + "conv_out", hidden, plan.size, plan.bias);
}

// Kinds that tests of Python compare with their definitions.
template <typename Plan>
void add_mixer(Shapes&, const std::string&, const Plan&, int) {
  throw std::invalid_argument(std::string("plain decoders have no ") + Plan::kKind);
}

inline std::string kind_of(const ResidualBlockPlan& residual) {
  return std::visit([](const auto& mixer) { return std::string(mixer.kKind); }, residual.mixer);
}

inline void add_residual(Shapes& shapes, const std::string& prefix, const ResidualBlockPlan& residual, int hidden) {
  add_norm(shapes, prefix + kind_of(residual) + "_norm", residual.norm, hidden);
  add_norm(shapes, prefix + kind_of(residual) + "_post_norm", residual.post_norm, hidden);
  add_norm(shapes, prefix + kind_of(residual) + "_sum_norm", residual.sum_norm, hidden);
  std::visit([&](const auto& mixer) { add_mixer(shapes, prefix, mixer, hidden); }, residual.mixer);
}

inline Shapes tensor_shapes(const DecoderPlan& plan) {
  const int hidden = plan.hidden_size;
  const EmbeddingPlan& embedding = plan.embedding;
  Shapes shapes = {{"embed.weight", {plan.vocab_size, embedding.size}}};
  if (embedding.num_positions) shapes["embed.positions"] = {embedding.num_positions + embedding.position_offset, hidden};
  if (embedding.size != hidden) {
    add_linear(shapes, "embed.project_in", hidden, embedding.size, false);
    add_linear(shapes, "embed.project_out", embedding.size, hidden, false);
  }
  add_norm(shapes, "embed.norm", embedding.norm, hidden);
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    for (const ResidualBlockPlan& residual : plan.layers[i]) add_residual(shapes, "layers." + std::to_string(i) + ".", residual, hidden);
  }
  add_norm(shapes, "final_norm", plan.final_norm, hidden);
  if (!plan.head.tied) shapes["head.weight"] = {plan.vocab_size, embedding.size};
  if (plan.head.bias) shapes["head.bias"] = {plan.vocab_size};
  return shapes;
}

// The plan with one format for all matrices but learned positions, which are floats.
inline DecoderPlan stored_as(DecoderPlan plan, const WeightFormat& format) {
  for (const auto& [name, shape] : tensor_shapes(plan)) {
    if (shape.size() == 2) plan.formats[name] = name == "embed.positions" ? WeightFormat{} : format;
  }
  return plan;
}

}  // namespace tidewheel::test
