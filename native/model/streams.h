// Residual streams of models with AltUp: see engine/models/spec/alt_up.py.
#pragma once

#include <deque>

#include "model/context.h"
#include "model/plan.h"

namespace tidewheel {

// What makes several rows of each token's embedding, and one of them again.
class Streams {
 public:
  // With the weights of what it is to do: `widens`, `narrows` or both.
  Streams(const StreamsPlan& plan, Context& context, bool widens, bool narrows);

  int width() const { return plan_.count * context_.hidden_size; }

  // `x` [rows, hidden] becomes `streams` [rows, width]. They must not overlap. There is a barrier behind it.
  void widen(Worker& worker, const float* x, int rows, float* streams) const;
  // The rows `gather` [rows] of `streams` become `x` [rows, hidden], likewise.
  void narrow(Worker& worker, const float* streams, const int32_t* gather, int rows, float* x) const;

 private:
  const Context& context_;
  const StreamsPlan plan_;
  std::deque<Linear> in_, out_;  // of all streams but the first
  Buffer<float> projected_;      // [T, all streams but the first]
};

}  // namespace tidewheel
