// The dense MLP: down(act(gate(x)) * up(x)), or down(act(up(x))).
#pragma once

#include "model/mixers/mixer.h"

namespace tidewheel {

class Mlp final : public Mixer {
 public:
  Mlp(const MlpPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  const Context& context_;
  const MlpPlan plan_;
  Linear up_;  // holds gate and up interleaved by 16 columns if gated
  Linear down_;
  Buffer<float> activated_;
};

}  // namespace tidewheel
