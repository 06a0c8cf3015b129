// The dense MLP: down(act(gate(x)) * up(x)), or down(act(up(x))).
#pragma once

#include "model/clipped_linear.h"
#include "model/mixers/mixer.h"

namespace tidewheel {

class Mlp final : public Mixer {
 public:
  Mlp(const MlpPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  void run_gated(Worker& worker, const Rows& input) const;
  void run_clipped(Worker& worker, const Rows& input, const Output& output) const;
  void multiply_gate(float* gate, const float* up) const;
  // up *= act(gate). What is in the gate is lost.
  void multiply_activated(float* gate, float* up) const;

  const Context& context_;
  const MlpPlan plan_;
  bool interleaved_ = false;
  Linear gate_;  // if gated and not interleaved
  Linear up_;    // if interleaved, gate and up alternate every 16 columns
  Linear down_;
  ClippedLinear clipped_gate_, clipped_up_, clipped_down_;  // instead of these, if it is clipped
  Buffer<float> clipped_;                                   // [T, inputs of any of them]
  Buffer<float> activated_;
  Buffer<float> upper_;  // up(x), if gated and not interleaved
};

}  // namespace tidewheel
