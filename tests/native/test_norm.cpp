#include <doctest/doctest.h>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

TEST_CASE("rms and layer norm agree with their definitions, whatever the width") {
  Random random;
  for (const Kernels* kernels : available_kernels()) {
    for (const bool layer_norm : {false, true}) {
      for (const int size : {2, 15, 16, 64, 100}) {
        auto x = random.normals(3 * size);
        const auto original = x;
        const auto weight = random.normals(size), bias = random.normals(size);
        std::vector<float> out(3 * size);
        kernels->norm(DType::kFloat32, {x.data(), size_t(size), size, layer_norm, 1e-5f, weight.data(), bias.data(), true,
                                        out.data(), size_t(size)}, 0, 3);
        for (int r = 0; r < 3; ++r) {
          double mean = 0, variance = 0;
          for (int i = 0; i < size; ++i) mean += layer_norm ? original[r * size + i] / double(size) : 0.0;
          for (int i = 0; i < size; ++i) variance += std::pow(original[r * size + i] - mean, 2) / size;
          for (int i = 0; i < size; ++i) {
            const double expected = (original[r * size + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
            CHECK(out[r * size + i] == doctest::Approx(expected).epsilon(1e-4).scale(1.0));
            CHECK(x[r * size + i] == out[r * size + i]);
          }
        }
      }
    }
  }
}
