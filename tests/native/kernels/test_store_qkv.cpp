#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "cached.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// q and k heads of one token as `store_qkv` should make them, in double.
std::vector<double> prepared(const float* x, int dim, const std::vector<float>& norm, const Preparation& preparation) {
  std::vector<double> values(x, x + dim);
  if (!norm.empty()) {
    double mean = 0, squares = 0;
    for (const double value : values) mean += preparation.kind == NormKind::kLayer ? value / dim : 0;
    for (double& value : values) squares += std::pow(value -= mean, 2);
    for (int d = 0; d < dim; ++d) values[d] *= norm[d] / std::sqrt(squares / dim + 1e-5);
  }
  const size_t pairs = preparation.cos.size();
  for (size_t i = 0; i < pairs; ++i) {
    double& first = values[preparation.interleaved ? 2 * i : i];
    double& second = values[preparation.interleaved ? 2 * i + 1 : i + pairs];
    const double a = first, b = second;
    first = a * preparation.cos[i] - b * preparation.sin[i];
    second = b * preparation.cos[i] + a * preparation.sin[i];
  }
  return values;
}

// A float of 8 bits, and the code behind that of the largest one.
template <typename T>
struct SmallFloat {
  static float value(int code) { return to_float(T{static_cast<uint8_t>(code)}); }
  static constexpr int kEnd = __is_same(T, e5m2) ? 0x7c : 0x7f;
  static constexpr CacheType kCache = __is_same(T, e5m2) ? CacheType::kFloat8E5M2 : CacheType::kFloat8E4M3;
};

// The finite one nearest to x, the even one of two.
template <typename T>
double nearest(double x) {
  const double largest = SmallFloat<T>::value(SmallFloat<T>::kEnd - 1);
  x = std::clamp(x, -largest, largest);
  int best = 0;
  for (int code = 1; code < SmallFloat<T>::kEnd; ++code) {
    const auto distance = [&](int c) { return std::abs(SmallFloat<T>::value(c) - std::abs(x)); };
    if (distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0)) best = code;
  }
  return std::copysign(SmallFloat<T>::value(best), x);
}

// How far a cached number may be from x, whose head's largest magnitude is `largest`.
double cached_error(CacheType type, double x, double largest) {
  switch (type) {
    case CacheType::kFloat32: return 1e-6 * largest;
    case CacheType::kBFloat16: return std::abs(x) * 0x1.01p-8 + 1e-6 * largest;
    case CacheType::kFloat16: return std::abs(x) * 0x1.01p-11 + 0x1p-25 + 1e-6 * largest;
    case CacheType::kFloat8E5M2: return std::abs(x) * 0x1.01p-3 + 0x1p-17 + 1e-6 * largest;
    case CacheType::kInt8: return largest * (0.5 / 127 + 1e-5);
    case CacheType::kFloat8E4M3: return std::abs(x) * 0x1.01p-4 + 0x1p-10 + 1e-6 * largest;
    // Half of a step; of one that is as large as the group's largest, with the other sign, a whole step is missing.
    case CacheType::kInt4: return largest * (1.0 / 8 + 1e-3);
  }
  return 0;
}

double largest_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

}  // namespace

