#include <doctest/doctest.h>

#include "kernels/kernels.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

std::vector<char> stored(DType type, const std::vector<float>& values) {
  std::vector<char> bytes(values.size() * dtype_bytes(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == DType::kFloat32) std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    const uint16_t bits = type == DType::kBFloat16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
    if (type != DType::kFloat32) std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  return bytes;
}

bool rounds(const Kernels& kernels, DType type) {
  return type == DType::kBFloat16 && kernels.query_bytes[static_cast<int>(CacheType::kBFloat16)] == sizeof(bf16);
}

}  // namespace

TEST_CASE("a projection is the product, and each value has the same bits alone as among others") {
  constexpr int kMostRows = 5, kMostValues = 9;
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const DType type : kTypes) {
      for (const int k : {1, 7, 16, 33, 96, 131}) {
        CAPTURE(kernels->name);
        CAPTURE(name_of(type));
        CAPTURE(k);
        const std::vector<float> x = random.normals(kMostRows * k), a = random.normals(kMostValues * k);
        const std::vector<char> bytes = stored(type, a);
        for (const auto& [rows, count] : {std::pair{1, 1}, std::pair{2, 4}, std::pair{3, 6}, std::pair{kMostRows, kMostValues}}) {
          std::vector<float> h(kMostRows * kMostValues, -1);
          std::vector<const float*> inputs;
          std::vector<float*> outputs;
          for (int r = 0; r < rows; ++r) inputs.push_back(&x[r * k]), outputs.push_back(&h[r * kMostValues]);
          kernels->project({inputs.data(), rows, k, bytes.data(), type, count, outputs.data()});
          for (int r = 0; r < rows; ++r) {
            for (int j = 0; j < count; ++j) {
              double expected = 0, size = 0;
              for (int i = 0; i < k; ++i) {
                const double product = double{rounded(type, a[j * k + i])} * x[r * k + i];
                expected += product, size += std::abs(product);
              }
              // Where pairs of bfloat16 are multiplied, x is rounded to it: to 8 bits.
              CHECK(std::abs(h[r * kMostValues + j] - expected) <= size * (rounds(*kernels, type) ? 0x1p-8 : 1e-5));
              float alone = 0;
              float* const out = &alone;
              kernels->project({&inputs[r], 1, k, bytes.data() + size_t(j) * k * dtype_bytes(type), type, 1, &out});
              CHECK(h[r * kMostValues + j] == alone);
            }
            for (int j = count; j < kMostValues; ++j) CHECK(h[r * kMostValues + j] == -1);
          }
        }
      }
    }
  }
}
