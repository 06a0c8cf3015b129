// A packed matrix, with its bias.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "model/weights/source.h"
#include "runtime/groups.h"

namespace tidewheel {

struct Linear {
  WeightFormat format;
  int n = 0, k = 0;       // packed columns (rows of the weight) and inputs
  int id = -1;            // index among all matrices of a model
  int tensors = 0;        // number of tensors that are packed into it
  // Input i of the packed matrix is the model's input (*input_order)[i]; null: the orders are the same.
  const std::vector<int32_t>* input_order = nullptr;
  struct Slice {
    Range panels;
    char* weight;
  };
  std::vector<Slice> slices;  // [groups]
  float* bias = nullptr;      // [n] in packed order, or null
  // Whether the matrix stays as it is in the checkpoint. Then its slices have no weight: see `pack_panel`.
  bool unpacked = false;
  struct Part {
    Source source;
    Columns columns;
    int rows;
  };
  std::vector<Part> parts;  // the tensors of an unpacked matrix
  // Tensors that are stored in different ways but have the same inputs form one product. This Linear has the columns of
  // its output from `first` on, and `next` has the columns after them.
  int first = 0;
  std::unique_ptr<Linear> next;

  // The slice that contains a packed column.
  const Slice& slice_of(int column) const {
    size_t i = 0;
    while (slices[i].panels.end <= column / kPanel) ++i;
    return slices[i];
  }
};

}  // namespace tidewheel
