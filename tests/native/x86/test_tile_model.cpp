// The model against what the manual says of each instruction.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

#include "kernels/types.h"
#include "tile_model.h"

using namespace tidewheel;
using namespace tidewheel::tile_model;

namespace {

struct Config {
  uint8_t bytes[64] = {1};

  Config& tile(int index, int rows, int row_bytes) {
    bytes[16 + 2 * index] = static_cast<uint8_t>(row_bytes);
    bytes[17 + 2 * index] = static_cast<uint8_t>(row_bytes >> 8);
    bytes[48 + index] = static_cast<uint8_t>(rows);
    return *this;
  }
  Config& byte(int index, int value) {
    bytes[index] = static_cast<uint8_t>(value);
    return *this;
  }
};

// Configured while it lives.
struct Configured {
  explicit Configured(const Config& config) { ldtilecfg(config.bytes); }
  ~Configured() { tilerelease(); }
};

// A product of one sum, of `pairs` pairs.
Config one_sum(int pairs) { return Config().tile(0, 1, 4).tile(1, 1, 4 * pairs).tile(2, pairs, 4); }

// start + the sum over a[i] b[i], as one instruction has it.
float dot(const std::vector<float>& a, const std::vector<float>& b, float start = 0.0f) {
  std::vector<bf16> x(a.size()), w(b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    x[i] = to_bf16(a[i]);
    w[i] = to_bf16(b[i]);
  }
  const Configured configured(one_sum(static_cast<int>(a.size()) / 2));
  tileloadd(0, &start, 0);
  tileloadd(1, x.data(), 0);
  tileloadd(2, w.data(), 4);
  tdpbf16ps(0, 1, 2);
  tilestored(0, &start, 0);
  return start;
}

int dot_bytes(void (*product)(int, int, int), std::initializer_list<int> a, std::initializer_list<int> b, int start) {
  uint8_t x[4], w[4];
  std::copy(a.begin(), a.end(), x);
  std::copy(b.begin(), b.end(), w);
  const Configured configured(one_sum(1));
  tileloadd(0, &start, 0);
  tileloadd(1, x, 0);
  tileloadd(2, w, 0);
  product(0, 1, 2);
  tilestored(0, &start, 0);
  return start;
}

}  // namespace

TEST_CASE("tiles: a configuration that is not sound is refused") {
  CHECK_THROWS_AS(ldtilecfg(Config().byte(0, 2).bytes), GeneralProtection);           // palette
  CHECK_THROWS_AS(ldtilecfg(Config().byte(5, 1).bytes), GeneralProtection);           // reserved
  CHECK_THROWS_AS(ldtilecfg(Config().byte(32, 4).bytes), GeneralProtection);          // a ninth tile's bytes
  CHECK_THROWS_AS(ldtilecfg(Config().byte(56, 4).bytes), GeneralProtection);          // and rows
  CHECK_THROWS_AS(ldtilecfg(Config().tile(3, 17, 64).bytes), GeneralProtection);
  CHECK_THROWS_AS(ldtilecfg(Config().tile(3, 16, 65).bytes), GeneralProtection);
  CHECK_THROWS_AS(ldtilecfg(Config().tile(3, 16, 256 + 64).bytes), GeneralProtection);
  CHECK_THROWS_AS(ldtilecfg(Config().tile(3, 16, 0).bytes), GeneralProtection);
  CHECK_THROWS_AS(ldtilecfg(Config().tile(3, 0, 64).bytes), GeneralProtection);
  CHECK(!configured());
}

TEST_CASE("tiles: what is not configured cannot be used") {
  float memory[16] = {};
  const auto none_of = [&](int tile) {
    CHECK_THROWS_AS(tilezero(tile), InvalidOpcode);
    CHECK_THROWS_AS(tileloadd(tile, memory, 64), InvalidOpcode);
    CHECK_THROWS_AS(tilestored(tile, memory, 64), InvalidOpcode);
  };
  none_of(0);
  {
    const Configured configured(Config().tile(0, 1, 64));
    tilezero(0);
    none_of(1);
    none_of(8);
  }
  none_of(0);
  ldtilecfg(Config().tile(0, 1, 64).bytes);
  ldtilecfg(Config().byte(0, 0).tile(0, 1, 64).bytes);  // palette 0 releases
  none_of(0);
}

