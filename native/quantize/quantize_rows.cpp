#include "quantize/quantize_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/block_formats.h"
#include "quantize/pieces.h"

namespace tidewheel {
namespace {

constexpr int64_t kPieceInputs = 1 << 16;  // that a thread takes at once: whole batches of every type
// An input that does not count at all would leave its codes to chance.
constexpr float kLeastImportance = 1e-4f;

// Infinities and NaN have all bits of the exponent.
bool is_finite(const char* x, DType type, int count) {
  const auto all = [&](auto bits, auto exponent) {
    bool finite = true;
    for (int i = 0; i < count; ++i) {
      std::memcpy(&bits, x + i * sizeof bits, sizeof bits);
      finite &= (bits & exponent) != exponent;
    }
    return finite;
  };
  switch (type) {
    case DType::kFloat32: return all(uint32_t{}, uint32_t{0x7f800000u});
    case DType::kBFloat16: return all(uint16_t{}, uint16_t{0x7f80u});
    case DType::kFloat16: return all(uint16_t{}, uint16_t{0x7c00u});
  }
  return false;
}

// At most 1, because squares must stay within float32.
std::vector<float> relative(const float* importance, int cols) {
  float largest = 0;
  for (int i = 0; i < cols; ++i) {
    if (!(std::isfinite(importance[i]) && importance[i] >= 0)) {
      throw std::invalid_argument("importance must be finite and not below 0, not " + std::to_string(importance[i]) +
                                  " for input " + std::to_string(i));
    }
    largest = std::max(largest, importance[i]);
  }
  std::vector<float> result(cols, 1.0f);
  if (largest == 0) return result;
  for (int i = 0; i < cols; ++i) result[i] = std::max(importance[i] / largest, kLeastImportance);
  return result;
}

}  // namespace

void quantize_rows(const Kernels& kernels, QuantizeArgs args, const float* importance, int64_t rows, int threads) {
  const BlockTypeInfo& info = block_type_info(args.type);
  const std::string name(info.name);
  if (!info.inputs || args.type == BlockType::kMxfp4) throw std::invalid_argument("nothing is quantized to " + name);
  if (args.cols <= 0 || args.cols % info.inputs != 0) {
    throw std::invalid_argument(name + " needs rows of a multiple of " + std::to_string(info.inputs) + " numbers, not " +
                                std::to_string(args.cols));
  }
  std::vector<float> counts;
  if (importance) {
    counts = relative(importance, args.cols);
    args.importance = counts.data();
  }
  const int64_t row_blocks = args.cols / info.inputs, blocks = rows * row_blocks;
  const int64_t piece = kPieceInputs / info.inputs, pieces = (blocks + piece - 1) / piece;
  std::atomic<int64_t> bad_row{rows};
  for_pieces(pieces, threads, [&](int64_t i) {
    if (bad_row.load() < rows) return;
    QuantizeArgs part = args;
    part.block_begin = i * piece;
    part.block_end = std::min(blocks, part.block_begin + piece);
    for (int64_t row = part.block_begin / row_blocks; row * row_blocks < part.block_end; ++row) {
      const int64_t first = std::max(part.block_begin, row * row_blocks) - row * row_blocks;
      const int64_t last = std::min(part.block_end - row * row_blocks, row_blocks);
      const char* from = args.x + row * args.row_bytes + first * info.inputs * dtype_bytes(args.source_type);
      if (is_finite(from, args.source_type, static_cast<int>((last - first) * info.inputs))) continue;
      // Pieces are taken in their order, so that the first such row is found, whoever is faster.
      for (int64_t known = bad_row.load(); row < known && !bad_row.compare_exchange_weak(known, row);) {
      }
      return;
    }
    kernels.quantize_blocks(part);
  });
  if (bad_row < rows) {
    throw std::invalid_argument("row " + std::to_string(bad_row.load()) + " has numbers that are not finite");
  }
}

}  // namespace tidewheel
