#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "cached.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr float kScale = 0.3f;

// What positions add to scores, the same for all heads.
struct Positions {
  int num_rows, span;
  std::vector<int32_t> rows;
  std::vector<float> of_queries, of_keys;  // [tokens, num_rows]

  Positions(int tokens, Random& random, int count, int reach, bool with_keys)
      : num_rows(count), span(reach), of_queries(random.normals(tokens * num_rows)),
        of_keys(with_keys ? random.normals((tokens + kBlockTokens) * num_rows) : std::vector<float>()) {
    for (int i = 0; i < distance_biases(span); ++i) rows.push_back(std::clamp(i - kBiasPadding, 0, 2 * span) * 7 % num_rows);
  }
  double score(int query, int key) const {
    const int row = rows[std::clamp(key - query, -span, span) + span + kBiasPadding];
    return double{of_queries[query * num_rows + row]} + (of_keys.empty() ? 0 : double{of_keys[key * num_rows + row]});
  }
  PositionScores scores(int first) const {
    return {rows.data(), span, of_queries.data() + first * num_rows, of_keys.empty() ? nullptr : of_keys.data(), size_t(num_rows)};
  }
};

struct Scoring {
  int window = 0;
  float softcap = 0;
  std::vector<float> slopes = {}, sinks = {};
  std::vector<int32_t> until = {};  // the end of what each token of the sequence sees; empty: its own is the last one
  const Positions* positions = nullptr;
};

// In spans of tokens every token sees the others, as in an image.
std::vector<int32_t> two_way_in(int tokens, const std::vector<std::pair<int, int>>& spans) {
  std::vector<int32_t> until(tokens);
  std::iota(until.begin(), until.end(), 1);
  for (const auto& [begin, end] : spans) std::fill(until.begin() + begin, until.begin() + end, end);
  return until;
}

class Attention {
 public:
  Attention(const CachedSequence& sequence, const Scoring& scoring)
      : sequence_(sequence), scoring_(scoring), scratch_(sequence.kernels.attention_scratch_bytes(sequence.heads)) {}

  size_t stride() const { return size_t(sequence_.heads.num_heads) * sequence_.heads.values(); }

  // Of `count` tokens from `first` on: [count, heads * values].
  std::vector<float> at_once(int first, int count) {
    return compute(first, count, [&](const AttentionArgs& args) { sequence_.kernels.attention(sequence_.type).whole(args); });
  }

  // The same, the KV splits computed apart, the last one first.
  std::vector<float> in_splits(int first, int count) {
    return compute(first, count, [&](const AttentionArgs& args) {
      const size_t size = args.heads.partial_floats(count);
      std::vector<float> partials(size * (args.split_end() - args.split_begin()));
      for (int split = args.split_end(); split-- > args.split_begin();) {
        sequence_.kernels.attention(sequence_.type).split(args, split,
                                          partials.data() + (split - args.split_begin()) * size);
      }
      sequence_.kernels.attention_reduce(args, partials.data());
    });
  }

  // What is cached, as [tokens, KV heads, head_dim] and [.., values].
  struct Contents {
    std::vector<double> k, v;

    explicit Contents(const CachedSequence& sequence) {
      for (int t = 0; t < sequence.tokens; ++t) {
        for (int h = 0; h < sequence.heads.num_kv_heads; ++h) {
          for (int d = 0; d < sequence.heads.head_dim; ++d) k.push_back(sequence.k(t, h, d));
          for (int d = 0; d < sequence.heads.values(); ++d) v.push_back(sequence.v(t, h, d));
        }
      }
    }
  };

  // Whether int8 is multiplied as integers: queries are rounded to steps of a 127th of their row's largest, weights to
  // steps of a 255th.
  bool in_integers() const { return sequence_.type == CacheType::kInt8 && sequence_.kernels.int8_step == 4; }

