// Residual streams of models with AltUp: see engine/models/spec/alt_up.py.
#pragma once

#include <deque>

#include "model/context.h"
#include "model/plan.h"

namespace tidewheel {

// Makes several rows from each token's embedding, and one row from them again.
class Streams {
 public:
  // Has only the weights for what it does: it widens, narrows or both.
  Streams(const StreamsPlan& plan, Context& context, bool widens, bool narrows);

  int width() const { return plan_.count * context_.hidden_size; }

  // `x` [rows, hidden] becomes `streams` [rows, width]. They must not overlap. Ends with a barrier.
  void widen(Worker& worker, const float* x, int rows, float* streams) const;
  // The rows `gather` [rows] of `streams` become `x` [rows, hidden]. They must not overlap. Ends with a barrier.
  void narrow(Worker& worker, const float* streams, const int32_t* gather, int rows, float* x) const;

 private:
  const Context& context_;
  const StreamsPlan plan_;
  std::deque<Linear> in_, out_;  // for all streams but the first
  Buffer<float> projected_;      // [T, all streams but the first]
};

}  // namespace tidewheel
