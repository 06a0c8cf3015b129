// The dense MLP: down(act(gate(x)) * up(x)), or down(act(up(x))).
#pragma once

#include "model/mixers/mixer.h"

namespace tidewheel {

class Mlp final : public Mixer {
 public:
  Mlp(const MlpPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  void run_gated(Worker& worker, const Rows& input) const;
  void multiply_gate(float* gate, const float* up) const;

  const Context& context_;
  const MlpPlan plan_;
  bool interleaved_ = false;
  Linear gate_;  // if gated and not interleaved
  Linear up_;    // if interleaved, gate and up alternate every 16 columns
  Linear down_;
  Buffer<float> activated_;
  Buffer<float> upper_;  // up(x), if gated and not interleaved
};

}  // namespace tidewheel
