#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"
#include "quantize/grid.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

struct Searched {
  std::vector<float> scales;
  std::vector<uint8_t> zeros, codes;
  std::vector<double> errors, squares;

  bool operator==(const Searched&) const = default;
};

Searched search(const Kernels& kernels, const Grid& grid, const std::vector<float>& x,
                const std::vector<float>& importance, int rows) {
  const int cols = static_cast<int>(importance.size()), groups = rows * (cols / grid.group);
  Searched found{std::vector<float>(groups), std::vector<uint8_t>(groups), std::vector<uint8_t>(x.size()),
                 std::vector<double>(rows), std::vector<double>(rows)};
  // In two calls: what a row becomes depends on nothing else.
  for (const auto& [begin, end] : {std::pair{0, 1}, std::pair{1, rows}}) {
    kernels.search_grid({grid, cols, x.data(), importance.data(), found.scales.data(), found.zeros.data(),
                         found.codes.data(), found.errors.data(), found.squares.data(), begin, end});
  }
  return found;
}

std::vector<float> importances(Random& random, int count) {
  std::vector<float> values = random.normals(count);
  for (float& value : values) value = 0.1f + value * value;
  return values;
}

float stored(float scale, DType type) {
  if (type == DType::kFloat32) return scale;
  return type == DType::kFloat16 ? to_float(to_f16(scale)) : to_float(to_bf16(scale));
}

// The squared error of rounding a group to the nearest, with the scale that its range needs.
double plain_error(const Grid& grid, const float* x, const float* importance) {
  const auto [lowest, highest] = std::minmax_element(x, x + grid.group);
  float low = std::min(*lowest, 0.0f), high = std::max(*highest, 0.0f);
  if (grid.symmetric) high = std::max(-low, high), low = -high;
  const float scale = stored((high - low) / grid.largest, grid.scales);
  if (scale == 0) return 0;
  const float zero = grid.symmetric ? (grid.largest + 1) / 2 : std::nearbyint(-low / scale);
  double error = 0;
  for (int i = 0; i < grid.group; ++i) {
    const float code = std::clamp(std::nearbyint(x[i] / scale) + zero, 0.0f, grid.largest);
    error += std::pow(scale * (code - zero) - x[i], 2) * importance[i];
  }
  return error;
}

}  // namespace

TEST_CASE("a grid's scales are those of its codes, better than the range alone, and the same at every level") {
  constexpr int kRows = 3, kGroups = 4;
  Random random;
  for (const DType scales : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const bool symmetric : {false, true}) {
      for (const int group : {16, 48, 128}) {
        for (const float largest : {3.0f, 15.0f, 255.0f}) {
          const Grid grid{group, largest, symmetric, scales};
          const int cols = kGroups * group;
          std::vector<float> x = random.normals(kRows * cols);
          std::fill_n(x.begin() + group, group, 0.0f);  // a group of nothing
          const std::vector<float> importance = importances(random, cols);
          const Searched first = search(*tested_kernels().front(), grid, x, importance, kRows);
          for (const Kernels* kernels : tested_kernels()) {
            CAPTURE(kernels->name);
            CAPTURE(name_of(scales));
            CAPTURE(group);
            CAPTURE(largest);
            CHECK(search(*kernels, grid, x, importance, kRows) == first);
          }
          double searched = 0, plain = 0;
          for (int row = 0; row < kRows; ++row) {
            double error = 0;
            for (int i = 0; i < cols; ++i) {
              const int at = row * cols + i, g = row * kGroups + i / group;
              const float scale = first.scales[g], zero = first.zeros[g];
              REQUIRE(scale > 0);
              if (symmetric) CHECK(zero == (largest + 1) / 2);
              const float step = static_cast<float>(first.codes[at]) - zero;
              CHECK(first.codes[at] <= largest);
              CHECK(step == std::clamp(std::nearbyint(x[at] / scale), -zero, largest - zero));
              error += std::pow(double{scale} * step - x[at], 2) * importance[i];
              if (i % group == 0) plain += plain_error(grid, &x[at], &importance[i]);
            }
            CHECK(first.errors[row] == doctest::Approx(error).epsilon(1e-4));
            searched += error;
          }
          CHECK(searched <= plain * (1 + 1e-5));
        }
      }
    }
  }
}

TEST_CASE("inputs of a grid make up for the errors of those before, the same at every level and in any strips") {
  constexpr int kInputs = 7, kColumns = 2 * kGridStrip + 5, kGroups = 2, kStrips = 3;
  constexpr float kLargest = 15;
  const std::vector<int> groups{0, 0, 0, 1, 1, 1, 1};
  Random random;
  const std::vector<float> factor = random.normals(kInputs * kInputs, 0.3f);
  const std::vector<float> x = random.normals(kInputs * kColumns), originals = random.normals(kInputs * kColumns);
  std::vector<float> scales = random.normals(kGroups * kColumns), zeros(kGroups * kColumns);
  for (float& scale : scales) scale = 0.05f + std::abs(scale) / 8;
  for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<float>(i % 16);
  std::vector<float> first_errors;
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    std::vector<float> errors = x;
    std::vector<uint8_t> codes(x.size());
    std::vector<double> residuals(kStrips * kInputs);
    for (const auto& [begin, end] : {std::pair{1, kStrips}, std::pair{0, 1}}) {
      kernels->round_inputs({kInputs, kColumns, kLargest, factor.data(), originals.data(), groups.data(), scales.data(),
                             zeros.data(), errors.data(), codes.data(), residuals.data(), begin, end});
    }
    if (first_errors.empty()) first_errors = errors;
    CHECK(errors == first_errors);
    for (int i = 0; i < kInputs; ++i) {
      double residual = 0;
      for (int c = 0; c < kColumns; ++c) {
        const int at = i * kColumns + c, g = groups[i] * kColumns + c;
        double wanted = x[at];
        for (int j = 0; j < i; ++j) wanted += double{factor[j * kInputs + i]} * errors[j * kColumns + c];
        const double low = -zeros[g], high = kLargest - zeros[g], step = codes[at] - zeros[g];
        const double rounded = scales[g] * step;
        CHECK(errors[at] == doctest::Approx(originals[at] - rounded).epsilon(1e-5));
        // The nearest of the codes; a little more where two are about as near.
        CHECK(std::abs(step - std::clamp(wanted / scales[g], low, high)) <= 0.5 + 1e-3);
        residual += std::pow(wanted - rounded, 2);
      }
      double sum = 0;
      for (int strip = 0; strip < kStrips; ++strip) sum += residuals[strip * kInputs + i];
      CHECK(sum == doctest::Approx(residual).epsilon(1e-4));
    }
  }
}
