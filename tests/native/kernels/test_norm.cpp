#include <doctest/doctest.h>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

TEST_CASE("norms agree with their definitions, whatever the width, in place, on the way into a GEMM, and added") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [layer_norm, scaled] : {std::pair{false, true}, {true, true}, {false, false}, {true, false}}) {
      for (const int size : {2, 15, 16, 64, 100}) {
        CAPTURE(kernels->name);
        CAPTURE(layer_norm);
        CAPTURE(scaled);
        CAPTURE(size);
        auto x = random.normals(3 * size);
        const auto original = x;
        auto weight = random.normals(size), bias = random.normals(size);
        const Norm norm{layer_norm ? NormKind::kLayer : NormKind::kRms, 1e-5f, scaled ? weight.data() : nullptr,
                        scaled ? bias.data() : nullptr};
        const auto start = random.normals(3 * size);
        auto sum = start, added = original;
        // Rows of float32 weights are packed as they are, one row a tile when it is alone.
        std::vector<float> packed(size), scratch(size + kRowGroup);
        const int32_t second = 1;
        kernels->pack_inputs({WeightKind::kFloat32}, {x.data(), size_t(size), &second, 1, size, norm, scratch.data(), packed.data()},
                           0, 1);
        for (int r = 0; r < 3; ++r) {
          kernels->normalize(norm, x.data() + r * size, size);
          kernels->add_normalized(norm, added.data() + r * size, size, 0.7f, sum.data() + r * size);
          double mean = 0, variance = 0;
          for (int i = 0; i < size; ++i) mean += layer_norm ? original[r * size + i] / double(size) : 0.0;
          for (int i = 0; i < size; ++i) variance += std::pow(original[r * size + i] - mean, 2) / size;
          for (int i = 0; i < size; ++i) {
            double expected = (original[r * size + i] - mean) / std::sqrt(variance + 1e-5);
            if (scaled) expected = expected * weight[i] + bias[i];
            CHECK(x[r * size + i] == doctest::Approx(expected).epsilon(1e-4).scale(1.0));
            if (r == second) CHECK(packed[i] == x[r * size + i]);
            CHECK(sum[r * size + i] == doctest::Approx(start[r * size + i] + 0.7 * expected).epsilon(1e-4).scale(1.0));
          }
        }
      }
    }
  }
}
