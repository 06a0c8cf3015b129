// The description of a decoder that the native executor gets: the DecoderSpec of engine/models/spec, part by part.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/kernels.h"
#include "model/routing.h"

namespace tidewheel {

// A plan's `visit_fields` calls field(name, value) for each field that Python sets. The bindings, and their types in
// tidewheel/_native.pyi, are generated from it.

struct NormPlan {
  NormKind kind = NormKind::kRms;
  float eps = 0;
  bool bias = false, weight = true;
  bool unit_offset = false;  // the checkpoint stores the weight minus 1
  void visit_fields(auto&& field) {
    field("kind", kind), field("eps", eps), field("bias", bias), field("weight", weight),
    field("unit_offset", unit_offset);
  }
};

struct RopePlan {
  std::vector<float> inv_freq;
  float factor = 1;
  bool interleaved = false;
  std::vector<int> axes = {};  // for each of inv_freq, the axis whose positions it turns by; empty: there is only one
  void visit_fields(auto&& field) {
    field("inv_freq", inv_freq), field("factor", factor), field("interleaved", interleaved), field("axes", axes);
  }
};

// Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / length)).
struct TemperaturePlan {
  float beta = 0;
  int length = 1, offset = 0;
  void visit_fields(auto&& field) { field("beta", beta), field("length", length), field("offset", offset); }
};

// What queries and keys are normalized over: each head with the same weights, each head with its own weights, or all
// heads together.
enum class QkNormOver : int { kHead, kEach, kWhole };

// The divisors of a layer's K and V before they are cached as e4m3. Other types of cache do not use them.
struct KvScales {
  float k = 1, v = 1;
  void visit_fields(auto&& field) { field("k", k), field("v", v); }
};

// Tables that queries and keys are multiplied with, which have a row for each distance: see DisentangledSpec in
// engine/models/spec/attention.py.
struct DisentangledPlan {
  int num_rows = 0;       // of each head's tables
  std::vector<int> rows;  // the row for each distance from -span to span
  bool content_to_position = false, position_to_content = false;
  void visit_fields(auto&& field) {
    field("num_rows", num_rows), field("rows", rows), field("content_to_position", content_to_position),
    field("position_to_content", position_to_content);
  }
};

// Every kind of mixer has a `kKind`. The names of the norms of its residual block begin with it.
struct AttentionPlan {
  static constexpr const char* kKind = "attention";
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 0;
  bool qkv_bias = false, out_bias = false;
  std::optional<NormPlan> qk_norm;
  QkNormOver qk_norm_over = QkNormOver::kHead;
  bool qk_norm_after_rope = false;
  std::optional<RopePlan> rope;
  int sliding_window = 0;           // 0: none
  int cache_group = 0;              // the group whose blocks hold its K and V
  float softcap = 0;                // of the scores; 0: none
  std::vector<float> alibi_slopes;  // one for each query head; empty: none
  int bias_span = 0;                // a learned bias for each distance up to this, and for those beyond; 0: none
  bool sinks = false;
  bool output_gate = false;         // a head's output is multiplied by sigmoid(q_gate x)
  std::optional<TemperaturePlan> query_temperature;
  std::optional<NormPlan> v_norm;   // of each value head
  bool values_from_keys = false;    // values are the keys before norm and rope
  int shared_layer = -1;            // layer of its group's cache whose K and V it reads instead of its own; -1: none
  KvScales kv_scales = {};          // those of the layer whose K and V it reads
  bool two_way = false;             // tokens see up to Step::visible_until
  bool clipped = false;             // see ClippedLinear; only in towers
  std::optional<DisentangledPlan> disentangled;  // only in towers
  // Python does not set these three: Tower does, and Eagle3.
  bool projected = false;           // its rows are q, k and v, and its result is stored as it is; only in towers
  int input_size = 0;               // size of its input rows; 0: the hidden size
  bool skips_first = false;         // hide a sequence's first token; only for steps with one token each

