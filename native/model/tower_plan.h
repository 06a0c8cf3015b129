// The description of a tower that the native runtime gets: the TowerSpec of engine/models/spec/tower.py.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/plan.h"

namespace tidewheel {

// act(norm(x) W^T + bias)
struct ProjectionPlan {
  int inputs = 0, outputs = 0;
  bool bias = false;
  std::optional<NormPlan> norm;
  bool activates = false;
  Activation activation = Activation::kSilu;
  void visit_fields(auto&& field) {
    field("inputs", inputs), field("outputs", outputs), field("bias", bias), field("norm", norm),
    field("activates", activates), field("activation", activation);
  }
};

// Attention of some rows to others, which has no weights.
struct CrossAttentionPlan {
  int num_heads = 0, head_dim = 0;
  float scale = 0;
  void visit_fields(auto&& field) { field("num_heads", num_heads), field("head_dim", head_dim), field("scale", scale); }
};

struct TowerPlan {
  int hidden_size = 0;
  std::vector<std::vector<ResidualBlockPlan>> layers;
  std::map<std::string, ProjectionPlan> projections;
  std::map<std::string, CrossAttentionPlan> cross_attentions;
  std::map<std::string, WeightFormat> formats;  // how to store each matrix, by the name of its tensor
  InputOrders input_orders;                     // for matrices whose inputs are not in the model's order
  void visit_fields(auto&& field) {
    field("hidden_size", hidden_size), field("layers", layers), field("projections", projections),
    field("cross_attentions", cross_attentions), field("formats", formats), field("input_orders", input_orders);
  }
};

}  // namespace tidewheel
