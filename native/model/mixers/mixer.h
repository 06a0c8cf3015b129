// What a kind of mixer does. A kind is a plan in model/plan.h, a class in a file here, and a line in mixer.cpp.
#pragma once

#include <memory>
#include <string>

#include "model/context.h"
#include "model/step.h"

namespace tidewheel {

// Its constructor takes a plan, names the mixer's weights, and says what the mixer needs of the workspace.
class Mixer {
 public:
  virtual ~Mixer() = default;

  // Computes the rows of all tokens and stores or adds them, as `output` says. The whole team calls it, and there is a
  // barrier behind it. It reads all of the input before it writes the output: they may be the same rows.
  virtual void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const = 0;

  // Only writes what the mixer keeps of the tokens to the KV cache, as `run` does. A barrier is behind it too. For mixers
  // that keep nothing there, it does nothing.
  virtual void remember(Worker&, const Step&, const Rows&) const {}
};

// `prefix` begins the names of the mixer's weights. Throws std::invalid_argument for what the kernels cannot compute.
std::unique_ptr<const Mixer> make_mixer(const MixerPlan& plan, const std::string& prefix, Context& context);

}  // namespace tidewheel
