// Floats to the codes of grids: integers with a scale and a zero for every group of inputs of a row,
// w = scale * (code - zero).
#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace tidewheel {

// Groups are whole multiples of this many inputs.
constexpr int kGridStep = 16;

struct Grid {
  int group;
  float largest;   // code
  bool symmetric;  // the zero is always (largest + 1) / 2
  DType scales;    // what they are stored as
};

// A matrix whose groups' scales and zeros are searched for. Rows and groups lie one behind the other.
struct SearchGridArgs {
  Grid grid;
  int cols;
  const float* x;           // [rows, cols], finite
  const float* importance;  // [cols], above 0
  float* scales;            // [rows, groups]
  uint8_t* zeros;           // the same
  uint8_t* codes;           // [rows, cols], the nearest
  double* errors;           // [rows], the squared error, and
  double* squares;          // the square of all, where each input counts as its importance says
  int64_t row_begin, row_end;
};

// Columns are computed in strips of this many.
constexpr int kGridStrip = 64;
// Inputs of a block, at most.
constexpr int kGridBlock = 64;

// Some inputs of a matrix `[inputs, columns]`, which are rounded one after the other. Each makes up for the errors of
// those before it: it is the nearest to x + sum of factor[j][i] * error j, with j < i.
struct RoundInputsArgs {
  int inputs, columns;      // at most kGridBlock; any
  float largest;            // code
  const float* factor;      // [inputs, inputs]
  const float* originals;   // [inputs, columns], whose errors count
  const int* groups;        // [inputs], of each
  const float* scales;      // [groups, columns]
  const float* zeros;       // the same
  float* x;                 // [inputs, columns]: what is wanted, which makes up for inputs before this block; becomes errors
  uint8_t* codes;           // [inputs, columns]
  double* residuals;        // [strips, inputs], the sum of the squares of what is wanted less what it became
  int64_t strip_begin, strip_end;
};

}  // namespace tidewheel
