// The interface of mixers. A kind of mixer is a plan in model/plan.h, a class in a file here, and a line in mixer.cpp.
#pragma once

#include <memory>
#include <string>

#include "model/context.h"
#include "model/step.h"

namespace tidewheel {

// A mixer's constructor takes a plan, names the mixer's weights, and reserves its buffers in the workspace.
class Mixer {
 public:
  virtual ~Mixer() = default;

  // Whether it keeps something of each token for others: K and V, or a state. Then its input has the rows of all tokens.
  // Otherwise it can also be of other rows.
  virtual bool keeps() const { return false; }
  // Whether `run` can compute the rows of Step::read_rows alone from an input of all tokens.
  virtual bool selects() const { return false; }

  // Computes a row for each of the input's, or, if the input selects, for each of Step::read_rows. Stores or adds them
  // as `output` says. The whole team calls it, and it ends with a barrier. It reads all of the input before it writes
  // the output, so both may be the same rows.
  virtual void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const = 0;

  // Writes only what the mixer keeps of the tokens in the KV cache, as `run` does, and ends with a barrier. Does
  // nothing for mixers that keep nothing there. In a tower, it keeps the queries too: see Step::remembered.
  virtual void remember(Worker&, const Step&, const Rows&) const {}
};

// The names of the mixer's weights begin with `prefix`. Throws std::invalid_argument for a plan that the kernels cannot
// compute.
std::unique_ptr<const Mixer> make_mixer(const MixerPlan& plan, const std::string& prefix, Context& context);

}  // namespace tidewheel