  // The definition in double, and the same sum over magnitudes. `doubts` is how far the values may move because of
  // weights that lie in the middle between two integers, as far as float can tell.
  struct Expected {
    std::vector<double> values, magnitudes, doubts;  // [values]
  };
  Expected expected(const Contents& contents, int token, int head) const {
    const int kv_heads = sequence_.heads.num_kv_heads, kv_head = head / sequence_.heads.group();
    const int dim = sequence_.heads.head_dim, size = sequence_.heads.values();
    Expected result{std::vector<double>(size), std::vector<double>(size), std::vector<double>(size)};
    std::vector<double> q(dim);
    for (int d = 0; d < dim; ++d) q[d] = sequence_.q(token, head, d);
    if (in_integers()) round_to_bytes(q);
    double total = scoring_.sinks.empty() ? 0 : std::exp(double{scoring_.sinks[head]});
    const int first = scoring_.window ? std::max(0, token + 1 - scoring_.window) : 0;
    const int end = scoring_.until.empty() ? token + 1 : scoring_.until[token];
    std::vector<double> weights;
    for (int t = first; t < end; ++t) {
      const size_t place = size_t(t) * kv_heads + kv_head;
      double score = 0;
      for (int d = 0; d < dim; ++d) score += q[d] * contents.k[place * dim + d];
      // They are added to products with K as it is cached.
      if (scoring_.positions) score += scoring_.positions->score(token, t) * double{scale(sequence_.k_scale)};
      score *= double{kScale};
      if (scoring_.softcap != 0) score = scoring_.softcap * std::tanh(score / scoring_.softcap);
      if (!scoring_.slopes.empty()) score -= scoring_.slopes[head] * std::abs(double(t - token));
      weights.push_back(std::exp(score));
      total += weights.back();
    }
    for (int t = first; t < end; ++t) {
      const size_t place = size_t(t) * kv_heads + kv_head;
      double weight = weights[t - first], doubt = 0;
      if (in_integers()) {
        const double scale = v_scale(t, kv_head), step = largest_in_tile(weights, first, t, kv_head) / 255;
        const double steps = weight * scale / step;
        if (std::abs(steps - std::floor(steps) - 0.5) < 0.005) doubt = step / scale;
        weight = std::nearbyint(steps) * step / scale;
      }
      for (int d = 0; d < size; ++d) {
        const double v = contents.v[place * size + d];
        result.values[d] += weight * v;
        result.magnitudes[d] += weight * std::abs(v);
        result.doubts[d] += doubt * std::abs(v);
      }
    }
    for (int d = 0; d < size; ++d) {
      result.values[d] /= total;
      result.magnitudes[d] /= total;
      result.doubts[d] /= total;
    }
    return result;
  }

 private:
  double v_scale(int token, int kv_head) const {
    return sequence_.scale(token, kv_head, sequence_.heads.values_in_keys() ? 0 : 1);
  }

  // Of `weights`, from token `first` on, times their tokens' scales: the largest in the tile of `token`.
  double largest_in_tile(const std::vector<double>& weights, int first, int token, int kv_head) const {
    const int tile = token / kAttentionTile * kAttentionTile, end = first + static_cast<int>(weights.size());
    double largest = 0;
    for (int t = std::max(first, tile); t < std::min(end, tile + kAttentionTile); ++t) {
      largest = std::max(largest, weights[t - first] * v_scale(t, kv_head));
    }
    return largest;
  }

  static void round_to_bytes(std::vector<double>& x) {
    float largest = 0;
    for (const double value : x) largest = std::max(largest, static_cast<float>(std::abs(value)));
    const float factor = 127 / largest, scale = largest / 127;
    for (double& value : x) value = std::nearbyint(static_cast<float>(value) * factor) * double{scale};
  }

  template <typename Compute>
  std::vector<float> compute(int first, int count, Compute&& body) {
    const Heads& heads = sequence_.heads;
    std::vector<float> out(count * stride());
    for (int kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head) {
      body(AttentionArgs{heads, kv_head, sequence_.queries.data() + first * sequence_.query_stride() * sequence_.unit(),
                         sequence_.query_stride(), count, first, scoring_.window, kScale * scale(sequence_.k_scale), scoring_.softcap,
                         scoring_.slopes.empty() ? nullptr : scoring_.slopes.data(),
                         scoring_.sinks.empty() ? nullptr : scoring_.sinks.data(),
                         sequence_.cache.data() + kv_head * heads.head_bytes(sequence_.type), heads.block_bytes(sequence_.type),
                         sequence_.table.data(), scratch_.data(), out.data(), stride(), {}, {}, nullptr, nullptr, 0,
                         scale(sequence_.v_scale), 0, scoring_.until.empty() ? nullptr : scoring_.until.data() + first, nullptr, 0,
                         scoring_.positions ? scoring_.positions->scores(first) : PositionScores{}});
    }
    return out;
  }

  float scale(float of_layer) const { return sequence_.type == CacheType::kFloat8E4M3 ? of_layer : 1.0f; }

  const CachedSequence& sequence_;
  const Scoring& scoring_;
  std::vector<char> scratch_;
};

CachedSequence random_sequence(const Kernels& kernels, CacheType type, Heads heads, int tokens, Random& random) {
  Preparation preparation;
  preparation.k_scale = 0.02f, preparation.v_scale = heads.values_in_keys() ? 0.02f : 0.3f;  // of e4m3
  return {kernels, type, heads, random.normals(tokens * CachedSequence::width(heads)), preparation};
}

