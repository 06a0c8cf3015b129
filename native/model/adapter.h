// A low-rank adapter, packed for the kernels: y += scale * B (A x), https://arxiv.org/abs/2106.09685.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "model/weights/weights.h"
#include "runtime/arena.h"

namespace tidewheel {

// What an adapter adds to the outputs `first_output` to `first_output + outputs - 1` of one matrix: scale * (B A x + bias).
// Updates of one matrix that have the same `a`, rank and scale project x once.
struct LowRankUpdate {
  std::string name;  // of the matrix' tensor
  int first_output = 0, outputs = 0, inputs = 0, rank = 0;
  const float* a = nullptr;     // [rank, inputs]
  const float* b = nullptr;     // [outputs, rank]
  const float* bias = nullptr;  // [outputs], or null
  float scale = 1;
};

class Adapter {
 public:
  // All that an adapter adds to the products of one packed matrix.
  struct Part {
    int values = 0;                  // of h
    const char* a = nullptr;         // [values, k]
    std::vector<float> scale, one;   // [values]: h = scale * (A x + one), where `one` is 1 for a bias and else 0
    std::vector<LowRankStripe> stripes;
  };

  // Throws std::invalid_argument for a matrix that is not in the model or has another shape, or more values than
  // `most_values`, and std::bad_alloc.
  Adapter(const Weights& weights, DType type, std::span<const LowRankUpdate> updates, int most_values);

  DType type() const { return type_; }
  size_t bytes() const { return memory_.bytes(); }
  // Null if the matrix is left as it is.
  const Part* part(const Linear& linear) const {
    const auto& part = parts_[linear.id];
    return part ? &*part : nullptr;
  }

 private:
  const DType type_;
  std::vector<std::optional<Part>> parts_;  // by Linear::id
  Arena memory_;
};

}  // namespace tidewheel
