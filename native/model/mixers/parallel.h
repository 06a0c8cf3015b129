// Residual blocks that read the same rows. None of them sees what another one has added.
#pragma once

#include <algorithm>
#include <deque>

#include "model/residual_block.h"

namespace tidewheel {

class Parallel final : public Mixer {
 public:
  Parallel(const ParallelPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return std::ranges::any_of(residuals_, &ResidualBlock::keeps); }
  bool selects() const override {
    return std::ranges::all_of(residuals_, [](const ResidualBlock& residual) { return !residual.keeps() || residual.selects(); });
  }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;
  // That of the first residual block.
  void remember(Worker& worker, const Step& step, const Rows& input) const override;

 private:
  // Copies the input, normalized, and clears as many rows of `cleared`, if it is not null. Returns the copy.
  const float* take(Worker& worker, const Rows& input, float* cleared) const;

  const Context& context_;
  Buffer<float> input_;  // [T, hidden]: a copy, because the residual blocks may add to the rows that they were given
  std::deque<ResidualBlock> residuals_;
};

}  // namespace tidewheel
