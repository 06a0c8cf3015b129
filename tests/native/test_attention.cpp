#include <doctest/doctest.h>

#include <limits>
#include <numeric>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// A sequence whose K and V went into a paged cache through `prepare`, and the queries that came out of it.
struct Paged {
  const Kernels& kernels;
  const DType type;
  const Heads heads;
  const int tokens;
  const std::vector<float> qkv;
  std::vector<int32_t> table;
  std::vector<char> cache, queries;

  size_t width() const { return size_t(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim; }
  size_t query_stride() const { return size_t(heads.num_heads) * heads.padded_dim(); }
  int unit() const { return kernels.activation_bytes[static_cast<int>(type)]; }

  Paged(const Kernels& k, DType t, Heads h, int count, Random& random)
      : kernels(k), type(t), heads(h), tokens(count),
        qkv(random.normals(count * size_t(h.num_heads + 2 * h.num_kv_heads) * h.head_dim)),
        table((count + kBlockTokens - 1) / kBlockTokens),
        cache((table.size() + 1) * heads.block_elements() * dtype_bytes(type)),
        queries(count * query_stride() * unit()) {
    std::iota(table.rbegin(), table.rend(), 1);  // scattered: backwards, and block 0 is someone else's
    poison();
    for (int token = 0; token < tokens; ++token) {
      std::vector<float> row(qkv.begin() + token * width(), qkv.begin() + (token + 1) * width());
      kernels.prepare(type, {heads, row.data(), nullptr, nullptr, 0, nullptr, nullptr, 0,
                             queries.data() + token * query_stride() * unit(),
                             cache.data() + table[token / kBlockTokens] * heads.block_elements() * dtype_bytes(type),
                             token % kBlockTokens});
    }
  }

  // What was in the blocks before must not matter, not even NaN.
  void poison() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (size_t i = 0; i < cache.size() / dtype_bytes(type); ++i) {
      if (type == DType::kFloat32) reinterpret_cast<float*>(cache.data())[i] = nan;
      if (type == DType::kBFloat16) reinterpret_cast<bf16*>(cache.data())[i] = to_bf16(nan);
      if (type == DType::kFloat16) reinterpret_cast<f16*>(cache.data())[i] = to_f16(nan);
    }
    if (heads.padded_dim() == heads.head_dim) return;
    std::fill(cache.begin(), cache.end(), 0);  // padding dimensions are zero from the start and stay so
  }

  std::vector<float> attend(int first, int count, int window) const {
    const size_t stride = size_t(heads.num_heads) * heads.head_dim;
    std::vector<char> out(count * stride * unit()), scratch(kernels.attention_scratch_bytes(heads) + 64);
    for (int kv = 0; kv < heads.num_kv_heads; ++kv) {
      kernels.attention(type, {heads, kv, queries.data() + first * query_stride() * unit(), query_stride(), count, first,
                               window, 0.3f, cache.data(), table.data(), scratch.data(), type, out.data(), stride});
    }
    std::vector<float> values(count * stride);
    for (size_t i = 0; i < values.size(); ++i) values[i] = read_activation(kernels, type, out.data(), i);
    return values;
  }

  double expected(int token, int head, int d, int window) const {
    const int kv = head / heads.group(), dim = heads.head_dim;
    const auto at = [&](int t, int offset) { return double(rounded(type, qkv[t * width() + offset])); };
    const int begin = window ? std::max(0, token + 1 - window) : 0;
    double total = 0, sum = 0;
    for (int t = begin; t <= token; ++t) {
      double score = 0;
      for (int i = 0; i < dim; ++i) score += at(token, head * dim + i) * at(t, (heads.num_heads + kv) * dim + i);
      const double weight = std::exp(0.3 * score);
      total += weight;
      sum += weight * at(t, (heads.num_heads + heads.num_kv_heads + kv) * dim + d);
    }
    return sum / total;
  }
};

}  // namespace

TEST_CASE("attention agrees with its definition, for every level, type, grouping and window") {
  Random random;
  for (const Kernels* kernels : available_kernels()) {
    for (const DType type : kTypes) {
      for (const Heads heads : {Heads{4, 2, 16}, Heads{3, 1, 64}, Heads{2, 2, 24}}) {
        for (const int window : {0, 20}) {
          CAPTURE(kernels->name);
          CAPTURE(name_of(type));
          CAPTURE(heads.head_dim);
          CAPTURE(window);
          const Paged paged(*kernels, type, heads, 151, random);
          for (const int first : {0, 13, 140}) {
            const int count = first == 140 ? 11 : 12;
            const auto values = paged.attend(first, count, window);
            for (int t = 0; t < count; ++t) {
              for (int h = 0; h < heads.num_heads; ++h) {
                for (int d = 0; d < heads.head_dim; d += 5) {
                  const float got = values[(t * heads.num_heads + h) * heads.head_dim + d];
                  const double limit = type == DType::kFloat32 ? 1e-5 : 2e-2;
                  CHECK(std::abs(got - paged.expected(first + t, h, d, window)) < limit);
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a token's attention is the same to the bit alone and in any run of tokens") {
  Random random;
  for (const Kernels* kernels : available_kernels()) {
    for (const DType type : kTypes) {
      const Heads heads{6, 2, 32};
      const Paged paged(*kernels, type, heads, 300, random);
      const auto together = paged.attend(120, 16, 0);
      const size_t stride = size_t(heads.num_heads) * heads.head_dim;
      for (int t = 0; t < 16; ++t) {
        const auto alone = paged.attend(120 + t, 1, 0);
        CHECK(std::memcmp(alone.data(), together.data() + t * stride, stride * sizeof(float)) == 0);
      }
    }
  }
}
