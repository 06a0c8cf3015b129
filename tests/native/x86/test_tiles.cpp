// What the kernels of amx do to the processor, and to the last bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <thread>

#include "../support.h"
#include "tile_model.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

const Kernels* amx() {
  for (const Kernels* kernels : modelled_kernels()) {
    if (kernels->name == std::string("amx_model")) return kernels;
  }
  return nullptr;
}

bool in_tiles(const WeightFormat& format) {
  return format.kind != WeightKind::kFloat32 && format.kind != WeightKind::kFloat16;
}

}  // namespace

TEST_CASE("amx: tiles are configured by the thread that multiplies, once for each number of rows, and given back") {
  const Kernels* kernels = amx();
  if (!kernels) return;
  Random random;
  const int n = 96, k = 64;
  const auto x = random.normals(40 * k);
  for (const auto& [name, format] : kFormats) {
    CAPTURE(name);
    const PackedWeight packed(*kernels, format, random.normals(n * k), n, k);
    // Rows, and how often that many are met in 3 panels: tiles take 32, or 16 where groups have scales.
    const bool groups = format.kind == WeightKind::kInt8 || format.kind == WeightKind::kInt4;
    for (const auto& [m, shapes] : {std::pair{1, 1}, std::pair{16, 1}, std::pair{32, 1}, std::pair{40, groups ? 2 : 2}}) {
      CAPTURE(m);
      int before = 0, after = 0;
      bool left = true;
      std::thread([&, rows = m] {
        before = tile_model::configurations();
        packed.multiply(x, rows);
        after = tile_model::configurations();
        left = tile_model::configured();
      }).join();
      CHECK(!left);
      CHECK(after - before == (in_tiles(format) ? (shapes == 1 ? 1 : 6) : 0));
    }
  }
}

TEST_CASE("amx: quantized results are those of AVX-512, bit for bit") {
  const Kernels* kernels = amx();
  if (!kernels) return;
  Random random;
  for (const auto& [m, n, k] : {std::tuple{1, 64, 96}, std::tuple{16, 32, 256}, std::tuple{45, 70, 330}}) {
    const auto x = random.normals(m * k), weight = random.normals(n * k);
    for (const auto& [name, format] : kFormats) {
      if (is_float(format)) continue;
      CAPTURE(name);
      CAPTURE(m);
      const auto expected = PackedWeight(choose_kernels("avx512_bf16"), format, weight, n, k).multiply(x, m);
      CHECK(PackedWeight(*kernels, format, weight, n, k).multiply(x, m) == expected);
    }
  }
}

TEST_CASE("amx: a bfloat16 sum is that of instructions of 32 inputs, in order") {
  const Kernels* kernels = amx();
  if (!kernels) return;
  Random random;
  const int m = 37, n = 40, k = 200;
  const auto x = random.normals(m * k), weight = random.normals(n * k);
  const auto y = PackedWeight(*kernels, {WeightKind::kBFloat16}, weight, n, k).multiply(x, m);
  for (int r = 0; r < m; ++r) {
    for (int c = 0; c < n; ++c) {
      float sum = 0;
      for (int begin = 0; begin < k; begin += 32) {
        float halves[2] = {};
        for (int i = begin; i < std::min(k, begin + 32); ++i) {
          const float a = rounded(DType::kBFloat16, x[r * k + i]), b = rounded(DType::kBFloat16, weight[c * k + i]);
          halves[i % 2] = std::fma(a, b, halves[i % 2]);
        }
        sum += halves[0] + halves[1];
      }
      CHECK(y[r * n + c] == sum);
    }
  }
}

