#include "model/weights/finite.h"

#include <cstring>
#include <utility>

#include "model/weights/byte_order.h"

namespace tidewheel {
namespace {

// Floats that are not finite have all bits of the exponent.
template <typename Word>
bool line_is_finite(const char* line, int64_t count, Word exponent) {
  const auto found_at = [&](int64_t i) {
    Word word;
    std::memcpy(&word, line + i * int64_t{sizeof word}, sizeof word);
    return static_cast<Word>((word & exponent) == exponent);
  };
  constexpr int kTogether = 256;  // a fixed number, for vectors
  Word found = 0;
  for (; count >= kTogether && !found; count -= kTogether, line += kTogether * sizeof(Word)) {
    for (int i = 0; i < kTogether; ++i) found |= found_at(i);
  }
  for (int64_t i = 0; i < count; ++i) found |= found_at(i);
  return !found;
}

template <typename Word>
bool floats_are_finite(const Source& source, int row_begin, int row_end, Word exponent) {
  if (source.swapped) exponent = swap_bytes(exponent);
  const bool is_matrix = source.shape.size() > 1;
  int64_t outer = row_end - row_begin, inner = is_matrix ? source.shape[1] : 1;
  int64_t outer_stride = source.strides[0], inner_stride = is_matrix ? source.strides[1] : 1;
  const char* data = static_cast<const char*>(source.data) + row_begin * outer_stride * int64_t{sizeof(Word)};
  if (outer_stride == 1) std::swap(outer, inner), std::swap(outer_stride, inner_stride);
  for (int64_t i = 0; i < outer; ++i) {
    const char* line = data + i * outer_stride * int64_t{sizeof(Word)};
    if (inner_stride == 1) {
      if (!line_is_finite(line, inner, exponent)) return false;
      continue;
    }
    for (int64_t j = 0; j < inner; ++j) {
      if (!line_is_finite(line + j * inner_stride * int64_t{sizeof(Word)}, 1, exponent)) return false;
    }
  }
  return true;
}

bool scales_are_finite(const Source& source, int row_begin, int row_end) {
  const StoredBlocks& stored = *source.blocks;
  const size_t bytes = block_type_info(stored.type).bytes;
  for (int row = row_begin; row < row_end; ++row) {
    const int stored_row = stored.row_order ? stored.row_order[row] : row;
    const auto* begin = static_cast<const uint8_t*>(source.data) + stored_row * stored.row_bytes;
    for (const ScaleByte& scale : stored.scales_at) {
      bool found = false;
      for (size_t i = scale.at; i < stored.data_bytes; i += bytes) found |= (begin[i] & scale.exponent) == scale.exponent;
      if (found) return false;
    }
  }
  return true;
}

}  // namespace

bool are_finite(const Source& source, int row_begin, int row_end) {
  if (source.blocks) return scales_are_finite(source, row_begin, row_end);
  switch (source.type) {
    case DType::kFloat32: return floats_are_finite<uint32_t>(source, row_begin, row_end, 0x7f800000);
    case DType::kBFloat16: return floats_are_finite<uint16_t>(source, row_begin, row_end, 0x7f80);
    case DType::kFloat16: return floats_are_finite<uint16_t>(source, row_begin, row_end, 0x7c00);
  }
  return true;
}

}  // namespace tidewheel
