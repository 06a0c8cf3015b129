// A layer that computes with one of several streams and passes its result on to the others: see
// engine/models/spec/alt_up.py.
#pragma once

#include <algorithm>
#include <deque>

#include "model/residual_block.h"

namespace tidewheel {

// Its input and its output have all streams of a token in one row.
class AltUp final : public Mixer {
 public:
  AltUp(const AltUpPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return std::ranges::any_of(residuals_, &ResidualBlock::keeps); }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  // Computes one number for each stream from rows of the hidden size.
  void route(Worker& worker, const Rows& rows) const;
  void predict(Worker& worker, const Rows& input, const Output& output) const;
  void correct(Worker& worker, int rows, const Output& output) const;

  const Context& context_;
  const AltUpPlan plan_;
  Linear router_;
  Norm norm_;
  float *predict_ = nullptr, *correct_ = nullptr;  // [streams, streams, streams], [streams, streams]
  float* scale_ = nullptr;                         // [hidden], or null
  Buffer<float> numbers_;                          // [T, streams]
  Buffer<float> predicted_, active_;               // [T, hidden]: before the residual blocks, and after them
  Buffer<float> passive_input_, passive_;                // [T, hidden]
  std::deque<ResidualBlock> residuals_, passive_block_;
};

}  // namespace tidewheel
