// Branches that read the same rows. No branch sees what another has added.
#pragma once

#include <deque>

#include "model/branch.h"

namespace tidewheel {

class Parallel final : public Mixer {
 public:
  Parallel(const ParallelPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  const Context& context_;
  Buffer<float> input_;  // [T, hidden]: a copy, because the branches may add to what they were given
  std::deque<Branch> branches_;
};

}  // namespace tidewheel