TEST_CASE("tiles: a product's shapes must match") {
  const auto refused = [](const Config& config, int c, int a, int b) {
    const Configured configured(config);
    for (const auto product : {tdpbf16ps, tdpbssd, tdpbsud, tdpbusd, tdpbuud}) {
      CHECK_THROWS_AS(product(c, a, b), InvalidOpcode);
    }
  };
  const auto shapes = [] { return Config().tile(0, 3, 20).tile(1, 3, 12).tile(2, 3, 20); };
  {
    const Configured configured(shapes());
    tdpbf16ps(0, 1, 2);
  }
  refused(shapes(), 0, 0, 2);
  refused(shapes(), 0, 1, 0);
  refused(shapes(), 0, 1, 1);
  refused(shapes(), 0, 1, 3);                  // tile 3 has no shape
  refused(shapes().tile(0, 4, 20), 0, 1, 2);   // rows of C and A
  refused(shapes().tile(0, 3, 24), 0, 1, 2);   // columns of C and B
  refused(shapes().tile(1, 3, 16), 0, 1, 2);   // columns of A and rows of B
  refused(shapes().tile(1, 3, 14), 0, 1, 2);   // half a pair
  refused(shapes().tile(0, 3, 22).tile(2, 3, 22), 0, 1, 2);
}

TEST_CASE("tiles: loads and stores keep to the shape, and the rest of a tile is 0") {
  std::vector<uint8_t> memory(16 * 100);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i % 251 + 1);
  ldtilecfg(Config().tile(0, 16, 64).tile(1, 3, 10).bytes);
  tileloadd(1, memory.data(), 100);
  std::vector<uint8_t> stored(16 * 64, 77);
  tilestored(1, stored.data(), 64);
  for (int r = 0; r < 16; ++r) {
    for (int i = 0; i < 64; ++i) CHECK(stored[r * 64 + i] == (r < 3 && i < 10 ? memory[r * 100 + i] : 77));
  }
  tileloadd(0, memory.data(), 0);  // the same row, sixteen times
  tilestored(0, stored.data(), 64);
  for (int r = 0; r < 16; ++r) CHECK(std::memcmp(stored.data() + r * 64, memory.data(), 64) == 0);
  tilezero(0);
  tilestored(0, stored.data(), 64);
  CHECK(stored == std::vector<uint8_t>(16 * 64, 0));
  tileloadd(0, memory.data(), 64);
  ldtilecfg(Config().tile(0, 16, 64).bytes);  // clears all
  tilestored(0, stored.data(), 64);
  CHECK(stored == std::vector<uint8_t>(16 * 64, 0));
  tilerelease();
}

TEST_CASE("tiles: a load goes on where it was interrupted, once") {
  uint8_t memory[4] = {1, 2, 3, 4}, stored[4] = {};
  ldtilecfg(Config().tile(0, 4, 1).byte(1, 2).bytes);
  tileloadd(0, memory, 1);
  tilestored(0, stored, 1);
  CHECK(stored[0] == 0);
  CHECK(stored[1] == 0);
  CHECK(stored[2] == 3);
  CHECK(stored[3] == 4);
  tileloadd(0, memory, 1);
  tilestored(0, stored, 1);
  CHECK(std::memcmp(stored, memory, 4) == 0);
  tilerelease();
}

TEST_CASE("tiles: the configuration can be read, and is each thread's own") {
  uint8_t seen[64];
  sttilecfg(seen);
  CHECK(std::memcmp(seen, Config().byte(0, 0).bytes, 64) == 0);
  const Config config = Config().tile(0, 16, 64).tile(7, 3, 12);
  ldtilecfg(config.bytes);
  sttilecfg(seen);
  CHECK(std::memcmp(seen, config.bytes, 64) == 0);
  std::thread([] { CHECK(!configured()); }).join();
  tilerelease();
  CHECK(!configured());
}

TEST_CASE("tiles: products of bytes take each side's sign, and wrap around") {
  const auto with = [](void (*product)(int, int, int)) {
    return dot_bytes(product, {255, 2, 3, 128}, {255, 128, 1, 128}, 7);
  };
  CHECK(with(tdpbssd) == 7 + 1 - 2 * 128 + 3 + 128 * 128);
  CHECK(with(tdpbsud) == 7 - 255 + 2 * 128 + 3 - 128 * 128);
  CHECK(with(tdpbusd) == 7 - 255 - 2 * 128 + 3 - 128 * 128);
  CHECK(with(tdpbuud) == 7 + 255 * 255 + 2 * 128 + 3 + 128 * 128);
  CHECK(dot_bytes(tdpbssd, {1, 0, 0, 0}, {1, 0, 0, 0}, INT32_MAX) == INT32_MIN);
}

