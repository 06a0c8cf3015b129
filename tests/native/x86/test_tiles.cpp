// What the kernels of amx do to the processor, and to the last bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <thread>

#include "../support.h"
#include "tile_model.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// Those on tiles: over the model, and the processor's own if it has them.
std::vector<const Kernels*> amx_kernels() {
  std::vector<const Kernels*> levels = tested_kernels();
  std::erase_if(levels, [](const Kernels* level) { return std::string(level->name).rfind("amx", 0) != 0; });
  return levels;
}

bool is_model(const Kernels* kernels) { return kernels->name == std::string("amx_model"); }

// How often tiles are configured for this many rows, whose tiles have one shape or `shapes`. Up to 8 rows of groups are
// multiplied in vectors, behind whole tiles, too.
int configured_for(const WeightFormat& format, int rows, int shapes) {
  switch (format.kind) {
    case WeightKind::kFloat32:
    case WeightKind::kFloat16: return 0;
    case WeightKind::kInt8:
    case WeightKind::kInt4: return rows > 8 ? 1 : 0;
    default: return shapes;
  }
}

}  // namespace

TEST_CASE("amx: tiles are configured by the thread that multiplies, once for each number of rows, and given back") {
  if (amx_kernels().empty()) MESSAGE("the processor lacks avx512_bf16: amx and avx2_vnni are not tested");
  Random random;
  const int n = 96, k = 64, panels = n / kPanel;
  const auto x = random.normals(40 * k);
  for (const Kernels* kernels : amx_kernels()) {
    if (!is_model(kernels)) continue;
    for (const auto& [name, format] : kFormats) {
      CAPTURE(name);
      const PackedWeight packed(*kernels, format, random.normals(n * k), n, k);
      // 40 rows are some whole tiles and a smaller one in each panel.
      for (const auto& [m, shapes] : {std::pair{1, 1}, std::pair{16, 1}, std::pair{32, 1}, std::pair{40, 2 * panels}}) {
        CAPTURE(m);
        int loaded = 0;
        bool left = true;
        std::thread([&, rows = m] {
          packed.multiply(x, rows);
          loaded = tile_model::configurations();
          left = tile_model::configured();
        }).join();
        CHECK(!left);
        CHECK(loaded == configured_for(format, m, shapes));
      }
    }
  }
}

TEST_CASE("amx: quantized results are those of AVX-512, bit for bit") {
  Random random;
  for (const Kernels* kernels : amx_kernels()) {
    // Up to several pairs of tiles, and several pieces of the inputs.
    for (const auto& [m, n, k] : {std::tuple{1, 64, 96}, std::tuple{16, 32, 256}, std::tuple{45, 70, 330}, std::tuple{70, 32, 700}}) {
      const auto x = random.normals(m * k), weight = random.normals(n * k);
      for (const auto& [name, format] : kFormats) {
        if (is_float(format)) continue;
        CAPTURE(kernels->name);
        CAPTURE(name);
        CAPTURE(m);
        const auto expected = PackedWeight(choose_kernels("avx512_bf16"), format, weight, n, k).multiply(x, m);
        CHECK(PackedWeight(*kernels, format, weight, n, k).multiply(x, m) == expected);
      }
    }
  }
}

TEST_CASE("amx: a bfloat16 sum is that of instructions of 32 inputs, in order") {
  Random random;
  const int m = 69, n = 40, k = 330;
  const auto x = random.normals(m * k), weight = random.normals(n * k);
  for (const Kernels* kernels : amx_kernels()) {
    CAPTURE(kernels->name);
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
}

TEST_CASE("amx and avx2_vnni are not offered where the processor lacks them") {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for (const auto& [level, flag] : {std::pair{"amx", " amx_tile "}, std::pair{"avx2_vnni", " avx_vnni "}}) {
    if (text.find(flag) != std::string::npos) continue;
    CAPTURE(level);
    CHECK_THROWS_AS(choose_kernels(level), std::invalid_argument);
  }
}
