// A decoder as the native executor sees it: engine/models/spec.py's DecoderSpec, field by field.
#pragma once

#include <optional>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

struct NormConfig {
  bool layer_norm = false;
  float eps = 0;
  bool bias = false;
};

struct LayerConfig {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 0;
  bool qkv_bias = false, out_bias = false;
  std::optional<float> qk_norm_eps;  // RMS over each head; none: no norm
  std::vector<float> inv_freq;       // empty: no rope
  float rope_factor = 1;
  int sliding_window = 0;            // 0: none
  float softcap = 0;                 // of the scores; 0: none
  std::vector<float> alibi_slopes;   // a query head each; empty: none
  int intermediate_size = 0;
  Activation activation = Activation::kSilu;
  bool gated = false, mlp_bias = false;
  NormConfig norm;
  bool post_norm = false;

  Heads heads() const { return {num_heads, num_kv_heads, head_dim}; }
  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
  int qkv_size() const { return q_size() + 2 * kv_size(); }
};

struct ModelConfig {
  int vocab_size = 0, hidden_size = 0, max_positions = 0;
  int embedding_size = 0, num_positions = 0, position_offset = 0;
  bool tied_head = false;
  std::optional<NormConfig> final_norm;
  std::vector<LayerConfig> layers;
};

}  // namespace tidewheel
