// Which experts compute a token, and which tokens an expert computes.
#pragma once

#include <cstdint>
#include <vector>

namespace tidewheel {

// RouterSpec of engine/models/spec/experts.py.
struct RouterPlan {
  bool sigmoid = false;  // else softmax
  bool normalize = true;
  bool bias = false, correction_bias = false;
  int num_groups = 1, kept_groups = 1;
  bool best_two = false;  // a group is as good as the sum of its two best experts, else as its best one
  float scale = 1;
  bool expert_scales = false;  // each expert has a number that its weights are multiplied by
  bool sparse_mixer = false;  // experts are chosen one after the other, among logits that are near; else by scores
  float jitter = 0;           // how near
  void visit_fields(auto&& field) {
    field("sigmoid", sigmoid), field("normalize", normalize), field("bias", bias),
    field("correction_bias", correction_bias), field("num_groups", num_groups), field("kept_groups", kept_groups),
    field("best_two", best_two), field("scale", scale), field("expert_scales", expert_scales),
    field("sparse_mixer", sparse_mixer), field("jitter", jitter);
  }
};

// Chooses `per_token` experts of one token, in ascending order. `logits` [experts] become scores. `correction` [experts]
// or null, and so `scales`. `choice` [experts + groups] is scratch memory. Every choice is one of the experts, whatever
// the logits are.
void route(const RouterPlan& plan, int experts, int per_token, float* logits, const float* correction, const float* scales,
           float* choice, int32_t* chosen, float* weights);

// The rows of a step, sorted by expert: a row is a token for one of its experts.
class RowsByExpert {
 public:
  RowsByExpert(int experts, int per_token) : per_token_(per_token), starts_(experts + 1) { used_.reserve(experts); }

  // `chosen` and `weights` [tokens, per_token] become `tokens_of` and `weights_of` [rows]. Rows of an expert are in the
  // order of the tokens.
  void sort(int tokens, const int32_t* chosen, const float* weights, int32_t* token_of, float* weight_of);

  // Experts that have rows, in ascending order.
  const std::vector<int32_t>& used() const { return used_; }
  int begin(int expert) const { return starts_[expert]; }
  int count(int expert) const { return starts_[expert + 1] - starts_[expert]; }

 private:
  const int per_token_;
  std::vector<int32_t> starts_;  // [experts + 1]
  std::vector<int32_t> used_;
};

}  // namespace tidewheel
