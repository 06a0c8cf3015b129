// Floats to blocks of GGUF's types, with the scales that make the error least.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace tidewheel {

// How many starting points a search has: kFast is for loading, kThorough for files that are written once.
enum class Effort : int { kFast, kThorough };

// Blocks [block_begin, block_end) of a matrix, whose rows' blocks are counted one after the other.
struct QuantizeArgs {
  BlockType type;
  DType source_type;
  const char* x;     // [rows] of [cols], row_bytes apart
  size_t row_bytes;
  int cols;          // whole blocks
  // [cols], how much an error of an input counts, not below 0 and at most 1; null: each as much as its size says.
  const float* importance;
  Effort effort;
  uint8_t* out;      // blocks, one behind the other: that of block 0
  int64_t block_begin, block_end;
};

}  // namespace tidewheel
