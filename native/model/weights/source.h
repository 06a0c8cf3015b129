// Tensors as they lie in a checkpoint, and where their rows go in a packed matrix.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/block_formats.h"

namespace tidewheel {

// How a matrix lies in a quantized checkpoint, whose bits are kept: see PackBlocksArgs.
struct StoredBlocks {
  BlockType type;
  size_t row_bytes;   // from a row of blocks or codes to the next
  size_t data_bytes;  // of a row that are read
  const int32_t* row_order = nullptr;  // row r is the stored row row_order[r]; null: they are the same
  // kGrid, kE4m3, kTable4; of kNvfp4 and kMxfp4Rows only the scales, of one byte each
  int bits = 0, group = 0;
  DType scale_type = DType::kFloat32;
  const void* scales = nullptr;
  ptrdiff_t scale_stride = 0;  // elements, from a row's scales to the next one's
  const uint8_t* zeros = nullptr;
  ptrdiff_t zero_stride = 0;
  bool twos_complement = false;
  const float* divisors = nullptr;  // kNvfp4: [rows]
  const float* table = nullptr;     // kTable4: [16]
  // Of kTable4 whose scales are codes of 8 bits: see PackBlocksArgs.
  const float* scale_table = nullptr;
  int scale_run = 0;
  const float* largest = nullptr;
  ptrdiff_t largest_stride = 0;
  const float* offsets = nullptr;

  size_t scale_bytes() const { return byte_scale_group(type) || scale_table ? 1 : size_t(dtype_bytes(scale_type)); }
};

// A tensor as it lies in a checkpoint. Strides are in elements.
struct Source {
  std::string name;
  const void* data;
  DType type;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool swapped = false;  // its bytes are in the other order than this machine's
  bool mapped = false;  // a view of a mapped file: its pages may be freed, and are read again when needed
  std::optional<StoredBlocks> blocks = {};  // for quantized ones; type, strides and byte order then say nothing
  std::shared_ptr<const void> owner = {};   // keeps the memory of a tensor that stays as it lies: see Linear::Part
};

// Where the rows of a tensor go in a packed matrix of `n` columns: row r becomes column
// (r / group) * group_stride + r % group + offset.
struct Columns {
  int n, group, group_stride, offset;

  int of(int row) const { return row / group * group_stride + row % group + offset; }
  // The first of `rows` that lands in `panel` or behind it.
  int first_row(int panel, int rows) const;
};

}  // namespace tidewheel
