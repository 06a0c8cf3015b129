#include <doctest/doctest.h>

#include <algorithm>
#include <tuple>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kGelu: return 0.5f * x * (1 + std::erf(x / std::sqrt(2.0f)));
    case Activation::kGeluTanh: return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::kGeluQuick: return x / (1 + std::exp(-1.702f * x));
    case Activation::kRelu: return std::max(x, 0.0f);
    case Activation::kRelu2: return std::max(x, 0.0f) * std::max(x, 0.0f);
  }
  return 0;
}

double relative_error(const std::vector<float>& y, const std::vector<double>& expected) {
  double errors = 0, squares = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    errors += (y[i] - expected[i]) * (y[i] - expected[i]);
    squares += expected[i] * expected[i];
  }
  return std::sqrt(errors / squares);
}

// What a language model's activations look like: heavy tails, and a few channels that are always large.
std::vector<float> heavy_tailed(int rows, int k) {
  std::mt19937 engine(11);
  std::student_t_distribution<float> values(4.0f);
  std::vector<float> x(size_t(rows) * k);
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < k; ++i) x[size_t(r) * k + i] = values(engine) * (i % 251 == 17 ? 30.0f : 1.0f);
  }
  return x;
}

}  // namespace

TEST_CASE("gemm agrees with the plain sum over what was stored, for every level, format and odd shape") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      for (const auto& [m, n, k] : {std::tuple{1, 32, 2}, std::tuple{3, 33, 7}, std::tuple{13, 100, 65}, std::tuple{40, 64, 256},
                                   std::tuple{2, 40, 200}}) {
        CAPTURE(kernels->name);
        CAPTURE(name);
        CAPTURE(m);
        const auto x = random.normals(m * k), weight = random.normals(n * k), bias = random.normals((n + 31) / 32 * 32);
        const PackedWeight packed(*kernels, format, weight, n, k);
        const auto stored = packed.unpacked();
        std::vector<float> y(m * n, 1.0f);
        packed.multiply(x, m, Epilogue::kAdd, Activation::kSilu, bias.data(), y.data(), n);
        for (int r = 0; r < m; ++r) {
          const auto row = as_input(format, x.data() + r * k, k);
          for (int c = 0; c < n; ++c) {
            double sum = 1.0 + bias[c], magnitude = 1.0 + std::abs(bias[c]);
            for (int i = 0; i < k; ++i) {
              const double product = row[i] * stored[c * k + i];
              sum += product;
              magnitude += std::abs(product);
            }
            CHECK(std::abs(y[r * n + c] - sum) <= 1e-5 * magnitude);
          }
        }
      }
    }
  }
}

TEST_CASE("all levels store the same quantized weights and agree on the result") {
  Random random;
  const int m = 5, n = 64, k = 288;
  const auto x = heavy_tailed(m, k), weight = random.normals(n * k, 0.05f);
  for (const auto& [name, format] : kFormats) {
    CAPTURE(name);
    const PackedWeight first(*available_kernels().back(), format, weight, n, k);
    const auto expected = first.multiply(x, m);
    for (const Kernels* kernels : tested_kernels()) {
      CAPTURE(kernels->name);
      const PackedWeight packed(*kernels, format, weight, n, k);
      CHECK(packed.unpacked() == first.unpacked());
      CHECK(relative_error(packed.multiply(x, m), {expected.begin(), expected.end()}) <= 1e-6);
    }
  }
}

TEST_CASE("the error against float32 on heavy-tailed activations is what the bits allow") {
  Random random;
  const int m = 24, n = 96, k = 1024;
  const auto x = heavy_tailed(m, k), weight = random.normals(n * k, 0.02f);
  std::vector<double> expected(m * n);
  for (int r = 0; r < m; ++r) {
    for (int c = 0; c < n; ++c) {
      for (int i = 0; i < k; ++i) expected[r * n + c] += double(x[r * k + i]) * weight[c * k + i];
    }
  }
  // Root mean square of the error over that of the result.
  const auto bound = [](const WeightFormat& format) {
    switch (format.kind) {
      case WeightKind::kFloat32: return 1e-6;
      case WeightKind::kBFloat16: return 0.004;
      case WeightKind::kFloat16: return 0.0005;
      case WeightKind::kInt8: return 0.016;
      case WeightKind::kInt8Channel: return 0.1;  // one scale a row: what the outliers leave of seven bits
      case WeightKind::kInt4: return format.group == 32 ? 0.1 : 0.13;
      default: break;
    }
    return 0.0;
  };
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      CAPTURE(kernels->name);
      CAPTURE(name);
      const double error = relative_error(PackedWeight(*kernels, format, weight, n, k).multiply(x, m), expected);
      CHECK(error <= bound(format));
      CHECK(error >= bound(format) / 40);  // a bound that says something
    }
  }
}

