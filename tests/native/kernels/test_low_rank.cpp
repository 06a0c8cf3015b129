#include <doctest/doctest.h>

#include "kernels/kernels.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// A matrix [outputs, inputs] in stripes.
std::vector<char> packed(DType type, const std::vector<float>& values, int outputs, int inputs) {
  const int stripes = (outputs + kStripe - 1) / kStripe, step = stripe_step(type);
  std::vector<char> bytes(stripes * stripe_bytes(inputs, type));
  for (int o = 0; o < outputs; ++o) {
    for (int i = 0; i < inputs; ++i) {
      const size_t place = size_t(i / step * kStripe + o % kStripe) * step + i % step;
      char* const to = bytes.data() + o / kStripe * stripe_bytes(inputs, type) + place * dtype_bytes(type);
      const float value = values[size_t(o) * inputs + i];
      const uint16_t bits = type == DType::kBFloat16 ? to_bf16(value).bits : to_f16(value).bits;
      std::memcpy(to, type == DType::kFloat32 ? static_cast<const void*>(&value) : &bits, dtype_bytes(type));
    }
  }
  return bytes;
}

bool rounds(const Kernels& kernels, DType type) {
  return type == DType::kBFloat16 && kernels.query_bytes[static_cast<int>(CacheType::kBFloat16)] == sizeof(bf16);
}

}  // namespace

TEST_CASE("a projection is the product, and each value has the same bits alone as among others") {
  constexpr int kMostRows = 5, kMostStripes = 3, kMostValues = kMostStripes * kStripe;
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const DType type : kTypes) {
      for (const int k : {1, 7, 16, 33, 96, 131}) {
        CAPTURE(kernels->name);
        CAPTURE(name_of(type));
        CAPTURE(k);
        const std::vector<float> x = random.normals(kMostRows * k), w = random.normals(kMostValues * k);
        const std::vector<char> bytes = packed(type, w, kMostValues, k);
        const size_t row_floats = k + kStripeInputs;
        std::vector<float> packed_rows(kMostRows * row_floats);
        for (const auto& [rows, stripes] : {std::pair{1, 1}, std::pair{2, 3}, std::pair{3, 1}, std::pair{kMostRows, kMostStripes}}) {
          std::vector<float> y(kMostRows * kMostValues, -1);
          std::vector<const void*> inputs;
          std::vector<float*> outputs;
          for (int r = 0; r < rows; ++r) {
            float* const row = &packed_rows[r * row_floats];
            // In two pieces, as their values are computed.
            const int first = k / kStripeInputs * kStripeInputs;
            kernels->pack_stripe_inputs(type, &x[r * k], 0, first, 0, row);
            kernels->pack_stripe_inputs(type, &x[r * k] + first, first, k - first, kStripeInputs, row);
            inputs.push_back(row), outputs.push_back(&y[r * kMostValues]);
          }
          kernels->project({inputs.data(), rows, k, bytes.data(), type, stripes, outputs.data()});
          for (int r = 0; r < rows; ++r) {
            for (int stripe = 0; stripe < stripes; ++stripe) {
              float alone[kStripe];
              float* const out = alone;
              kernels->project({&inputs[r], 1, k, bytes.data() + stripe * stripe_bytes(k, type), type, 1, &out});
              for (int j = 0; j < kStripe; ++j) {
                const int value = stripe * kStripe + j;
                double expected = 0, size = 0;
                for (int i = 0; i < k; ++i) {
                  const double product = double{rounded(type, w[value * k + i])} * x[r * k + i];
                  expected += product, size += std::abs(product);
                }
                // Where pairs of bfloat16 are multiplied, x is rounded to it: to 8 bits.
                CHECK(std::abs(y[r * kMostValues + value] - expected) <= size * (rounds(*kernels, type) ? 0x1p-8 : 1e-5));
                CHECK(y[r * kMostValues + value] == alone[j]);
              }
            }
            for (int j = stripes * kStripe; j < kMostValues; ++j) CHECK(y[r * kMostValues + j] == -1);
          }
        }
      }
    }
  }
}
