// What positions add to attention's scores by what tokens contain: see PositionScores.
#pragma once

#include <algorithm>

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

// Of a query, the scores of a vector of keys from `key` on, `distance` behind it. The products lie in other rows for each
// key, so they are read one by one.
TW_INLINE F position_scores(const PositionScores& scores, int query, int key, int distance) {
  const int span = scores.span;
  const int32_t* const rows =
      scores.rows + std::clamp(distance, -span - kBiasPadding, span) + span + kBiasPadding;
  float sums[kLanes] = {};
  if (scores.of_queries) {
    const float* const products = scores.of_queries + query * scores.stride;
    for (int i = 0; i < kLanes; ++i) sums[i] = products[rows[i]];
  }
  if (scores.of_keys) {
    const float* const products = scores.of_keys + key * scores.stride;
    for (int i = 0; i < kLanes; ++i) sums[i] += products[i * scores.stride + rows[i]];
  }
  return load(sums);
}

}  // namespace tidewheel::TW_ISA
