// A packed matrix, with its bias.
#pragma once

#include <vector>

#include "kernels/kernels.h"
#include "runtime/groups.h"

namespace tidewheel {

struct Linear {
  WeightFormat format;
  int n = 0, k = 0;       // packed columns (rows of the weight) and inputs
  struct Slice {
    Range panels;
    char* weight;
  };
  std::vector<Slice> slices;  // [groups]
  float* bias = nullptr;      // [n] in packed order, or null

  // The slice that has a packed column.
  const Slice& slice_of(int column) const {
    size_t i = 0;
    while (slices[i].panels.end <= column / kPanel) ++i;
    return slices[i];
  }
};

}  // namespace tidewheel
