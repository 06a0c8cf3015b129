#include <doctest/doctest.h>

#include <tuple>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

struct Packed {
  std::vector<char> bytes;
  int n, k;
};

Packed pack(const Kernels& kernels, DType type, const std::vector<float>& weight, int n, int k) {
  const size_t columns = (n + kPanel - 1) / kPanel * kPanel;
  Packed packed{std::vector<char>(columns * (k + 1) * 4 + 64), n, k};
  kernels.pack(type, {weight.data(), DType::kFloat32, k, 1, n, k, packed.bytes.data(), k, n, 0, 0, 0, n});
  return packed;
}

int panels(int n) { return (n + kPanel - 1) / kPanel; }

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kGelu: return 0.5f * x * (1 + std::erf(x / std::sqrt(2.0f)));
    case Activation::kGeluTanh: return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu: return std::max(x, 0.0f);
  }
  return 0;
}

}  // namespace

TEST_CASE("gemm agrees with the plain sum, for every level, type and odd shape") {
  Random random;
  for (const Kernels* kernels : available_kernels()) {
    for (const DType type : kTypes) {
      for (const auto& [m, n, k] : {std::tuple{1, 32, 2}, std::tuple{3, 33, 7}, std::tuple{13, 100, 65}, std::tuple{40, 64, 256}}) {
        CAPTURE(kernels->name);
        CAPTURE(name_of(type));
        CAPTURE(m);
        const auto x = random.normals(m * k), weight = random.normals(n * k), bias = random.normals(panels(n) * kPanel);
        const auto packed = pack(*kernels, type, weight, n, k);
        const size_t stride = k + 5 - k % 2;
        const auto inputs = activations(*kernels, type, x, m, k, stride);
        std::vector<float> y(m * n, 1.0f);
        kernels->gemm(type, {inputs.data(), stride, 0, m, packed.bytes.data(), k, n, 0, panels(n), bias.data(), Epilogue::kAdd,
                             Activation::kSilu, y.data(), nullptr, size_t(n)});
        for (int r = 0; r < m; ++r) {
          for (int c = 0; c < n; ++c) {
            double sum = 1.0 + bias[c], magnitude = 1.0;
            for (int i = 0; i < k; ++i) {
              const double product = double(rounded(type, x[r * k + i])) * rounded(type, weight[c * k + i]);
              sum += product;
              magnitude += std::abs(product);
            }
            CHECK(std::abs(y[r * n + c] - sum) <= tolerance(type) * magnitude);
          }
        }
      }
    }
  }
}

TEST_CASE("a row's result is the same to the bit alone and among others") {
  Random random;
  const int m = 61, n = 96, k = 130;
  const auto x = random.normals(m * k), weight = random.normals(n * k);
  for (const Kernels* kernels : available_kernels()) {
    for (const DType type : kTypes) {
      const auto packed = pack(*kernels, type, weight, n, k);
      const auto inputs = activations(*kernels, type, x, m, k, k);
      const int unit = kernels->activation_bytes[static_cast<int>(type)];
      std::vector<float> together(m * n), alone(n);
      const auto run = [&](const char* rows, int count, float* y) {
        kernels->gemm(type, {rows, size_t(k), 0, count, packed.bytes.data(), k, n, 0, panels(n), nullptr, Epilogue::kStore,
                             Activation::kSilu, y, nullptr, size_t(n)});
      };
      run(inputs.data(), m, together.data());
      for (int r = 0; r < m; ++r) {
        run(inputs.data() + size_t(r) * k * unit, 1, alone.data());
        CHECK(std::memcmp(alone.data(), together.data() + r * n, n * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("gated and plain activations") {
  Random random;
  const int m = 5, k = 32, width = 48;
  const auto x = random.normals(m * k, 0.3f), gate = random.normals(width * k, 0.3f), up = random.normals(width * k, 0.3f);
  for (const Kernels* kernels : available_kernels()) {
    for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
      const DType type = DType::kFloat32;
      std::vector<char> packed(2 * width * k * sizeof(float));
      kernels->pack(type, {gate.data(), type, k, 1, width, k, packed.data(), k, 16, kPanel, 0, 0, width});
      kernels->pack(type, {up.data(), type, k, 1, width, k, packed.data(), k, 16, kPanel, 16, 0, width});
      std::vector<float> out(m * width);
      kernels->gemm(type, {x.data(), size_t(k), 0, m, packed.data(), k, 2 * width, 0, panels(2 * width), nullptr,
                           Epilogue::kGated, activation, nullptr, out.data(), size_t(width)});
      const auto dot = [&](const std::vector<float>& weight, int r, int c) {
        float sum = 0;
        for (int i = 0; i < k; ++i) sum += x[r * k + i] * weight[c * k + i];
        return sum;
      };
      for (int r = 0; r < m; ++r) {
        for (int c = 0; c < width; ++c) {
          const float expected = activate(activation, dot(gate, r, c)) * dot(up, r, c);
          CHECK(out[r * width + c] == doctest::Approx(expected).epsilon(1e-5).scale(1.0));
        }
      }
    }
  }
}

TEST_CASE("a packed row unpacks to what was packed") {
  Random random;
  const int n = 70, k = 9;
  const auto weight = random.normals(n * k);
  for (const Kernels* kernels : available_kernels()) {
    for (const DType type : kTypes) {
      const auto packed = pack(*kernels, type, weight, n, k);
      std::vector<float> row(k);
      for (int r = 0; r < n; ++r) {
        kernels->unpack_row(type, packed.bytes.data(), k, r, row.data());
        for (int c = 0; c < k; ++c) CHECK(row[c] == rounded(type, weight[r * k + c]));
      }
    }
  }
}