  void visit_fields(auto&& field) {
    field("num_heads", num_heads), field("num_kv_heads", num_kv_heads), field("head_dim", head_dim),
    field("scale", scale), field("qkv_bias", qkv_bias), field("out_bias", out_bias), field("qk_norm", qk_norm),
    field("qk_norm_over", qk_norm_over), field("qk_norm_after_rope", qk_norm_after_rope), field("rope", rope),
    field("sliding_window", sliding_window), field("cache_group", cache_group), field("softcap", softcap),
    field("alibi_slopes", alibi_slopes), field("bias_span", bias_span), field("sinks", sinks),
    field("output_gate", output_gate),
    field("query_temperature", query_temperature), field("v_norm", v_norm), field("values_from_keys", values_from_keys),
    field("shared_layer", shared_layer), field("kv_scales", kv_scales),
    field("two_way", two_way), field("clipped", clipped), field("disentangled", disentangled);
  }
  Heads heads() const { return {num_heads, num_kv_heads, head_dim}; }
  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
  // The number of weights in the norms of queries and keys.
  int q_norm_size() const { return qk_norm_over == QkNormOver::kHead ? head_dim : q_size(); }
  int k_norm_size() const { return qk_norm_over == QkNormOver::kHead ? head_dim : kv_size(); }
};

// Multi-head latent attention: see engine/models/spec/latent_attention.py.
struct LatentAttentionPlan {
  static constexpr const char* kKind = "latent_attention";
  int num_heads = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;  // of each head
  int kv_rank = 0, q_rank = 0;                                   // q_rank 0: queries have one matrix
  float scale = 0;
  bool bias = false;
  NormPlan norm;
  RopePlan rope;
  int cache_group = 0;
  float kv_scale = 1;  // the divisor of cached latents, as in KvScales

  void visit_fields(auto&& field) {
    field("num_heads", num_heads), field("nope_dim", nope_dim), field("rope_dim", rope_dim),
    field("value_dim", value_dim), field("kv_rank", kv_rank), field("q_rank", q_rank), field("scale", scale),
    field("bias", bias), field("norm", norm), field("rope", rope), field("cache_group", cache_group),
    field("kv_scale", kv_scale);
  }
  // A token has one KV head: K is the rotated part followed by the latent, and V is the latent, a part of K.
  Heads heads() const { return {num_heads, 1, rope_dim + kv_rank, kv_rank, rope_dim}; }
  int q_size() const { return num_heads * (nope_dim + rope_dim); }
};

struct MlpPlan {
  static constexpr const char* kKind = "mlp";
  int intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool gated = false, bias = false;
  bool down_bias = false;  // down has one, even if the others have none
  float gate_scale = 1;  // factor for the activation's input, if gated
  std::optional<float> cutoff = {};  // for a gate's values, in standard deviations above their mean
  bool clipped = false;              // see ClippedLinear; only in towers
  void visit_fields(auto&& field) {
    field("intermediate_size", intermediate_size), field("activation", activation), field("gated", gated),
    field("bias", bias), field("down_bias", down_bias), field("gate_scale", gate_scale), field("cutoff", cutoff),
    field("clipped", clipped);
  }
};

// Gated delta net, Mamba2, and LFM2's convolution: see engine/models/spec.
struct DeltaNetPlan {
  static constexpr const char* kKind = "delta_net";
  int num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
  int conv_kernel = 0;
  NormPlan norm;       // of each head's outputs
  bool tiled = false;  // value head i has key head i % num_key_heads; otherwise a key head's value heads are neighbours

  void visit_fields(auto&& field) {
    field("num_key_heads", num_key_heads), field("num_value_heads", num_value_heads), field("key_dim", key_dim),
    field("value_dim", value_dim), field("conv_kernel", conv_kernel), field("norm", norm), field("tiled", tiled);
  }
  int key_size() const { return num_key_heads * key_dim; }
  int value_size() const { return num_value_heads * value_dim; }
};

struct Mamba2Plan {
  static constexpr const char* kKind = "mamba2";
  int num_heads = 0, head_dim = 0, num_groups = 0, state_dim = 0;
  int conv_kernel = 0;
  std::optional<NormPlan> norm;  // of each of norm_groups parts of all heads' outputs
  int norm_groups = 1;
  bool gate_first = true;        // otherwise the gate multiplies the norm's output
  float min_dt = 0, max_dt = 0;
  bool conv_bias = false, bias = false;
  std::array<float, 5> input_scales = {1, 1, 1, 1, 1};  // for z, x, B, C and the time steps

