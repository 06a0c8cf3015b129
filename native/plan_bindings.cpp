#include "plan_bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "kernels/block_formats.h"
#include "model/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidewheel {
namespace {

// "grid" and the types of quantized files keep the file's bits. The other parameters are a grid's.
WeightFormat parse_block_format(const std::string& kind, int group, bool zero_points, int bits, const std::string& scale_type,
                                const std::vector<float>& table) {
  const BlockTypeInfo* info = find_block_type(kind);
  if (info && is_small_floats(info->type)) {
    if (info->type == BlockType::kTable4 && table.size() != 16) throw std::invalid_argument("a table has 16 numbers");
    const auto format = small_float_format(info->type, group, table.data());
    if (!format) {
      throw std::invalid_argument("small floats have groups of 32, 64 or a multiple of 128, not " + std::to_string(group));
    }
    return *format;
  }
  if (info) return info->format;
  const std::map<std::string, DType> types = {
      {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}, {"float16", DType::kFloat16}};
  const auto type = types.find(scale_type);
  if (type == types.end()) throw std::invalid_argument("scales are float32, bfloat16 or float16, not " + scale_type);
  const auto format = grid_format(bits, group, zero_points, type->second);
  if (!format) {
    throw std::invalid_argument("a grid has 2, 3, 4 or 8 bits and groups of 32, 64, 128 or a multiple of 256, not " +
                                std::to_string(bits) + " and " + std::to_string(group));
  }
  return *format;
}

WeightFormat parse_format(const std::string& kind, int group, bool zero_points, int bits, const std::string& scale_type,
                          const std::vector<float>& table) {
  if (kind == "grid" || find_block_type(kind)) return parse_block_format(kind, group, zero_points, bits, scale_type, table);
  static const std::map<std::string, WeightKind> kinds = {
      {"float32", WeightKind::kFloat32}, {"bfloat16", WeightKind::kBFloat16},        {"float16", WeightKind::kFloat16},
      {"int8", WeightKind::kInt8},       {"int8-channel", WeightKind::kInt8Channel}, {"int4", WeightKind::kInt4}};
  const auto found = kinds.find(kind);
  if (found == kinds.end()) {
    throw std::invalid_argument("a weight is stored as float32, bfloat16, float16, int8, int8-channel, int4, grid or as a type of quantized files, not " + kind);
  }
  if (found->second != WeightKind::kInt4) return {found->second};
  if (group != 32 && group != 64 && group != 128) throw std::invalid_argument("int4 has groups of 32, 64 or 128");
  return {WeightKind::kInt4, group, zero_points};
}

QkNormOver parse_qk_norm_over(const std::string& name) {
  if (name == "head") return QkNormOver::kHead;
  if (name == "each") return QkNormOver::kEach;
  if (name == "whole") return QkNormOver::kWhole;
  throw std::invalid_argument("queries and keys are normalized over head, each or whole, not " + name);
}

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  if (name == "relu2") return Activation::kRelu2;
  throw std::invalid_argument("activation must be silu, gelu, gelu_tanh, relu or relu2, not " + name);
}

}  // namespace

const float* kept_scale_table(const std::vector<float>& table) {
  if (table.size() != 256) throw std::invalid_argument("a table of scales has 256 numbers");
  static std::mutex mutex;
  static std::set<std::vector<float>> tables;
  const std::lock_guard lock(mutex);
  return tables.insert(table).first->data();
}

