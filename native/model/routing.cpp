#include "model/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tidewheel {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void score(const RouterPlan& plan, int experts, float* logits) {
  if (plan.sigmoid) {
    for (int e = 0; e < experts; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float largest = *std::max_element(logits, logits + experts);
  float sum = 0;
  for (int e = 0; e < experts; ++e) sum += logits[e] = std::exp(logits[e] - largest);
  for (int e = 0; e < experts; ++e) logits[e] /= sum;
}

// Writes the indices of the `count` largest values to `best` [count], in any order. Of equal values, the first ones are
// taken.
void take_largest(const float* values, int size, int count, int32_t* best) {
  for (int i = 0; i < size; ++i) {
    int place = std::min(i, count);
    if (place == count && !(values[i] > values[best[count - 1]])) continue;
    if (place == count) --place;
    for (; place > 0 && values[i] > values[best[place - 1]]; --place) best[place] = best[place - 1];
    best[place] = i;
  }
}

// Makes it impossible to choose experts outside of the best groups.
void keep_groups(const RouterPlan& plan, int experts, float* choice, float* groups) {
  const int size = experts / plan.num_groups;
  for (int g = 0; g < plan.num_groups; ++g) {
    float first = kNever, second = kNever;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, choice[e]));
      first = std::max(first, choice[e]);
    }
    groups[g] = plan.best_two ? first + second : first;
  }
  for (int g = 0; g < plan.num_groups; ++g) {
    int better = 0;
    for (int other = 0; other < plan.num_groups; ++other) {
      better += groups[other] > groups[g] || (groups[other] == groups[g] && other < g);
    }
    if (better >= plan.kept_groups) std::fill_n(choice + g * size, size, kNever);
  }
}

// Chooses experts one after the other. Each one's weight is its share of a softmax over the remaining experts whose
// logits are near its own.
void mix(const RouterPlan& plan, int experts, int per_token, const float* logits, const float* scales, int32_t* chosen,
         float* weights) {
  for (int i = 0; i < per_token; ++i) {
    const auto taken = [&](int32_t e) { return std::find(chosen, chosen + i, e) != chosen + i; };
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (!taken(e) && (best < 0 || logits[e] > logits[best])) best = e;
    }
    float sum = 0;
    for (int32_t e = 0; e < experts; ++e) {
      const float distance = (logits[best] - logits[e]) / std::max(std::fabs(logits[e]), logits[best]);
      if (!taken(e) && !(distance > 2 * plan.jitter)) sum += std::exp(logits[e] - logits[best]);
    }
    int place = i;  // in ascending order
    for (; place > 0 && chosen[place - 1] > best; --place) {
      chosen[place] = chosen[place - 1];
      weights[place] = weights[place - 1];
    }
    chosen[place] = best;
    weights[place] = 1.0f / sum * plan.scale * (scales ? scales[best] : 1.0f);
  }
}

}  // namespace

void route(const RouterPlan& plan, int experts, int per_token, float* logits, const float* correction, const float* scales,
           float* choice, int32_t* chosen, float* weights) {
  if (plan.sparse_mixer) {
    mix(plan, experts, per_token, logits, scales, chosen, weights);
    return;
  }
  score(plan, experts, logits);
  for (int e = 0; e < experts; ++e) choice[e] = correction ? logits[e] + correction[e] : logits[e];
  if (plan.num_groups > 1) keep_groups(plan, experts, choice, choice + experts);
  take_largest(choice, experts, per_token, chosen);
  std::sort(chosen, chosen + per_token);
  float sum = 0;
  for (int i = 0; i < per_token; ++i) sum += weights[i] = logits[chosen[i]];
  const float divisor = plan.normalize ? std::max(sum, std::numeric_limits<float>::min()) : 1.0f;
  for (int i = 0; i < per_token; ++i) weights[i] = weights[i] / divisor * plan.scale * (scales ? scales[chosen[i]] : 1.0f);
}

void RowsByExpert::sort(int tokens, const int32_t* chosen, const float* weights, int32_t* token_of, float* weight_of) {
  const int rows = tokens * per_token_;
  std::fill(starts_.begin(), starts_.end(), 0);
  for (int row = 0; row < rows; ++row) ++starts_[chosen[row] + 1];
  used_.clear();
  for (size_t e = 0; e + 1 < starts_.size(); ++e) {
    if (starts_[e + 1] > 0) used_.push_back(static_cast<int32_t>(e));
    starts_[e + 1] += starts_[e];
  }
  // Each start has moved to the end of its rows, where the next expert's rows begin.
  for (int row = 0; row < rows; ++row) {
    const int place = starts_[chosen[row]]++;
    token_of[place] = row / per_token_;
    weight_of[place] = weights[row];
  }
  std::copy_backward(starts_.begin(), starts_.end() - 1, starts_.end());
  starts_[0] = 0;
}

}  // namespace tidewheel
