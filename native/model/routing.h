// Which experts compute a token, and which tokens an expert computes.
#pragma once

#include <cstdint>
#include <vector>

namespace tidewheel {

// RouterSpec of engine/models/spec/experts.py.
struct RouterPlan {
  bool sigmoid = false;  // otherwise softmax
  bool normalize = true;
  bool bias = false, correction_bias = false;
  int num_groups = 1, kept_groups = 1;
  bool best_two = false;  // a group's score is the sum of its two best experts' scores; otherwise the best one's
  float scale = 1;
  bool expert_scales = false;  // each expert has a factor for its weights
  bool sparse_mixer = false;  // choose experts one by one, with weights from near logits; otherwise by scores
  float jitter = 0;           // how near logits must be
  void visit_fields(auto&& field) {
    field("sigmoid", sigmoid), field("normalize", normalize), field("bias", bias),
    field("correction_bias", correction_bias), field("num_groups", num_groups), field("kept_groups", kept_groups),
    field("best_two", best_two), field("scale", scale), field("expert_scales", expert_scales),
    field("sparse_mixer", sparse_mixer), field("jitter", jitter);
  }
};

// Chooses `per_token` experts for one token, in ascending order. `logits` [experts] become scores. `correction` and
// `scales` are [experts], or null. `choice` [experts + groups] is scratch memory. Every choice is a valid expert,
// whatever the logits are.
void route(const RouterPlan& plan, int experts, int per_token, float* logits, const float* correction, const float* scales,
           float* choice, int32_t* chosen, float* weights);

// A step's rows sorted by expert. A row is a token for one of its experts.
class RowsByExpert {
 public:
  RowsByExpert(int experts, int per_token) : per_token_(per_token), starts_(experts + 1) { used_.reserve(experts); }

  // `chosen` and `weights` [tokens, per_token] become `token_of` and `weight_of` [rows]. An expert's rows keep the
  // order of the tokens.
  void sort(int tokens, const int32_t* chosen, const float* weights, int32_t* token_of, float* weight_of);

  // The experts that have rows, in ascending order.
  const std::vector<int32_t>& used() const { return used_; }
  int begin(int expert) const { return starts_[expert]; }
  int count(int expert) const { return starts_[expert + 1] - starts_[expert]; }

 private:
  const int per_token_;
  std::vector<int32_t> starts_;  // [experts + 1]
  std::vector<int32_t> used_;
};

}  // namespace tidewheel
