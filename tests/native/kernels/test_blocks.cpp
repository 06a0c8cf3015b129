// Weights that keep the bits of quantized files, against the definitions of their formats.
#include <doctest/doctest.h>

#include <algorithm>

#include "quantized_blocks.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// The rows of `matrix` as packed columns, in two calls.
PackedWeight pack(const Kernels& kernels, const QuantizedMatrix& matrix) {
  PackedWeight packed(kernels, matrix.format, matrix.rows, matrix.cols);
  const int groups = matrix.group ? matrix.scale_groups() : 0, middle = matrix.rows / 2 + 1;
  for (const auto& [begin, end] : {std::pair{0, middle}, std::pair{middle, matrix.rows}}) {
    PackBlocksArgs args{};
    args.source = matrix.type;
    args.blocks = matrix.blocks.data() + begin * matrix.row_bytes;
    args.row_bytes = matrix.row_bytes;
    args.bits = matrix.bits;
    args.scale_type = matrix.scale_type;
    args.scales = matrix.scales.data() + matrix.scales.size() / matrix.rows * begin;
    args.divisors = matrix.divisors.data() + (matrix.divisors.empty() ? 0 : begin);
    args.scale_stride = args.zero_stride = groups;
    args.largest_stride = static_cast<ptrdiff_t>(matrix.largest.size()) / matrix.rows;
    args.largest = matrix.largest.data() + args.largest_stride * begin;
    args.offsets = matrix.offsets.data() + (matrix.offsets.empty() ? 0 : begin);
    args.zeros = matrix.zeros.empty() ? nullptr : matrix.zeros.data() + size_t(begin) * groups;
    args.twos_complement = matrix.twos_complement;
    args.rows = matrix.rows;
    args.cols = args.k = matrix.cols;
    args.weight = packed.bytes.data();
    args.group = matrix.rows;
    args.row_begin = begin;
    args.row_end = end;
    kernels.pack_blocks(matrix.format, args);
  }
  return packed;
}

// Every format: files' types, and grids of all bits, groups, scales and zero points.
std::vector<std::pair<std::string, QuantizedMatrix>> all_matrices(int rows, int blocks_of_32) {
  std::vector<std::pair<std::string, QuantizedMatrix>> all;
  for (const BlockTypeInfo& info : kBlockTypes) {
    if (!info.inputs) continue;
    const int cols = 32 * blocks_of_32;
    if (cols % info.inputs == 0) all.emplace_back(info.name, random_blocks(info, rows, cols));
  }
  const auto add_grid = [&](int bits, int group, bool zero_points, DType type, bool twos_complement, int cols) {
    const int stored = group ? group : (cols + 255) / 256 * 256;
    const auto format = grid_format(bits, stored, zero_points, type);
    REQUIRE(format);
    all.emplace_back("grid " + std::to_string(bits) + " bits, groups of " + std::to_string(group),
                     random_grid(*format, bits, group, type, twos_complement, rows, cols));
  };
  const int cols = 32 * blocks_of_32;
  for (const int bits : {2, 3, 4, 8}) {
    add_grid(bits, 32, true, DType::kFloat16, false, cols);
    add_grid(bits, 64, false, DType::kBFloat16, true, cols - 24);
    add_grid(bits, 128, true, DType::kFloat32, false, cols - 1);
    add_grid(bits, 0, false, DType::kFloat32, false, cols - 32);
    add_grid(bits, 32, false, DType::kFloat16, true, cols);
  }
  for (const BlockType type : {BlockType::kE4m3, BlockType::kTable4}) {
    const std::string name(block_type_info(type).name);
    for (const int group : {32, 64, 128, 0}) {
      all.emplace_back(name + ", groups of " + std::to_string(group), random_small_floats(type, group, rows, cols - group % 3));
    }
  }
  const int runs = blocks_of_32 % 2 ? 1 : 2;
  all.emplace_back("table4, scales in 8 bits",
                   random_small_floats(BlockType::kTable4, 32, rows, cols, blocks_of_32 / runs));
  all.emplace_back("nvfp4", random_small_floats(BlockType::kNvfp4, 16, rows, cols - 16));
  all.emplace_back("mxfp4-rows", random_small_floats(BlockType::kMxfp4Rows, 32, rows, cols));
  all.emplace_back("int8-channel", random_grid({WeightKind::kInt8Channel}, 8, 0, DType::kBFloat16, true, rows, cols - 5));
  return all;
}

}  // namespace

TEST_CASE("weights of quantized files are what their formats say, to the bit, and take as many bits") {
  for (const Kernels* kernels : tested_kernels()) {
    for (const int blocks : {3, 8, 19}) {
      for (const auto& [name, matrix] : all_matrices(37, blocks)) {
        CAPTURE(kernels->name);
        CAPTURE(name);
        CHECK(pack(*kernels, matrix).unpacked() == matrix.values);
      }
    }
    for (const auto& [name, matrix] : all_matrices(1, 32)) {
      if (matrix.group == matrix.cols) continue;  // a row's scale is stored with every 256 of its inputs
      CAPTURE(name);
      const size_t file = matrix.row_bytes + matrix.scales.size() + matrix.zeros.size();
      CHECK(static_cast<double>(kernels->panel_bytes(matrix.format, matrix.cols)) / kPanel <= 1.08 * static_cast<double>(file));
    }
  }
}

TEST_CASE("gemm agrees with the plain sum over a quantized file's weights, and a row never depends on others") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const int blocks : {3, 8, 17}) {
      const int n = 33, m = blocks == 8 ? 113 : 14;
      for (const auto& [name, matrix] : all_matrices(n, blocks)) {
        const int k = matrix.cols;
        CAPTURE(kernels->name);
        CAPTURE(name);
        const auto x = random.normals(size_t(m) * k);
        const PackedWeight packed = pack(*kernels, matrix);
        const auto y = packed.multiply(x, m);
        const float largest = std::abs(*std::max_element(matrix.values.begin(), matrix.values.end(),
                                                         [](float a, float b) { return std::abs(a) < std::abs(b); }));
        for (int r = 0; r < m; r += 5 * kStride) {
          const auto row = as_input(matrix.format, x.data() + r * k, k);
          double bound = 0;
          for (int i = 0; i < k; ++i) bound += 1e-6 * std::abs(row[i]) * largest;
          for (int c = 0; c < n; ++c) {
            double sum = 0;
            for (int i = 0; i < k; ++i) sum += row[i] * matrix.values[size_t(c) * k + i];
            CHECK(std::abs(y[r * n + c] - sum) <= bound);
          }
          const auto alone = packed.multiply({x.begin() + r * k, x.begin() + (r + 1) * k}, 1);
          CHECK(std::memcmp(alone.data(), y.data() + r * n, n * sizeof(float)) == 0);
        }
      }
    }
  }
}
