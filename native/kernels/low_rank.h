// What an adapter adds to a panel of one row's products. It depends only on the row and the column.
#pragma once

#include "kernels/kernels.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

template <typename T>
TW_INLINE void add_stripe(const LowRankStripe& stripe, const float* h, float* y) {
  constexpr int kVectors = kStripe / kLanes;
  // Even and odd values have sums of their own: one chain of additions would be waited for.
  F sums[2][kVectors];
  for (int v = 0; v < kVectors; ++v) sums[0][v] = sums[1][v] = zero();
  const T* b = static_cast<const T*>(stripe.b);
  h += stripe.first;
  int i = 0;
  for (; i + 2 <= stripe.count; i += 2, b += 2 * kStripe) {
    for (int v = 0; v < kVectors; ++v) {
      sums[0][v] = fma(load(b + v * kLanes), set1(h[i]), sums[0][v]);
      sums[1][v] = fma(load(b + kStripe + v * kLanes), set1(h[i + 1]), sums[1][v]);
    }
  }
  if (i < stripe.count) {
    for (int v = 0; v < kVectors; ++v) sums[0][v] = fma(load(b + v * kLanes), set1(h[i]), sums[0][v]);
  }
  for (int v = 0; v < kVectors; ++v) {
    float* const at = y + v * kLanes;
    store(at, add(load(at), add(sums[0][v], sums[1][v])));
  }
}

// `y` are the products of the row with the panel.
TW_INLINE void add_low_rank(const LowRankRow& row, int panel, float* y) {
  if (!row.stripes) return;
  constexpr int kStripes = kPanel / kStripe;
  for (int s = 0; s < kStripes; ++s) {
    const LowRankStripe& stripe = row.stripes[panel * kStripes + s];
    switch (row.type) {
      case DType::kFloat32: add_stripe<float>(stripe, row.h, y + s * kStripe); break;
      case DType::kBFloat16: add_stripe<bf16>(stripe, row.h, y + s * kStripe); break;
      case DType::kFloat16: add_stripe<f16>(stripe, row.h, y + s * kStripe); break;
    }
  }
}

}  // namespace tidewheel::TW_ISA
