// What a kind of mixer does. A kind is a plan in model/plan.h, a class in a file here, and a line of `make_mixer`.
#pragma once

#include <memory>
#include <string>

#include "model/context.h"
#include "model/step.h"

namespace tidewheel {

// It is told its plan when it is made: then it names its weights, and says what it needs of the workspace.
class Mixer {
 public:
  virtual ~Mixer() = default;

  // Computes the rows of all tokens, to `output`: stored, or times its scale and added. The whole team calls it, and there
  // is a barrier behind it. It first writes the output when it has read all of the input: they may be one.
  virtual void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const = 0;
};

// `prefix` begins the names of the mixer's weights. Throws std::invalid_argument for what the kernels cannot compute.
std::unique_ptr<const Mixer> make_mixer(const MixerPlan& plan, const std::string& prefix, Context& context);

}  // namespace tidewheel
