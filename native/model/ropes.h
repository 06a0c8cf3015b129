// Cosines and sines of a step's tokens. Most models use the same rope in every layer: a table that layers share is
// computed once.
#pragma once

#include <vector>

#include "model/plan.h"
#include "model/step.h"
#include "runtime/arena.h"

namespace tidewheel {

class Ropes {
 public:
  // Returns the number of the rope's table. Throws std::invalid_argument for axes that do not fit.
  int add(const RopePlan& rope);
  // Throws std::bad_alloc.
  void allocate(int max_tokens);

  bool empty() const { return tables_.empty(); }
  // How many axes a step's rope_positions must have.
  int axes() const { return axes_; }
  // Computes the entries of the step's token in all tables, with its angles divided by `factor`: see
  // Adapter::rope_factor.
  void compute(const Step& step, int token, float factor = 1) const;
  // [pairs]
  const float* cosines(int table, int token) const { return entries(table, token); }
  const float* sines(int table, int token) const { return entries(table, token) + tables_[table].inv_freq.size(); }

 private:
  struct Table {
    std::vector<float> inv_freq;
    float factor;
    std::vector<int> axes;
    bool operator==(const Table&) const = default;
  };

  float* entries(int table, int token) const {
    return reinterpret_cast<float*>(angles_.data()) + (size_t(table) * max_tokens_ + token) * stride_;
  }

  std::vector<Table> tables_;
  size_t stride_ = 0;
  int axes_ = 0;
  int max_tokens_ = 0;
  Arena angles_;  // [tables, max_tokens, stride]: cosines, then sines
};

}  // namespace tidewheel
