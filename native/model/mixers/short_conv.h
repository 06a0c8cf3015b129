// LFM2's gated short convolution.
#pragma once

#include "model/mixers/recurrent.h"

namespace tidewheel {

class ShortConv final : public Mixer {
 public:
  ShortConv(const ShortConvPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return true; }
  bool selects() const override { return true; }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  const Context& context_;
  const ShortConvPlan plan_;
  Convolution convolution_;
  Linear in_, out_;
  Buffer<float> rows_;  // [T, b c x]; x later holds the results
};

}  // namespace tidewheel
