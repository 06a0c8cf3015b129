// A residual block of a layer: x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x))))).
#pragma once

#include <memory>
#include <string>

#include "model/context.h"
#include "model/mixers/mixer.h"

namespace tidewheel {

class ResidualBlock {
 public:
  // The names of its weights begin with `prefix`. A residual block cannot move, because the weights are loaded into its
  // norms. `width` is the width of the rows; by default the hidden size.
  ResidualBlock(const ResidualBlockPlan& plan, const std::string& prefix, Context& context, int width = 0);
  ResidualBlock(const ResidualBlock&) = delete;
  ResidualBlock& operator=(const ResidualBlock&) = delete;

  // See Mixer.
  bool keeps() const { return mixer_->keeps(); }
  bool selects() const { return mixer_->selects(); }

  // Adds scale * the residual block of `x` [tokens, width] to `y` [tokens, width], and ends with a barrier. Both may be
  // the same rows. A sum factor, norm and scale are applied to `y`.
  void run(Worker& worker, const Step& step, const float* x, float* y, float scale = 1) const;
  // The same for any rows, without a norm. `y` has a row for each result.
  void run(Worker& worker, const Step& step, Rows rows, float* y, float scale = 1) const;
  // Writes only what `run` of `x` writes to the KV cache.
  void remember(Worker& worker, const Step& step, const float* x) const;

 private:
  template <typename Body>
  void each_row(Worker& worker, int rows, Body&& body) const;

  const Context& context_;
  const int width_;
  const float scale_, sum_factor_;
  Norm norm_, post_norm_, sum_norm_;
  float* sum_scale_ = nullptr;  // null if the plan has none
  Buffer<float> mixed_;  // [T, width], if there is a post-norm
  std::unique_ptr<const Mixer> mixer_;
};

}  // namespace tidewheel