TEST_CASE("queries, keys and values are normalized, rotated and cached, for every level and type") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      for (const Heads heads : {Heads{3, 1, 64}, Heads{2, 2, 40}, Heads{8, 1, 80}, Heads{4, 2, 40, 24}, Heads{8, 1, 80, 56, 24}}) {
        if (!caches(type, heads)) continue;
        for (const int pairs : {0, heads.head_dim / 2, 11}) {
          for (const bool norm : {false, true}) {
            CAPTURE(std::string(kernels->name));
            CAPTURE(std::string(name_of(type)));
            CAPTURE(heads.head_dim);
            CAPTURE(pairs);
            CAPTURE(norm);
            Preparation preparation{{}, {}, random.normals(pairs), random.normals(pairs)};
            if (norm) preparation.q_norm = random.normals(heads.head_dim);
            if (norm) preparation.k_norm = random.normals(heads.head_dim);
            preparation.interleaved = pairs == 11;
            if (heads.num_kv_heads == 2) preparation.kind = NormKind::kLayer;
            const int dim = heads.head_dim;
            const size_t width = CachedSequence::width(heads);
            const CachedSequence sequence(*kernels, type, heads, random.normals(19 * width), preparation);
            for (int t = 0; t < sequence.tokens; ++t) {
              const float* row = sequence.qkv.data() + t * width;
              for (int h = 0; h < heads.num_heads; ++h) {
                const auto expected = prepared(row + h * dim, dim, preparation.q_norm, preparation);
                const double rounding = sequence.unit() == 2 ? 0x1.01p-8 : 0;
                for (int d = 0; d < dim; ++d) {
                  const double limit = std::abs(expected[d]) * rounding + 1e-6 * largest_magnitude(expected);
                  CHECK(std::abs(sequence.q(t, h, d) - expected[d]) <= limit);
                }
              }
              for (int h = 0; h < heads.num_kv_heads; ++h) {
                const auto k = prepared(row + (heads.num_heads + h) * dim, dim, preparation.k_norm, preparation);
                const float* v_row = row + (heads.num_heads + heads.num_kv_heads) * dim + h * heads.values();
                const std::vector<double> v(v_row, v_row + heads.values());
                for (int d = 0; d < dim; ++d) {
                  CHECK(std::abs(sequence.k(t, h, d) - k[d]) <= cached_error(type, k[d], largest_magnitude(k)));
                }
                for (int d = 0; d < heads.values(); ++d) {
                  if (heads.values_in_keys()) {
                    CHECK(sequence.v(t, h, d) == sequence.k(t, h, heads.value_start + d));
                  } else {
                    CHECK(std::abs(sequence.v(t, h, d) - v[d]) <= cached_error(type, v[d], largest_magnitude(v)));
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("floats of 8 bits are rounded to the nearest, ties to even, and saturate", Small, e5m2, e4m3) {
  using S = SmallFloat<Small>;
  const float largest = S::value(S::kEnd - 1), least = S::value(1);
  std::vector<float> values;
  for (int code = 0; code < S::kEnd - 1; ++code) {
    const float low = S::value(code), high = S::value(code + 1), middle = (low + high) / 2;
    for (const float x : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)}) values.push_back(x);
  }
  for (const float by : {1.0f, 1.0001f, 1.05f, 1.2f, 1e3f, 1e30f}) values.push_back(largest * by);
  for (const float by : {0.75f, 0.5f, 0.25f, 1e-30f, 0.0f}) values.push_back(least * by);
  values.push_back(std::numeric_limits<float>::infinity());
  for (size_t i = values.size(); i-- > 0;) values.push_back(-values[i]);
  values.resize((values.size() + 15) / 16 * 16);
  const Heads heads{1, 1, 16};
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(std::string(kernels->name));
    for (size_t start = 0; start < values.size(); start += 16) {
      std::vector<float> qkv(3 * 16);
      std::copy_n(values.begin() + start, 16, qkv.begin() + 16);  // K
      std::copy_n(values.begin() + start, 16, qkv.begin() + 32);  // V
      const CachedSequence sequence(*kernels, S::kCache, heads, qkv);
      for (int d = 0; d < 16; ++d) {
        CAPTURE(values[start + d]);
        CHECK(sequence.k(0, 0, d) == nearest<Small>(values[start + d]));
        CHECK(sequence.v(0, 0, d) == nearest<Small>(values[start + d]));
      }
    }
    for (const float sign : {1.0f, -1.0f}) {
      const CachedSequence nan(*kernels, S::kCache, heads,
                               std::vector<float>(48, std::copysign(std::numeric_limits<float>::quiet_NaN(), sign)));
      CHECK(std::isnan(nan.k(0, 0, 3)));
      CHECK(std::isnan(nan.v(0, 0, 3)));
    }
  }
}

TEST_CASE("what is cached as fp8_e4m3 is divided by the layer's scales, once") {
  Random random;
  const Heads heads{1, 1, 48};
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(std::string(kernels->name));
    for (const float scale : {0.017f, 1.0f, 3.7f}) {
      const std::vector<float> qkv = random.normals(3 * 48, 10.0f);
      Preparation preparation;
      preparation.k_scale = scale, preparation.v_scale = 5 * scale;
      const CachedSequence sequence(*kernels, CacheType::kFloat8E4M3, heads, qkv, preparation);
      for (int d = 0; d < 48; ++d) {
        CHECK(sequence.q(0, 0, d) == doctest::Approx(qkv[d]).epsilon(0x1p-8));
        CHECK(sequence.k(0, 0, d) == nearest<e4m3>(qkv[48 + d] / scale) * double{scale});
        CHECK(sequence.v(0, 0, d) == nearest<e4m3>(qkv[96 + d] / (5 * scale)) * double{5 * scale});
      }
    }
  }
}

TEST_CASE("int8 takes its whole range for every token and head, and zeros stay zeros") {
  const Heads heads{1, 1, 32};
  for (const Kernels* kernels : tested_kernels()) {
    for (const float size : {1e-30f, 1.0f, 1e30f}) {
      std::vector<float> qkv(2 * 96, 0.0f);  // the first token's are all 0
      for (int i = 0; i < 96; ++i) qkv[96 + i] = size * static_cast<float>(i % 32 - 31);
      const CachedSequence sequence(*kernels, CacheType::kInt8, heads, qkv);
      CHECK(sequence.k(0, 0, 5) == 0.0);
      CHECK(sequence.scale(0, 0, 0) == 0.0);
      CHECK(sequence.k(1, 0, 0) == doctest::Approx(-31.0 * size));
      CHECK(sequence.scale(1, 0, 1) == doctest::Approx(31.0 / 127 * size));
    }
  }
}

TEST_CASE("int8 keeps what is not finite from becoming a number") {
  const Heads heads{1, 1, 40};
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(std::string(kernels->name));
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const int at : {0, 17, 39}) {
        std::vector<float> qkv(2 * 120, 1.0f);
        qkv[40 + at] = bad;         // the first token's K
        qkv[120 + 80 + at] = -bad;  // the second token's V
        const CachedSequence sequence(*kernels, CacheType::kInt8, heads, qkv);
        CHECK(std::isnan(sequence.k(0, 0, 1)));
        CHECK(std::isnan(sequence.v(1, 0, 1)));
        CHECK(sequence.v(0, 0, 1) == doctest::Approx(1.0));
        CHECK(sequence.k(1, 0, 1) == doctest::Approx(1.0));
      }
    }
  }
}

