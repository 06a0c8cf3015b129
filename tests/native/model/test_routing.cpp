#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "model/routing.h"

using namespace tidewheel;

namespace {

struct Routed {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

Routed routed(const RouterPlan& plan, int per_token, std::vector<float> logits, const std::vector<float>& correction = {},
              const std::vector<float>& scales = {}) {
  const int experts = static_cast<int>(logits.size());
  std::vector<float> choice(experts + plan.num_groups);
  Routed found{std::vector<int32_t>(per_token), std::vector<float>(per_token)};
  route(plan, experts, per_token, logits.data(), correction.empty() ? nullptr : correction.data(),
        scales.empty() ? nullptr : scales.data(), choice.data(), found.experts.data(), found.weights.data());
  return found;
}

// The same by sorting, in double.
Routed plain(const RouterPlan& plan, int per_token, const std::vector<float>& logits, const std::vector<float>& correction,
             const std::vector<float>& scales) {
  const int experts = static_cast<int>(logits.size()), size = experts / plan.num_groups;
  std::vector<double> scores(experts), choice(experts);
  double total = 0;
  for (const float logit : logits) total += std::exp(double(logit));
  for (int e = 0; e < experts; ++e) {
    scores[e] = plan.sigmoid ? 1 / (1 + std::exp(-double(logits[e]))) : std::exp(double(logits[e])) / total;
    choice[e] = scores[e] + (correction.empty() ? 0.0 : correction[e]);
  }
  std::vector<int> groups(plan.num_groups);
  std::iota(groups.begin(), groups.end(), 0);
  const auto goodness = [&](int group) {
    std::vector<double> members(choice.begin() + group * size, choice.begin() + (group + 1) * size);
    std::sort(members.rbegin(), members.rend());
    return plan.best_two ? members[0] + members[1] : members[0];
  };
  std::stable_sort(groups.begin(), groups.end(), [&](int a, int b) { return goodness(a) > goodness(b); });
  std::vector<int32_t> order;
  for (int g = 0; g < plan.kept_groups; ++g) {
    for (int e = 0; e < size; ++e) order.push_back(groups[g] * size + e);
  }
  std::sort(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return choice[a] > choice[b]; });
  order.resize(per_token);
  std::sort(order.begin(), order.end());
  double sum = 0;
  for (const int32_t e : order) sum += scores[e];
  Routed expected{order, {}};
  for (const int32_t e : order) {
    const double weight = scores[e] / (plan.normalize ? sum : 1) * plan.scale * (scales.empty() ? 1.0 : scales[e]);
    expected.weights.push_back(static_cast<float>(weight));
  }
  return expected;
}

}  // namespace

TEST_CASE("a token gets the experts and weights that sorting gives") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int count) {
    std::vector<float> made(count);
    for (float& number : made) number = normal(random);
    return made;
  };
  for (const bool sigmoid : {false, true}) {
    for (const bool normalize : {false, true}) {
      for (const auto& [groups, kept] : {std::pair{1, 1}, {4, 2}, {4, 4}, {8, 3}}) {
        for (const bool best_two : {false, true}) {
          for (const bool corrected : {false, true}) {
            const RouterPlan plan{sigmoid, normalize, false, corrected, groups, kept, best_two, 2.5f, corrected};
            for (const int per_token : {1, 3, 6}) {
              const auto logits = numbers(32);
              const auto correction = corrected ? numbers(32) : std::vector<float>{};
              const auto scales = corrected ? numbers(32) : std::vector<float>{};
              const Routed found = routed(plan, per_token, logits, correction, scales);
              const Routed expected = plain(plan, per_token, logits, correction, scales);
              CHECK(found.experts == expected.experts);
              for (int i = 0; i < per_token; ++i) CHECK(found.weights[i] == doctest::Approx(expected.weights[i]).epsilon(1e-5));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("of equal experts those with lower numbers are chosen, and of equal groups too") {
  CHECK(routed({}, 2, {1, 3, 3, 3}).experts == std::vector<int32_t>{1, 2});
  CHECK(routed({}, 3, std::vector<float>(8, 0.5f)).experts == std::vector<int32_t>{0, 1, 2});
  RouterPlan grouped;
  grouped.num_groups = 4, grouped.kept_groups = 2;
  CHECK(routed(grouped, 3, {1, 2, 2, 1, 2, 0, 0, 2}).experts == std::vector<int32_t>{0, 1, 2});
}

TEST_CASE("a sparse mixer takes experts one after the other, each with its share among those that are near") {
  RouterPlan plan;
  plan.sparse_mixer = true, plan.jitter = 0.1f, plan.scale = 2;
  // 3.8 is near 4, and 3.1 is not, but it is near 3.8.
  const Routed found = routed(plan, 2, {3.8f, -4, 3.1f, 4});
  CHECK(found.experts == std::vector<int32_t>{0, 3});
  CHECK(found.weights[0] == doctest::Approx(2 / (1 + std::exp(-0.7))));
  CHECK(found.weights[1] == doctest::Approx(2 / (1 + std::exp(-0.2))));
  CHECK(routed(plan, 3, std::vector<float>(8, 0.0f)).experts == std::vector<int32_t>{0, 1, 2});
}

TEST_CASE("whatever the logits are, experts are chosen") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  for (const int scores : {0, 1, 2}) {
    for (const auto& logits : {std::vector<float>{nan, nan, nan, nan}, {infinite, 1, -infinite, nan}, {-infinite, -infinite, 0, 0}}) {
      RouterPlan plan;
      plan.sigmoid = scores == 1, plan.sparse_mixer = scores == 2;
      const Routed found = routed(plan, 3, logits);
      CHECK(std::is_sorted(found.experts.begin(), found.experts.end()));
      CHECK(std::adjacent_find(found.experts.begin(), found.experts.end()) == found.experts.end());
      for (const int32_t expert : found.experts) CHECK((expert >= 0 && expert < 4));
    }
  }
  RouterPlan plan;
  plan.sigmoid = true;
  // No expert counts anything, so that there is no sum to divide by.
  for (const float weight : routed(plan, 2, {-200, -200, -200}).weights) CHECK(weight == 0);
}

TEST_CASE("rows are sorted by expert, in the order of their tokens") {
  const std::vector<int32_t> chosen = {1, 4, 0, 4, 1, 2, 0, 1};  // two experts of each of four tokens
  std::vector<float> weights(chosen.size());
  std::iota(weights.begin(), weights.end(), 1.0f);
  RowsByExpert rows(6, 2);
  for (const int tokens : {4, 1, 4}) {
    std::vector<int32_t> token_of(2 * tokens);
    std::vector<float> weight_of(2 * tokens);
    rows.sort(tokens, chosen.data(), weights.data(), token_of.data(), weight_of.data());
    std::vector<int32_t> used;
    int seen = 0;
    for (int expert = 0; expert < 6; ++expert) {
      CHECK(rows.begin(expert) == seen);
      int row = seen;
      for (int i = 0; i < 2 * tokens; ++i) {
        if (chosen[i] != expert) continue;
        CHECK(token_of[row] == i / 2);
        CHECK(weight_of[row++] == weights[i]);
      }
      CHECK(rows.count(expert) == row - seen);
      if (row > seen) used.push_back(expert);
      seen = row;
    }
    CHECK(seen == 2 * tokens);
    CHECK(rows.used() == used);
  }
}
