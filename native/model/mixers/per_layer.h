// The residual block of per-layer embeddings: projection(act(gate(x)) * p), where p is the token's embedding for this
// layer.
#pragma once

#include "model/mixers/mixer.h"

namespace tidewheel {

class PerLayer final : public Mixer {
 public:
  PerLayer(const PerLayerPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  const Context& context_;
  const PerLayerPlan plan_;
  Linear gate_, projection_;
  Buffer<float> gated_;
};

}  // namespace tidewheel