std::vector<float> slopes(int heads) {
  std::vector<float> values(heads);
  for (int h = 0; h < heads; ++h) values[h] = std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(heads));
  return values;
}

}  // namespace

// Where a V is smaller than K: stored beside it, or a part of it that begins and ends inside of a vector.
constexpr Heads kSmallerValues[] = {{6, 2, 40, 24}, {8, 1, 80, 56, 24}, {4, 2, 36, 20, 10}};

TEST_CASE("attention agrees with its definition, for every level, type, grouping, window, cap, slope and sink") {
  Random random;
  int turn = 0, shape = 0;
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      for (const Heads heads : {Heads{6, 2, 16}, Heads{2, 2, 40}, Heads{8, 1, 80}, kSmallerValues[0], kSmallerValues[1],
                                kSmallerValues[2]}) {
        if (!caches(type, heads)) continue;
        // An emulated processor is given one or two for each type, another one each time.
        if (shape++ % kStride != 0) continue;
        const CachedSequence sequence = random_sequence(*kernels, type, heads, 1099, random);
        const Attention::Contents contents(sequence);
        // K, V and queries are taken as they are cached: what is left is the rounding of the weights, to bfloat16
        // where the level multiplies that, and float's own.
        const double tolerance = sequence.unit() == 2 ? 0x1.1p-8 : 2e-5;
        const std::vector<float> alibi = slopes(heads.num_heads), sinks = random.normals(heads.num_heads, 4.0f);
        // The spans cross the end of a tile, and of a KV split.
        const std::vector<int32_t> until = two_way_in(sequence.tokens, {{120, 140}, {505, 700}, {1094, 1099}});
        const Positions near(sequence.tokens, random, 5, 3, false), far(sequence.tokens, random, 33, 300, true);
        for (const Scoring& scoring : {Scoring{}, Scoring{20}, Scoring{600}, Scoring{0, 5.0f}, Scoring{0, 0, alibi},
                                       Scoring{300, 2.0f, alibi}, Scoring{0, 0, {}, sinks}, Scoring{20, 0, {}, sinks},
                                       Scoring{0, 0, {}, {}, until}, Scoring{20, 0, {}, sinks, until},
                                       Scoring{300, 2.0f, alibi, {}, until}, Scoring{0, 0, {}, {}, {}, &near},
                                       Scoring{0, 0, {}, {}, until, &far}, Scoring{0, 2.0f, {}, {}, until, &far}}) {
          CAPTURE(std::string(kernels->name));
          CAPTURE(std::string(name_of(type)));
          CAPTURE(heads.head_dim);
          CAPTURE(scoring.window);
          CAPTURE(scoring.softcap);
          CAPTURE(scoring.slopes.size());
          CAPTURE(scoring.sinks.size());
          CAPTURE(scoring.until.size());
          CAPTURE(scoring.positions);
          Attention attention(sequence, scoring);
          for (const int first : {0, 126, 509, 1093}) {
            if (turn++ % (kStride == 1 ? 1 : 3) != 0) continue;
            const int count = 6;
            const auto values = attention.at_once(first, count);
            for (const int t : {0, 3, 5}) {
              const int head = (t + first) % heads.num_heads;
              const auto expected = attention.expected(contents, first + t, head);
              for (int d = 0; d < heads.values(); ++d) {
                const float got = values[(t * heads.num_heads + head) * heads.values() + d];
                CHECK(std::abs(got - expected.values[d]) <= tolerance * expected.magnitudes[d] + expected.doubts[d]);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a token's attention is the same to the bit alone, in any run of tokens, and in KV splits") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      const Heads heads{6, 2, 40};
      const CachedSequence sequence = random_sequence(*kernels, type, heads, 1560, random);
      const Positions positions(1560, random, 33, 300, true);
      const std::vector<Scoring> scorings = {
          {}, {520}, {0, 3.0f, slopes(6)}, {0, 0, {}, random.normals(6, 4.0f)},
          {20, 0, {}, {}, two_way_in(1560, {{3, 9}, {1020, 1050}, {1550, 1560}})},
          {0, 0, {}, {}, two_way_in(1560, {{3, 9}, {1010, 1140}, {1550, 1560}})},
          {0, 0, {}, {}, two_way_in(1560, {{0, 1560}}), &positions}};
      for (size_t i = 0; i < scorings.size(); ++i) {
        // An emulated processor is given one for each type.
        if (kStride != 1 && i != static_cast<size_t>(type) % scorings.size()) continue;
        const Scoring& scoring = scorings[i];
        CAPTURE(std::string(kernels->name));
        CAPTURE(std::string(name_of(type)));
        CAPTURE(scoring.window);
        Attention attention(sequence, scoring);
        for (const int first : kStride == 1 ? std::vector{0, 1020, 1544} : std::vector{1020}) {
          const int count = 16;
          const auto together = attention.at_once(first, count);
          CHECK(attention.in_splits(first, count) == together);
          // 9 rows, which levels with larger tiles compute in two steps.
          const auto three = attention.at_once(first, 3);
          CHECK(std::equal(three.begin(), three.end(), together.begin()));
          for (int t = 0; t < count; t += kStride) {
            const std::vector<float> expected(together.begin() + t * attention.stride(),
                                              together.begin() + (t + 1) * attention.stride());
            CHECK(attention.at_once(first + t, 1) == expected);
            CHECK(attention.in_splits(first + t, 1) == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("tokens that see up to themselves get the bits of tokens without limits") {
  Random random;
  const Heads heads{6, 2, 40};
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      CAPTURE(std::string(kernels->name));
      CAPTURE(std::string(name_of(type)));
      const CachedSequence sequence = random_sequence(*kernels, type, heads, 528, random);
      for (const int window : {0, 20}) {
        if (kStride != 1 && (window == 0) != (static_cast<int>(type) % 2 == 0)) continue;
        const Scoring causal{window}, limited{window, 0, {}, {}, two_way_in(528, {})};
        const Scoring two_way{window, 0, {}, {}, two_way_in(528, {{504, 520}})};
        Attention a(sequence, causal), b(sequence, limited), c(sequence, two_way);
        for (const int first : {0, 504}) {
          const auto expected = a.at_once(first, 16);
          CHECK(b.at_once(first, 16) == expected);
          CHECK(b.in_splits(first, 16) == expected);
          CHECK((c.at_once(first, 16) == expected) == (first == 0));
        }
      }
    }
  }
}

TEST_CASE("V that is a part of K gives the same bits as the same V beside K") {
  Random random;
  const Heads inside{6, 2, 40, 24, 14}, beside{6, 2, 40, 24};
  int turn = 0;
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      if (type == CacheType::kInt8 || !caches(type, inside)) continue;  // int8's scales are of all of K there, and of V here
      CAPTURE(std::string(kernels->name));
      CAPTURE(std::string(name_of(type)));
      std::vector<float> qkv = random.normals(700 * CachedSequence::width(inside));
      for (size_t token = 0; token < 700; ++token) {
        float* kv = qkv.data() + token * CachedSequence::width(inside) + 6 * 40;
        for (int h = 0; h < 2; ++h) std::copy_n(kv + h * 40 + 14, 24, kv + 2 * 40 + h * 24);
      }
      const CachedSequence one(*kernels, type, inside, qkv), two(*kernels, type, beside, qkv);
      CHECK(one.cache.size() < two.cache.size());
      for (const Scoring& scoring : {Scoring{}, Scoring{200, 2.0f}}) {
        Attention a(one, scoring), b(two, scoring);
        for (const int first : {0, 684}) {
          if (turn++ % kStride != 0) continue;
          CHECK(a.at_once(first, 16) == b.at_once(first, 16));
          CHECK(a.in_splits(first, 16) == b.at_once(first, 16));
        }
      }
    }
  }
}

TEST_CASE("a value that is not a number spoils its element for those who see it, and no other head") {
  Random random;
  const Heads heads{6, 2, 40};
  for (const Kernels* kernels : tested_kernels()) {
    for (const CacheType type : kAllCacheTypes) {
      CAPTURE(std::string(kernels->name));
      CAPTURE(std::string(name_of(type)));
      std::vector<float> qkv = random.normals(16 * 10 * heads.head_dim);
      qkv[(5 * 10 + 8) * heads.head_dim + 3] = NAN;  // token 5's V of the first KV head
      const CachedSequence sequence(*kernels, type, heads, qkv);
      const Scoring scoring;
      Attention attention(sequence, scoring);
      // Whoever is computed beside the token is multiplied with it too, by 0; only types with scales in the cache make
      // that 0. They have no number for the others of the group either.
      const bool scaled = type == CacheType::kInt8 || type == CacheType::kInt4;
      const auto before = attention.at_once(0, scaled ? 16 : 5), after = attention.at_once(5, 11);
      CHECK(std::all_of(before.begin(), before.begin() + 5 * attention.stride(), [](float x) { return std::isfinite(x); }));
      for (size_t i = 0; i < after.size(); ++i) {
        const size_t head = i % attention.stride() / heads.head_dim, d = i % heads.head_dim;
        if (head < 3 && d == 3) CHECK(std::isnan(after[i]));
        if (head >= 3) CHECK(std::isfinite(after[i]));
      }
    }
  }
}
