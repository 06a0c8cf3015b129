// A residual branch of a layer: x = sum_scale * sum_norm(x + scale * post_norm(mixer(norm(x)))).
#pragma once

#include <memory>
#include <string>

#include "model/context.h"
#include "model/mixers/mixer.h"

namespace tidewheel {

class Branch {
 public:
  // `prefix` begins the names of its weights. A branch cannot move: the weights are loaded into its norms.
  Branch(const BranchPlan& plan, const std::string& prefix, Context& context);
  Branch(const Branch&) = delete;
  Branch& operator=(const Branch&) = delete;

  // Adds scale * the branch of `x` [tokens, hidden] to `y` [tokens, hidden], with a barrier behind it. They may be the
  // same rows. A sum norm and a sum scale are applied to `y`.
  void run(Worker& worker, const Step& step, const float* x, float* y, float scale = 1) const;

 private:
  template <typename Body>
  void each_row(Worker& worker, int rows, Body&& body) const;

  const Context& context_;
  const float scale_;
  Norm norm_, post_norm_, sum_norm_;
  float* sum_scale_ = nullptr;  // or null
  Buffer<float> mixed_;  // [T, hidden], if there is a post-norm
  std::unique_ptr<const Mixer> mixer_;
};

}  // namespace tidewheel
