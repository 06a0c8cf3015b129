// Tensors as they are stored in a checkpoint, and the places of their rows in a packed matrix.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/block_formats.h"

namespace tidewheel {

// The byte of a block that has the exponent of a scale. If all bits of `exponent` are set, the scale is not finite.
struct ScaleByte {
  size_t at;
  uint8_t exponent;
};

// How a quantized checkpoint, whose bits are kept, stores a matrix: see PackBlocksArgs.
struct StoredBlocks {
  BlockType type;
  size_t row_bytes;   // from one row of blocks or codes to the next
  size_t data_bytes;  // bytes of a row that are read
  const int32_t* row_order = nullptr;  // row r is the stored row row_order[r]; null: the same order
  std::vector<ScaleByte> scales_at = {};  // of GGUF's blocks: the scales that must be finite
  // For kGrid, kE4m3 and kTable4. kNvfp4 and kMxfp4Rows use only the scales, of one byte each.
  int bits = 0, group = 0;
  DType scale_type = DType::kFloat32;
  const void* scales = nullptr;
  ptrdiff_t scale_stride = 0;  // elements, from a row's scales to the next one's
  const uint8_t* zeros = nullptr;
  ptrdiff_t zero_stride = 0;
  bool twos_complement = false;
  const float* divisors = nullptr;  // kNvfp4: [rows]
  const float* table = nullptr;     // kTable4: [16]
  // For kTable4 with scales that are 8-bit codes: see PackBlocksArgs.
  const float* scale_table = nullptr;
  int scale_run = 0;
  const float* largest = nullptr;
  ptrdiff_t largest_stride = 0;
  const float* offsets = nullptr;

  size_t scale_bytes() const { return byte_scale_group(type) || scale_table ? 1 : size_t(dtype_bytes(scale_type)); }
};

// A tensor as it is stored in a checkpoint. Strides are in elements.
struct Source {
  std::string name;
  const void* data;
  DType type;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  bool swapped = false;  // its byte order is not this machine's
  bool mapped = false;  // a view of a mapped file: its pages may be freed, and are read again when needed
  std::optional<StoredBlocks> blocks = {};  // for quantized tensors; type, strides and byte order are then not used
  std::shared_ptr<const void> owner = {};   // keeps the memory of a tensor that stays unpacked: see Linear::Part
};

// Where a tensor's rows go in a packed matrix of `n` columns: row r becomes column (r / group) * group_stride + r %
// group + offset.
struct Columns {
  int n, group, group_stride, offset;

  int of(int row) const { return row / group * group_stride + row % group + offset; }
  // The first of `rows` rows that goes into `panel` or a later one.
  int first_row(int panel, int rows) const;
};

}  // namespace tidewheel
