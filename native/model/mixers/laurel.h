// LAuReL: x + norm(up(down(x))), see engine/models/spec/laurel.py.
#pragma once

#include "model/mixers/mixer.h"

namespace tidewheel {

class Laurel final : public Mixer {
 public:
  Laurel(const LaurelPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  const Context& context_;
  Linear down_, up_;
  Norm norm_;
  Buffer<float> input_;    // [T, hidden]: a copy, which is added at the end
  Buffer<float> between_;  // [T, rank]
  Buffer<float> learned_;  // [T, hidden]
};

}  // namespace tidewheel