void bind_plans(nb::module_& m) {
  nb::class_<WeightFormat>(m, "WeightFormat")
      .def("__init__", [](WeightFormat* self, const std::string& kind, int group, bool zero_points, int bits,
                          const std::string& scale_type, const std::vector<float>& table,
                          const std::vector<float>& scale_table, int scale_run) {
        new (self) WeightFormat(parse_format(kind, group, zero_points, bits, scale_type, table));
        if (scale_table.empty()) return;
        if (self->kind != WeightKind::kTable4 || scale_run <= 0) {
          throw std::invalid_argument("scales in 8 bits are for table4, and have runs of groups");
        }
        self->scale_table = kept_scale_table(scale_table);
        self->scale_run = scale_run;
      }, "kind"_a, "group"_a = kRowGroup, "zero_points"_a = false, "bits"_a = 4, "scale_type"_a = "float16",
           "table"_a = std::vector<float>(), "scale_table"_a = std::vector<float>(), "scale_run"_a = 0);

  nb::class_<NormPlan>(m, "NormPlan")
      .def("__init__", [](NormPlan* self, bool layer_norm, float eps, bool bias, bool weight, bool unit_offset) {
        new (self) NormPlan{layer_norm ? NormKind::kLayer : NormKind::kRms, eps, bias, weight, unit_offset};
      }, "layer_norm"_a, "eps"_a, "bias"_a, "weight"_a, "unit_offset"_a);

  nb::class_<RopePlan>(m, "RopePlan")
      .def("__init__", [](RopePlan* self, std::vector<float> inv_freq, float factor, bool interleaved) {
        new (self) RopePlan{std::move(inv_freq), factor, interleaved};
      }, "inv_freq"_a, "factor"_a, "interleaved"_a);

  nb::class_<TemperaturePlan>(m, "TemperaturePlan")
      .def("__init__", [](TemperaturePlan* self, float beta, int length, int offset) {
        new (self) TemperaturePlan{beta, length, offset};
      }, "beta"_a, "length"_a, "offset"_a);

  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<>())
      .def_rw("num_heads", &AttentionPlan::num_heads)
      .def_rw("num_kv_heads", &AttentionPlan::num_kv_heads)
      .def_rw("head_dim", &AttentionPlan::head_dim)
      .def_rw("scale", &AttentionPlan::scale)
      .def_rw("qkv_bias", &AttentionPlan::qkv_bias)
      .def_rw("out_bias", &AttentionPlan::out_bias)
      .def_rw("qk_norm", &AttentionPlan::qk_norm, nb::arg().none())
      .def("normalize_over", [](AttentionPlan& self, const std::string& name) { self.qk_norm_over = parse_qk_norm_over(name); },
           "name"_a)
      .def_rw("qk_norm_after_rope", &AttentionPlan::qk_norm_after_rope)
      .def_rw("rope", &AttentionPlan::rope, nb::arg().none())
      .def_rw("sliding_window", &AttentionPlan::sliding_window)
      .def_rw("cache_group", &AttentionPlan::cache_group)
      .def_rw("softcap", &AttentionPlan::softcap)
      .def_rw("alibi_slopes", &AttentionPlan::alibi_slopes)
      .def_rw("sinks", &AttentionPlan::sinks)
      .def_rw("output_gate", &AttentionPlan::output_gate)
      .def_rw("query_temperature", &AttentionPlan::query_temperature, nb::arg().none())
      .def_rw("v_norm", &AttentionPlan::v_norm, nb::arg().none())
      .def_rw("values_from_keys", &AttentionPlan::values_from_keys)
      .def_rw("shared_layer", &AttentionPlan::shared_layer)
      .def("scale_kv", [](AttentionPlan& self, float k, float v) { self.kv_scales = {k, v}; }, "k"_a, "v"_a);

  nb::class_<LatentAttentionPlan>(m, "LatentAttentionPlan")
      .def("__init__", [](LatentAttentionPlan* self, const NormPlan& norm, const RopePlan& rope) {
        new (self) LatentAttentionPlan{.norm = norm, .rope = rope};
      }, "norm"_a, "rope"_a)
      .def_rw("num_heads", &LatentAttentionPlan::num_heads)
      .def_rw("nope_dim", &LatentAttentionPlan::nope_dim)
      .def_rw("rope_dim", &LatentAttentionPlan::rope_dim)
      .def_rw("value_dim", &LatentAttentionPlan::value_dim)
      .def_rw("kv_rank", &LatentAttentionPlan::kv_rank)
      .def_rw("q_rank", &LatentAttentionPlan::q_rank)
      .def_rw("scale", &LatentAttentionPlan::scale)
      .def_rw("bias", &LatentAttentionPlan::bias)
      .def_rw("cache_group", &LatentAttentionPlan::cache_group)
      .def_rw("kv_scale", &LatentAttentionPlan::kv_scale);

  nb::class_<MlpPlan>(m, "MlpPlan")
      .def("__init__", [](MlpPlan* self, int intermediate_size, const std::string& activation, bool gated, bool bias,
                          float gate_scale, std::optional<float> cutoff) {
        new (self) MlpPlan{intermediate_size, parse_activation(activation), gated, bias, gate_scale, cutoff};
      }, "intermediate_size"_a, "activation"_a, "gated"_a, "bias"_a, "gate_scale"_a = 1.0f,
         "cutoff"_a.none() = nb::none());

  nb::class_<DeltaNetPlan>(m, "DeltaNetPlan")
      .def("__init__", [](DeltaNetPlan* self, int num_key_heads, int num_value_heads, int key_dim, int value_dim,
                          int conv_kernel, NormPlan norm, bool tiled) {
        new (self) DeltaNetPlan{num_key_heads, num_value_heads, key_dim, value_dim, conv_kernel, norm, tiled};
      }, "num_key_heads"_a, "num_value_heads"_a, "key_dim"_a, "value_dim"_a, "conv_kernel"_a, "norm"_a, "tiled"_a);

  nb::class_<Mamba2Plan>(m, "Mamba2Plan")
      .def(nb::init<>())
      .def_rw("num_heads", &Mamba2Plan::num_heads)
      .def_rw("head_dim", &Mamba2Plan::head_dim)
      .def_rw("num_groups", &Mamba2Plan::num_groups)
      .def_rw("state_dim", &Mamba2Plan::state_dim)
      .def_rw("conv_kernel", &Mamba2Plan::conv_kernel)
      .def_rw("norm", &Mamba2Plan::norm, nb::arg().none())
      .def_rw("norm_groups", &Mamba2Plan::norm_groups)
      .def_rw("gate_first", &Mamba2Plan::gate_first)
      .def_rw("min_dt", &Mamba2Plan::min_dt)
      .def_rw("max_dt", &Mamba2Plan::max_dt)
      .def_rw("conv_bias", &Mamba2Plan::conv_bias)
      .def_rw("bias", &Mamba2Plan::bias)
      .def_rw("input_scales", &Mamba2Plan::input_scales);

  nb::class_<ShortConvPlan>(m, "ShortConvPlan")
      .def("__init__", [](ShortConvPlan* self, int size, int conv_kernel, bool bias) {
        new (self) ShortConvPlan{size, conv_kernel, bias};
      }, "size"_a, "conv_kernel"_a, "bias"_a);
  nb::class_<RouterPlan>(m, "RouterPlan")
      .def("__init__", [](RouterPlan* self, bool sigmoid, bool normalize, bool bias, bool correction_bias, int num_groups,
                          int kept_groups, bool best_two, float scale, bool expert_scales, bool sparse_mixer,
                          float jitter) {
        new (self) RouterPlan{sigmoid, normalize, bias, correction_bias, num_groups, kept_groups, best_two, scale,
                              expert_scales, sparse_mixer, jitter};
      }, "sigmoid"_a, "normalize"_a, "bias"_a, "correction_bias"_a, "num_groups"_a, "kept_groups"_a, "best_two"_a, "scale"_a,
         "expert_scales"_a = false, "sparse_mixer"_a = false, "jitter"_a = 0.0f);

  nb::class_<ExpertsPlan>(m, "ExpertsPlan")
      .def("__init__", [](ExpertsPlan* self, int num_experts, int experts_per_token, int intermediate_size,
                          const std::string& activation, bool bias, float swiglu_limit, bool weighs_input, RouterPlan router,
                          int shared_size, const std::string& shared_activation, bool shared_gate, bool gated,
                          bool unpacked, std::optional<NormPlan> input_norm, std::optional<NormPlan> router_norm,
                          float router_input_scale) {
        new (self) ExpertsPlan{num_experts, experts_per_token, intermediate_size, parse_activation(activation), bias,
                               swiglu_limit, weighs_input, router, shared_size, parse_activation(shared_activation),
                               shared_gate, gated, unpacked, input_norm, router_norm, router_input_scale};
      }, "num_experts"_a, "experts_per_token"_a, "intermediate_size"_a, "activation"_a, "bias"_a, "swiglu_limit"_a,
         "weighs_input"_a, "router"_a, "shared_size"_a, "shared_activation"_a, "shared_gate"_a,
         "gated"_a = true, "unpacked"_a = false, "input_norm"_a.none() = nb::none(), "router_norm"_a.none() = nb::none(),
         "router_input_scale"_a = 1.0f);

  nb::class_<ParallelPlan>(m, "ParallelPlan")
      .def("__init__", [](ParallelPlan* self, std::vector<ResidualBlockPlan> residuals) {
        new (self) ParallelPlan{std::move(residuals)};
      }, "residuals"_a);

  nb::class_<PerLayerPlan>(m, "PerLayerPlan")
      .def("__init__", [](PerLayerPlan* self, int layer, int size, const std::string& activation) {
        new (self) PerLayerPlan{layer, size, parse_activation(activation)};
      }, "layer"_a, "size"_a, "activation"_a);

  nb::class_<LaurelPlan>(m, "LaurelPlan")
      .def("__init__", [](LaurelPlan* self, int rank, const NormPlan& norm) { new (self) LaurelPlan{rank, norm}; },
           "rank"_a, "norm"_a);

  nb::class_<AltUpPlan>(m, "AltUpPlan")
      .def("__init__", [](AltUpPlan* self, int streams, int active, const NormPlan& norm, std::vector<ResidualBlockPlan> residuals,
                          ResidualBlockPlan passive, bool scaled) {
        new (self) AltUpPlan{streams, active, norm, std::move(residuals), {std::move(passive)}, scaled};
      }, "streams"_a, "active"_a, "norm"_a, "residuals"_a, "passive"_a, "scaled"_a);

  nb::class_<StreamsPlan>(m, "StreamsPlan")
      .def("__init__", [](StreamsPlan* self, int count, float min_square) {
        new (self) StreamsPlan{count, min_square};
      }, "count"_a, "min_square"_a);

  nb::class_<ResidualBlockPlan>(m, "ResidualBlockPlan")
      .def("__init__", [](ResidualBlockPlan* self, MixerPlan mixer, std::optional<NormPlan> norm, std::optional<NormPlan> post_norm,
                          std::optional<NormPlan> sum_norm, float scale, bool sum_scale, float sum_factor) {
        new (self) ResidualBlockPlan{std::move(mixer), norm, post_norm, sum_norm, scale, sum_scale, sum_factor};
      }, "mixer"_a, "norm"_a.none(), "post_norm"_a.none(), "sum_norm"_a.none(), "scale"_a, "sum_scale"_a = false,
         "sum_factor"_a = 1.0f);

  nb::class_<PerLayerEmbeddingPlan>(m, "PerLayerEmbeddingPlan")
      .def("__init__", [](PerLayerEmbeddingPlan* self, int vocab_size, int size, float scale, float projection_scale,
                          float sum_scale, const NormPlan& norm) {
        new (self) PerLayerEmbeddingPlan{vocab_size, size, scale, projection_scale, sum_scale, norm};
      }, "vocab_size"_a, "size"_a, "scale"_a, "projection_scale"_a, "sum_scale"_a, "norm"_a);

  nb::class_<EmbeddingPlan>(m, "EmbeddingPlan")
      .def("__init__", [](EmbeddingPlan* self, int size, int num_positions, int position_offset, float scale,
                          std::optional<NormPlan> norm, std::optional<PerLayerEmbeddingPlan> per_layer) {
        new (self) EmbeddingPlan{size, num_positions, position_offset, scale, norm, per_layer};
      }, "size"_a, "num_positions"_a, "position_offset"_a, "scale"_a, "norm"_a.none(), "per_layer"_a.none() = nb::none());

  nb::class_<HeadPlan>(m, "HeadPlan")
      .def("__init__", [](HeadPlan* self, bool tied, float divisor, float softcap, bool bias) {
        new (self) HeadPlan{tied, divisor, softcap, bias};
      }, "tied"_a, "divisor"_a, "softcap"_a, "bias"_a);

  nb::class_<MtpPlan>(m, "MtpPlan")
      .def("__init__", [](MtpPlan* self, const NormPlan& embedding_norm, const NormPlan& hidden_norm,
                          std::vector<ResidualBlockPlan> layer, const NormPlan& final_norm, bool feeds_normed, int num_draft_tokens) {
        new (self) MtpPlan{embedding_norm, hidden_norm, std::move(layer), final_norm, feeds_normed, num_draft_tokens};
      }, "embedding_norm"_a, "hidden_norm"_a, "layer"_a, "final_norm"_a, "feeds_normed"_a, "num_draft_tokens"_a);

  nb::class_<Eagle3Plan>(m, "Eagle3Plan")
      .def("__init__", [](Eagle3Plan* self, const NormPlan& embedding_norm, const NormPlan& hidden_norm,
                          const AttentionPlan& attention, ResidualBlockPlan mlp, const NormPlan& final_norm) {
        new (self) Eagle3Plan{.embedding_norm = embedding_norm, .hidden_norm = hidden_norm, .attention = attention,
                              .mlp = std::move(mlp), .final_norm = final_norm};
      }, "embedding_norm"_a, "hidden_norm"_a, "attention"_a, "mlp"_a, "final_norm"_a)
      .def_rw("hidden_size", &Eagle3Plan::hidden_size)
      .def_rw("vocab_size", &Eagle3Plan::vocab_size)
      .def_rw("layers", &Eagle3Plan::layers)
      .def_rw("own_embedding", &Eagle3Plan::own_embedding)
      .def_rw("adds_normed", &Eagle3Plan::adds_normed)
      .def_rw("token_ids", &Eagle3Plan::token_ids)
      .def_rw("num_draft_tokens", &Eagle3Plan::num_draft_tokens);

  nb::class_<DecoderPlan>(m, "DecoderPlan")
      .def(nb::init<>())
      .def_rw("vocab_size", &DecoderPlan::vocab_size)
      .def_rw("hidden_size", &DecoderPlan::hidden_size)
      .def_rw("max_positions", &DecoderPlan::max_positions)
      .def_rw("embeds", &DecoderPlan::embeds)
      .def_rw("has_head", &DecoderPlan::has_head)
      .def_rw("embedding", &DecoderPlan::embedding)
      .def_rw("layers", &DecoderPlan::layers)
      .def_rw("final_norm", &DecoderPlan::final_norm, nb::arg().none())
      .def_rw("head", &DecoderPlan::head)
      .def_rw("streams", &DecoderPlan::streams, nb::arg().none())
      .def_rw("mtp", &DecoderPlan::mtp, nb::arg().none())
      .def_rw("eagle3", &DecoderPlan::eagle3, nb::arg().none())
      .def_rw("formats", &DecoderPlan::formats)
      .def_rw("input_orders", &DecoderPlan::input_orders);
}

}  // namespace tidewheel