TEST_CASE("a row's result is the same to the bit alone, among few others and among many") {
  Random random;
  // Several tiles of rows and a rest, in less than a chunk of inputs and in several.
  for (const auto& [m, n, k] : {std::tuple{61, 96, 130}, std::tuple{109, 32, 610}}) {
    const auto x = random.normals(m * k), weight = random.normals(n * k);
    for (const Kernels* kernels : tested_kernels()) {
      for (const auto& [name, format] : kFormats) {
        CAPTURE(kernels->name);
        CAPTURE(name);
        CAPTURE(k);
        const PackedWeight packed(*kernels, format, weight, n, k);
        const auto together = packed.multiply(x, m);
        for (int r = 0; r < m; r += kStride) {
          const auto alone = packed.multiply({x.begin() + r * k, x.begin() + (r + 1) * k}, 1);
          CHECK(std::memcmp(alone.data(), together.data() + r * n, n * sizeof(float)) == 0);
        }
        for (int few = 2; few <= 12; few += kStride) {  // rows that some levels multiply in another way than many
          const auto some = packed.multiply({x.begin(), x.begin() + few * k}, few);
          CHECK(std::memcmp(some.data(), together.data(), few * n * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST_CASE("a row that is not finite gives no finite result, and leaves the others alone") {
  Random random;
  const int m = 3, n = 32, k = 96;
  auto x = random.normals(m * k);
  const auto weight = random.normals(n * k);
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        CAPTURE(kernels->name);
        CAPTURE(name);
        const PackedWeight packed(*kernels, format, weight, n, k);
        const auto good = packed.multiply(x, m);
        auto broken = x;
        broken[k + 40] = bad;
        const auto y = packed.multiply(broken, m);
        for (int c = 0; c < n; ++c) CHECK(!std::isfinite(y[n + c]));
        CHECK(std::memcmp(y.data(), good.data(), n * sizeof(float)) == 0);
        CHECK(std::memcmp(y.data() + 2 * n, good.data() + 2 * n, n * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("gated and plain activations") {
  Random random;
  const int m = 5, k = 32, width = 48;
  const auto x = random.normals(m * k, 0.3f), gate = random.normals(width * k, 0.3f), up = random.normals(width * k, 0.3f);
  // Sixteen columns of gate, sixteen of up, as the executor places them.
  std::vector<float> weight(2 * width * k);
  for (int c = 0; c < width; ++c) {
    const int column = c / 16 * 32 + c % 16;
    std::copy_n(gate.data() + c * k, k, weight.data() + column * k);
    std::copy_n(up.data() + c * k, k, weight.data() + (column + 16) * k);
  }
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      CAPTURE(kernels->name);
      CAPTURE(name);
      const PackedWeight packed(*kernels, format, weight, 2 * width, k);
      const auto plain = packed.multiply(x, m);
      for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kGeluQuick,
                                          Activation::kRelu, Activation::kRelu2}) {
        std::vector<float> gated(m * width), scaled(m * width), activated(m * 2 * width);
        packed.multiply(x, m, Epilogue::kGated, activation, nullptr, gated.data(), width);
        packed.multiply(x, m, Epilogue::kGated, activation, nullptr, scaled.data(), width, 0.3f);
        packed.multiply(x, m, Epilogue::kActivation, activation, nullptr, activated.data(), 2 * width);
        for (int r = 0; r < m; ++r) {
          for (int c = 0; c < width; ++c) {
            const int column = c / 16 * 32 + c % 16;
            const float a = activate(activation, plain[r * 2 * width + column]);
            CHECK(activated[r * 2 * width + column] == doctest::Approx(a).epsilon(1e-5).scale(1.0));
            const float other = plain[r * 2 * width + column + 16];
            CHECK(gated[r * width + c] == doctest::Approx(a * other).epsilon(1e-5).scale(1.0));
            const float less = activate(activation, 0.3f * plain[r * 2 * width + column]);
            CHECK(scaled[r * width + c] == doctest::Approx(less * other).epsilon(1e-5).scale(1.0));
          }
        }
      }
    }
  }
}

TEST_CASE("a product may be scaled and capped before it is stored or added") {
  Random random;
  const int m = 5, n = 50, k = 40;
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    const PackedWeight weight(*kernels, {WeightKind::kFloat32}, random.normals(size_t(n) * k), n, k);
    const auto x = random.normals(size_t(m) * k), bias = random.normals(n), start = random.normals(size_t(m) * n);
    std::vector<float> plain(size_t(m) * n), capped = plain, added = start;
    weight.multiply(x, m, Epilogue::kStore, Activation::kSilu, bias.data(), plain.data(), n);
    weight.multiply(x, m, Epilogue::kStore, Activation::kSilu, bias.data(), capped.data(), n, 0.3f, 1.5f);
    weight.multiply(x, m, Epilogue::kAdd, Activation::kSilu, bias.data(), added.data(), n, 0.3f);
    for (int i = 0; i < m * n; ++i) {
      CHECK(capped[i] == doctest::Approx(1.5 * std::tanh(0.3 * plain[i] / 1.5)).epsilon(1e-5).scale(1.0));
      CHECK(added[i] == doctest::Approx(start[i] + 0.3 * plain[i]).epsilon(1e-6).scale(1.0));
    }
    auto broken = x;
    broken[k + 3] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> after(size_t(m) * n);
    weight.multiply(broken, m, Epilogue::kStore, Activation::kSilu, bias.data(), after.data(), n, 0.3f, 1.5f);
    for (int i = 0; i < m * n; ++i) CHECK((i / n == 1 ? std::isnan(after[i]) : after[i] == capped[i]));
  }
}

TEST_CASE("weights are packed alike from every type that holds them, rows or columns first, and in any pieces") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      // 16 rows a group, every other group: gate and up of a gated MLP.
      for (const auto& [n, k, group, stride] :
           {std::tuple{64, 48, 64, 64}, std::tuple{33, 7, 33, 33}, std::tuple{64, 33, 16, 32}}) {
        CAPTURE(kernels->name);
        CAPTURE(name);
        CAPTURE(k);
        std::vector<float> floats = random.normals(size_t(n) * k), across(floats.size());
        for (float& x : floats) x = to_float(to_f16(to_float(to_bf16(x * 64)) / 64));  // what all types hold
        std::vector<bf16> bf16s(floats.size());
        std::vector<f16> f16s(floats.size());
        for (int r = 0; r < n; ++r) {
          for (int i = 0; i < k; ++i) across[size_t(i) * n + r] = floats[size_t(r) * k + i];
        }
        std::transform(floats.begin(), floats.end(), bf16s.begin(), [](float x) { return to_bf16(x); });
        std::transform(floats.begin(), floats.end(), f16s.begin(), [](float x) { return to_f16(x); });
        const size_t size = (n / group * stride + kPanel - 1) / kPanel * kernels->panel_bytes(format, k);
        const auto pack = [&](const void* from, DType type, int row_stride, int col_stride, int piece) {
          std::vector<char> packed(size);
          for (int row = 0; row < n; row += piece) {
            const char* rows = static_cast<const char*>(from) + row * row_stride * dtype_bytes(type);
            kernels->pack_weights(format, {rows, type, row_stride, col_stride, n, k, packed.data(), k, group, stride, 0, row,
                                   std::min(n, row + piece)});
          }
          return packed;
        };
        const std::vector<char> expected = pack(across.data(), DType::kFloat32, 1, n, n);
        for (const int piece : {n, 32, 5}) {
          CHECK(pack(floats.data(), DType::kFloat32, k, 1, piece) == expected);
          CHECK(pack(bf16s.data(), DType::kBFloat16, k, 1, piece) == expected);
          CHECK(pack(f16s.data(), DType::kFloat16, k, 1, piece) == expected);
        }
      }
    }
  }
}

TEST_CASE("a packed row unpacks to what was packed, as near as its format comes") {
  Random random;
  const int n = 70, k = 130;
  const auto weight = random.normals(n * k);
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      CAPTURE(kernels->name);
      CAPTURE(name);
      const auto stored = PackedWeight(*kernels, format, weight, n, k).unpacked();
      for (size_t i = 0; i < stored.size(); ++i) {
        if (is_float(format)) {
          CHECK(stored[i] == rounded(static_cast<DType>(format.kind), weight[i]));
        } else {
          // Half a step of the coarsest scale there can be, and what clipping extremes may cost on top.
          const double largest = 5.0, step = format.kind == WeightKind::kInt4 ? largest / 7 : largest / 127;
          CHECK(std::abs(stored[i] - weight[i]) <= 0.5 * step + (format.kind == WeightKind::kInt4 ? 1.3 : 1e-3));
        }
      }
    }
  }
}

TEST_CASE("zero weights and zero rows stay zero") {
  const int n = 32, k = 64;
  for (const Kernels* kernels : tested_kernels()) {
    for (const auto& [name, format] : kFormats) {
      CAPTURE(kernels->name);
      CAPTURE(name);
      const std::vector<float> zeros(n * k), ones(n * k, 1.0f);
      const auto by_zero = PackedWeight(*kernels, format, zeros, n, k).multiply(ones, 1);
      const auto of_zero = PackedWeight(*kernels, format, ones, n, k).multiply(zeros, 1);
      for (int c = 0; c < n; ++c) {
        CHECK(by_zero[c] == 0.0f);
        CHECK(of_zero[c] == 0.0f);
      }
    }
  }
}
