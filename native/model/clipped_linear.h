// A linear layer whose inputs and outputs have bounds: clamp(W clamp(x)).
#pragma once

#include "model/context.h"

namespace tidewheel {

class ClippedLinear {
 public:
  // The weights are NAME.weight [outputs, inputs] and NAME.bounds [4]: the least and the greatest input, then those of
  // outputs. They must not move afterwards.
  void add(const std::string& name, int outputs, int inputs, Context& context);

  // Stores the product of rows. `room` holds a row of inputs for each of them. Ends with a barrier.
  void run(Worker& worker, const Rows& input, const Buffer<float>& room, const Output& output) const;

 private:
  const Context* context_ = nullptr;
  int outputs_ = 0, inputs_ = 0;
  Linear linear_;
  float* bounds_ = nullptr;
};

}  // namespace tidewheel