TEST_CASE("int4 has a scale for every 32 elements, and its largest element is exact but for the scale") {
  const Heads heads{1, 1, 80};
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(std::string(kernels->name));
    for (const float size : {1e-3f, 1.0f, 1e3f}) {
      std::vector<float> qkv(2 * 240, 0.0f);  // the first token's are all 0
      for (int i = 0; i < 240; ++i) {
        const int group = i % 80 / 32, within = i % 80 % 32;
        qkv[240 + i] = size * static_cast<float>(std::pow(10, group)) * static_cast<float>(within % 16 - 8) / 8.0f;
      }
      const CachedSequence sequence(*kernels, CacheType::kInt4, heads, qkv);
      for (int d = 0; d < 80; ++d) {
        CAPTURE(d);
        CHECK(sequence.k(0, 0, d) == 0.0);
        CHECK(sequence.v(0, 0, d) == 0.0);
        CHECK(sequence.k(1, 0, d) == doctest::Approx(qkv[240 + 80 + d]).epsilon(0x1p-10));
        CHECK(sequence.v(1, 0, d) == doctest::Approx(qkv[240 + 160 + d]).epsilon(0x1p-10));
      }
    }
  }
}

TEST_CASE("int4 keeps what is not finite from becoming a number, in its group") {
  const Heads heads{1, 1, 80};
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(std::string(kernels->name));
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f}) {
      for (const int at : {32, 47, 63}) {
        std::vector<float> qkv(240, 1.0f);
        qkv[80 + at] = bad;
        qkv[160 + at] = -bad;
        const CachedSequence sequence(*kernels, CacheType::kInt4, heads, qkv);
        for (const int d : {31, 64, 79}) {
          CHECK(sequence.k(0, 0, d) == doctest::Approx(1.0));
          CHECK(sequence.v(0, 0, d) == doctest::Approx(1.0));
        }
        CHECK(!std::isfinite(sequence.k(0, 0, at)));
        CHECK(!std::isfinite(sequence.v(0, 0, at)));
      }
    }
  }
}
