// A draft head: a checkpoint's own layer that predicts the token after the next one (MTP). See
// engine/models/spec/mtp.py.
#pragma once

#include <deque>

#include "model/residual_block.h"
#include "model/plan.h"
#include "model/draft_head.h"

namespace tidewheel {

class Mtp final : public DraftHead {
 public:
  // Names its weights. Throws std::invalid_argument for a plan that the kernels cannot run.
  Mtp(const MtpPlan& plan, Context& context, Embed embed);

  void remember(Worker& worker, const Step& step, const float* hidden, const Norm& final_norm) const override;
  Rows predict(Worker& worker, const Step& step) const override;

 private:
  float* hidden() const { return context_.workspace.rows(hidden_); }
  void project(Worker& worker, const Step& step, const float* model_rows, const Norm& final_norm) const;

  const Embed embed_;
  const bool feeds_normed_;
  Norm embedding_norm_, hidden_norm_, final_norm_;
  Linear project_;
  std::deque<ResidualBlock> residuals_;
  Buffer<float> inputs_;  // [T, 2 * hidden]: the embedding and the hidden row, normalized
  Buffer<float> hidden_;  // [T, hidden]
};

}  // namespace tidewheel
