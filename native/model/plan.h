// A decoder as the native executor gets it: the DecoderSpec of engine/models/spec, part by part.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

struct NormPlan {
  NormKind kind = NormKind::kRms;
  float eps = 0;
  bool bias = false, weight = true;
  bool unit_offset = false;  // the checkpoint holds what the weight is above 1
};

struct RopePlan {
  std::vector<float> inv_freq;
  float factor = 1;
  bool interleaved = false;
};

// Every kind of mixer has a `kKind`. The names of its branch's norms begin with it.
struct AttentionPlan {
  static constexpr const char* kKind = "attention";
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 0;
  bool qkv_bias = false, out_bias = false;
  std::optional<NormPlan> qk_norm;
  bool qk_norm_whole = false;       // over all heads of a token, else over each
  std::optional<RopePlan> rope;
  int sliding_window = 0;           // 0: none
  int cache_group = 0;              // whose blocks hold its K and V
  float softcap = 0;                // of the scores; 0: none
  std::vector<float> alibi_slopes;  // a query head each; empty: none
  bool sinks = false;

  Heads heads() const { return {num_heads, num_kv_heads, head_dim}; }
  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
};

struct MlpPlan {
  static constexpr const char* kKind = "mlp";
  int intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool gated = false, bias = false;
};

struct BranchPlan;

struct ParallelPlan {
  static constexpr const char* kKind = "parallel";
  std::vector<BranchPlan> branches;
};

using MixerPlan = std::variant<AttentionPlan, MlpPlan, ParallelPlan>;

// x = sum_norm(x + scale * post_norm(mixer(norm(x))))
struct BranchPlan {
  MixerPlan mixer;
  std::optional<NormPlan> norm, post_norm, sum_norm;
  float scale = 1;
};

struct EmbeddingPlan {
  int size = 0;
  int num_positions = 0, position_offset = 0;  // num_positions 0: no learned positions
  float scale = 1;                             // of a token's row
};

// y = x W^T / divisor, then softcap * tanh(y / softcap)
struct HeadPlan {
  bool tied = false;
  float divisor = 1;
  float softcap = 0;  // 0: none
};

// By the name of a tensor: which of the model's inputs each of the matrix' inputs is.
using InputOrders = std::map<std::string, std::vector<int32_t>>;

struct DecoderPlan {
  int vocab_size = 0, hidden_size = 0, max_positions = 0;
  EmbeddingPlan embedding;
  std::vector<std::vector<BranchPlan>> layers;
  std::optional<NormPlan> final_norm;
  HeadPlan head;
  std::map<std::string, WeightFormat> formats;  // how each matrix is to be stored, by the name of its tensor
  InputOrders input_orders;  // of matrices whose inputs are not in the model's order
};

}  // namespace tidewheel