TEST_CASE("tiles: even and odd inputs are summed apart, each product fused, and then together onto C") {
  // 2^24 + 1 has no float: what comes after it in the same sum is lost, in the other it is not.
  CHECK(dot({0x1p24f, 0, 1, 0}, {1, 1, 1, 1}) == 0x1p24f);
  CHECK(dot({0x1p24f, 0, 1, 0, 1, 0}, {1, 1, 1, 1, 1, 1}) == 0x1p24f);
  CHECK(dot({0x1p24f, 1, 0, 1}, {1, 1, 1, 1}) == 0x1p24f + 2);
  CHECK(dot({1, 0, 1, 0, 0x1p24f, 0}, {1, 1, 1, 1, 1, 1}) == 0x1p24f + 2);
  // C comes last: the instruction's own sum is 0, though no step of it would be on C.
  CHECK(dot({1, 0, -1, 0}, {1, 1, 1, 1}, 0x1p-30f) == 0x1p-30f);
  CHECK(dot({1, 1}, {1, 1}, 0x1p24f) == 0x1p24f + 2);
  CHECK(dot({1, 0, 1, 0}, {1, 1, 1, 1}, 0x1p24f) == 0x1p24f + 2);
  // (1 + 2^-7)^2 is 1 + 2^-6 + 2^-14: beside 2^10 its last bit is at 2^-13, where the product alone is exact.
  CHECK(dot({0x1p10f, 0, 1.0078125f, 0}, {-1, 1, 1.0078125f, 1}) == -0x1p10f + 1.01568603515625f);
}

TEST_CASE("tiles: sums round to the nearest, ties to even, whatever the caller's mode") {
  CHECK(dot({0x1p24f, 0, 3, 0}, {1, 1, 1, 1}) == 0x1p24f + 4);
  CHECK(dot({-0x1p24f, 0, -1, 0}, {1, 1, 1, 1}) == -0x1p24f);
}

TEST_CASE("tiles: denormal numbers are taken for 0 and become 0") {
  const float denormal = 0x1p-127f;  // in bfloat16 too
  CHECK(dot({denormal, 0}, {0x1p100f, 1}) == 0.0f);
  CHECK(dot({0x1p100f, 0}, {denormal, 1}) == 0.0f);
  CHECK(dot({0x1p-100f, 0}, {0x1p-27f, 1}) == 0.0f);
  CHECK(dot({0x1p-100f, 0}, {0x1p-26f, 1}) == 0x1p-126f);
  CHECK(dot({0, 0}, {1, 1}, 0x1p-127f) == 0.0f);  // in C
  CHECK(dot({0x1p-126f, -0x1.8p-126f}, {1, 1}) == 0.0f);
  CHECK(std::signbit(dot({0x1p-126f, -0x1.8p-126f}, {1, 1}, -0.0f)));
  CHECK(0x1p-126f / 2 != 0.0f);  // nothing of it stays with the caller
}

TEST_CASE("tiles: what is not finite spreads as in any sum") {
  CHECK(std::isinf(dot({INFINITY, 0}, {1, 1})));
  CHECK(std::isnan(dot({INFINITY, 0}, {0, 1})));
  CHECK(std::isnan(dot({INFINITY, INFINITY}, {1, -1})));
  CHECK(std::isnan(dot({NAN, 0}, {1, 1})));
}

TEST_CASE("tiles: a product of matrices is that of their rows and columns, and its other rows are 0") {
  constexpr int kRows = 5, kColumns = 7, kPairs = 3;
  std::vector<bf16> a(kRows * 2 * kPairs), b(kPairs * 2 * kColumns);
  for (size_t i = 0; i < a.size(); ++i) a[i] = to_bf16(static_cast<float>(i % 11) - 5);
  for (size_t i = 0; i < b.size(); ++i) b[i] = to_bf16(static_cast<float>(i % 7) - 3);
  ldtilecfg(Config().tile(0, kRows, 4 * kColumns).tile(1, kRows, 4 * kPairs).tile(2, kPairs, 4 * kColumns).bytes);
  tilezero(0);
  tileloadd(1, a.data(), 4 * kPairs);
  tileloadd(2, b.data(), 4 * kColumns);
  tdpbf16ps(0, 1, 2);
  float c[kRows * kColumns];
  tilestored(0, c, 4 * kColumns);
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      float sum = 0;
      for (int k = 0; k < 2 * kPairs; ++k) {
        sum += to_float(a[m * 2 * kPairs + k]) * to_float(b[(k / 2 * kColumns + n) * 2 + k % 2]);
      }
      CHECK(c[m * kColumns + n] == sum);
    }
  }
  tilerelease();
}