  void visit_fields(auto&& field) {
    field("num_heads", num_heads), field("head_dim", head_dim), field("num_groups", num_groups),
    field("state_dim", state_dim), field("conv_kernel", conv_kernel), field("norm", norm),
    field("norm_groups", norm_groups), field("gate_first", gate_first), field("min_dt", min_dt),
    field("max_dt", max_dt), field("conv_bias", conv_bias), field("bias", bias), field("input_scales", input_scales);
  }
  int size() const { return num_heads * head_dim; }
  int group_size() const { return num_groups * state_dim; }
};

struct ShortConvPlan {
  static constexpr const char* kKind = "short_conv";
  int size = 0, conv_kernel = 0;
  bool bias = false;
  void visit_fields(auto&& field) { field("size", size), field("conv_kernel", conv_kernel), field("bias", bias); }
};

// A router, and MLPs from which it chooses a few for each token.
struct ExpertsPlan {
  static constexpr const char* kKind = "experts";
  int num_experts = 0, experts_per_token = 0, intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool bias = false;
  float swiglu_limit = 0;     // above 0: gpt-oss's activation
  bool weighs_input = false;  // an expert's input is multiplied by its weight, instead of its output
  RouterPlan router;
  int shared_size = 0;        // intermediate size of the expert that computes every token; 0: there is none
  Activation shared_activation = Activation::kSilu;
  bool shared_gate = false;
  bool gated = true;          // all MLPs, the shared one included
  bool unpacked = false;      // routed experts' matrices stay as they are in the checkpoint and are packed when used
  // Experts read input_norm(x), and the router router_input_scale * router_norm(x).
  std::optional<NormPlan> input_norm = {}, router_norm = {};
  float router_input_scale = 1;
  bool sum_bias = false;      // a bias is added to the sum of the experts' results
  void visit_fields(auto&& field) {
    field("num_experts", num_experts), field("experts_per_token", experts_per_token),
    field("intermediate_size", intermediate_size), field("activation", activation), field("bias", bias),
    field("swiglu_limit", swiglu_limit), field("weighs_input", weighs_input), field("router", router),
    field("shared_size", shared_size), field("shared_activation", shared_activation), field("shared_gate", shared_gate),
    field("gated", gated), field("unpacked", unpacked), field("input_norm", input_norm),
    field("router_norm", router_norm), field("router_input_scale", router_input_scale), field("sum_bias", sum_bias);
  }
};

// projection(act(gate(x)) * p), where p is the token's per-layer embedding for `layer`.
struct PerLayerPlan {
  static constexpr const char* kKind = "per_layer";
  int layer = 0, size = 0;
  Activation activation = Activation::kGeluTanh;
  void visit_fields(auto&& field) { field("layer", layer), field("size", size), field("activation", activation); }
};

struct ResidualBlockPlan;

struct ParallelPlan {
  static constexpr const char* kKind = "parallel";
  std::vector<ResidualBlockPlan> residuals;
  void visit_fields(auto&& field) { field("residuals", residuals); }
};

// x + norm(up(down(x)))
struct LaurelPlan {
  static constexpr const char* kKind = "laurel";
  int rank = 0;
  NormPlan norm;
  void visit_fields(auto&& field) { field("rank", rank), field("norm", norm); }
};

// A layer over several streams: see engine/models/spec/alt_up.py.
struct AltUpPlan {
  static constexpr const char* kKind = "alt_up";
  int streams = 0, active = 0;
  NormPlan norm;
  std::vector<ResidualBlockPlan> residuals;
  std::vector<ResidualBlockPlan> passive;  // one
  bool scaled = true;
  void visit_fields(auto&& field) {
    field("streams", streams), field("active", active), field("norm", norm), field("residuals", residuals),
    field("passive", passive), field("scaled", scaled);
  }
};

using MixerPlan = std::variant<AttentionPlan, MlpPlan, ExpertsPlan, ParallelPlan, DeltaNetPlan, Mamba2Plan, ShortConvPlan,
                               PerLayerPlan, LatentAttentionPlan, LaurelPlan, AltUpPlan>;

// x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))
struct ResidualBlockPlan {
  MixerPlan mixer;
  std::optional<NormPlan> norm, post_norm, sum_norm;
  float scale = 1;
  bool sum_scale = false;  // whether the checkpoint has this number
  float sum_factor = 1;
  void visit_fields(auto&& field) {
    field("mixer", mixer), field("norm", norm), field("post_norm", post_norm), field("sum_norm", sum_norm),
    field("scale", scale), field("sum_scale", sum_scale), field("sum_factor", sum_factor);
  }
};

// A token's per-layer embeddings: sum_scale * (norm(projection_scale * W x) + scale * table[id]).
struct PerLayerEmbeddingPlan {
  int vocab_size = 0, size = 0;
  float scale = 1, projection_scale = 1, sum_scale = 1;
  NormPlan norm;
  void visit_fields(auto&& field) {
    field("vocab_size", vocab_size), field("size", size), field("scale", scale),
    field("projection_scale", projection_scale), field("sum_scale", sum_scale), field("norm", norm);
  }
};

struct EmbeddingPlan {
  int size = 0;
  int num_positions = 0, position_offset = 0;  // num_positions 0: no learned positions
  float scale = 1;                             // of a token's row
  std::optional<NormPlan> norm;                // of the sum of row and position
  std::optional<PerLayerEmbeddingPlan> per_layer;
  void visit_fields(auto&& field) {
    field("size", size), field("num_positions", num_positions), field("position_offset", position_offset),
    field("scale", scale), field("norm", norm), field("per_layer", per_layer);
  }
};

// y = (x W^T + bias) / divisor, then softcap * tanh(y / softcap)
struct HeadPlan {
  bool tied = false;
  float divisor = 1;
  float softcap = 0;  // 0: none
  bool bias = false;
  void visit_fields(auto&& field) {
    field("tied", tied), field("divisor", divisor), field("softcap", softcap), field("bias", bias);
  }
};

// The several streams that a token has instead of one row: see engine/models/spec/alt_up.py.
struct StreamsPlan {
  int count = 0;
  float min_square = 0;
  void visit_fields(auto&& field) { field("count", count), field("min_square", min_square); }
};

// By the name of a tensor: for each of the matrix's inputs, the model's input that it is.
using InputOrders = std::map<std::string, std::vector<int32_t>>;

// A draft head that predicts the token after the next one, for drafts of at most num_draft_tokens: see
// engine/models/spec/mtp.py.
struct MtpPlan {
  NormPlan embedding_norm, hidden_norm;
  std::vector<ResidualBlockPlan> layer;
  NormPlan final_norm;
  bool feeds_normed = true;
  int num_draft_tokens = 0;
  void visit_fields(auto&& field) {
    field("embedding_norm", embedding_norm), field("hidden_norm", hidden_norm), field("layer", layer),
    field("final_norm", final_norm), field("feeds_normed", feeds_normed), field("num_draft_tokens", num_draft_tokens);
  }
};

// A draft head that predicts the next token from the inputs of three of the model's layers, for drafts of at most
// num_draft_tokens: see engine/models/spec/eagle3.py.
struct Eagle3Plan {
  int hidden_size = 0, vocab_size = 0;
  std::vector<int> layers;         // it takes their input rows; the number of layers: the last one's output
  NormPlan embedding_norm, hidden_norm;
  AttentionPlan attention;         // over rows of twice the hidden size
  ResidualBlockPlan mlp;
  NormPlan final_norm;
  bool own_embedding = false;
  bool adds_normed = false;        // attention's output is added to the normalized hidden row
  std::vector<int32_t> token_ids;  // its tokens' ids in the model's vocabulary; empty: the same
  int num_draft_tokens = 0;
  void visit_fields(auto&& field) {
    field("hidden_size", hidden_size), field("vocab_size", vocab_size), field("layers", layers),
    field("embedding_norm", embedding_norm), field("hidden_norm", hidden_norm), field("attention", attention),
    field("mlp", mlp), field("final_norm", final_norm), field("own_embedding", own_embedding),
    field("adds_normed", adds_normed), field("token_ids", token_ids), field("num_draft_tokens", num_draft_tokens);
  }
};

// A pipeline stage has some of the layers, and nothing in place of the others. A stage that does not embed gets rows
// instead of tokens. A stage without the head outputs rows. See Step::rows.
struct DecoderPlan {
  int vocab_size = 0, hidden_size = 0, max_positions = 0;
  bool embeds = true, has_head = true;
  EmbeddingPlan embedding;
  std::vector<std::vector<ResidualBlockPlan>> layers;
  std::optional<NormPlan> final_norm;
  HeadPlan head;
  std::optional<StreamsPlan> streams = {};
  std::optional<MtpPlan> mtp = {};
  std::optional<Eagle3Plan> eagle3 = {};  // instead of mtp
  std::map<std::string, WeightFormat> formats;  // how to store each matrix, by the name of its tensor
  InputOrders input_orders;  // for matrices whose inputs are not in the model's order
  void visit_fields(auto&& field) {
    field("vocab_size", vocab_size), field("hidden_size", hidden_size), field("max_positions", max_positions),
    field("embeds", embeds), field("has_head", has_head), field("embedding", embedding), field("layers", layers),
    field("final_norm", final_norm), field("head", head), field("streams", streams), field("mtp", mtp),
    field("eagle3", eagle3), field("formats", formats), field("input_orders", input_orders);
  }
};

}  // namespace tidewheel
