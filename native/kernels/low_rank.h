// What adapters add to a tile of products. It depends only on a product's own row and column.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

// Vectors that a stripe's outputs are, and rows that share what is loaded of them: sums of all have to be in registers.
constexpr int kStripeVectors = kStripe / kLanes;
constexpr int kStripeRows = kStripeVectors == 1 ? 4 : 2;

// The products of some rows with a stripe.
template <typename T, int ROWS>
TW_INLINE void multiply_stripe(const T* w, int inputs, const typename Element<T>::Activation* const* x,
                               F (&products)[ROWS][kStripeVectors]) {
  using E = Element<T>;
  constexpr int kTogether = 2 * E::kStep;
  static_assert(kStripeInputs % kTogether == 0);
  // Even and odd steps have sums of their own: one chain of additions would be waited for.
  F sums[2][ROWS][kStripeVectors];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kStripeVectors; ++v) sums[0][r][v] = sums[1][r][v] = zero();
  }
  for (int i = 0; i < inputs; i += kTogether, w += kTogether * kStripe) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      typename E::Vector weights[kStripeVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kStripeVectors; ++v) weights[v] = E::load_step(w + (odd * kStripe + v * kLanes) * E::kStep);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kStripeVectors; ++v) sums[odd][r][v] = E::dot(sums[odd][r][v], weights[v], x[r] + i + odd * E::kStep);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kStripeVectors; ++v) products[r][v] = add(sums[0][r][v], sums[1][r][v]);
  }
}

// Calls `body` for so many rows, which are at most `kStripeRows`.
template <typename Body>
TW_INLINE void with_rows(int rows, Body&& body) {
  switch (rows) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3:
      if constexpr (kStripeRows > 2) return body.template operator()<3>();
      break;
    default:
      if constexpr (kStripeRows > 3) return body.template operator()<4>();
      break;
  }
}

// Adds B h to some rows of a tile, of one adapter.
template <typename T, int ROWS>
TW_INLINE void add_panel(const LowRankRow* rows, const LowRankStripe* stripes, float* tile) {
  using Activation = typename Element<T>::Activation;
  for (int s = 0; s < kPanel / kStripe; ++s, ++stripes, tile += kStripe) {
    const Activation* h[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) h[r] = static_cast<const Activation*>(rows[r].h) + stripes->first;
    F products[ROWS][kStripeVectors];
    multiply_stripe<T, ROWS>(static_cast<const T*>(stripes->b), stripes->count, h, products);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kStripeVectors; ++v) {
        float* const y = tile + r * kPanel + v * kLanes;
        store(y, add(load(y), products[r][v]));
      }
    }
  }
}

// `tile` [count, kPanel] are the products of rows with the panel. Those of one adapter are mostly side by side.
TW_INLINE void add_low_rank(const LowRankRow* rows, int count, int panel, float* tile) {
  for (int begin = 0, end; begin < count; begin = end) {
    const LowRankRow& row = rows[begin];
    end = begin + 1;
    if (!row.stripes) continue;
    while (end < count && end < begin + kStripeRows && rows[end].stripes == row.stripes) ++end;
    const LowRankStripe* const stripes = row.stripes + panel * (kPanel / kStripe);
    with_rows(end - begin, [&]<int ROWS>() {
      float* const y = tile + begin * kPanel;
      switch (row.type) {
        case DType::kFloat32: return add_panel<float, ROWS>(&row, stripes, y);
        case DType::kBFloat16: return add_panel<bf16, ROWS>(&row, stripes, y);
        case DType::kFloat16: return add_panel<f16, ROWS>(&row, stripes, y);
      }
    });
  }
}

// Prefetches where the stripes of a panel are said to be.
TW_INLINE void prefetch_stripes(const LowRankRow* rows, int count, int panel) {
  for (int r = 0; r < count; ++r) {
    if (rows[r].stripes) prefetch(rows[r].stripes + panel * (kPanel / kStripe));
  }
}

// Prefetches what is added to a tile while that is computed, where the next panel's stripes are, and some of what is read
// next. Much else is read from one panel to the next.
TW_INLINE void prefetch_low_rank(const LowRankRow* rows, int count, int panel) {
  constexpr int kStripes = kPanel / kStripe;
  const LowRankStripe* last = nullptr;
  for (int r = 0; r < count; ++r) {
    if (!rows[r].stripes || rows[r].stripes == last) continue;
    last = rows[r].stripes;
    const LowRankStripe* const stripes = last + panel * kStripes;
    prefetch(stripes + kStripes);
    for (int s = 0; s < kStripes; ++s) {
      const char* const b = static_cast<const char*>(stripes[s].b);
      for (size_t i = 0; i < stripes[s].bytes(rows[r].type); i += 64) prefetch(b + i);
    }
    const char* const next = rows[r].next + panel * rows[r].next_bytes;
    for (size_t i = 0; i < rows[r].next_bytes; i += 64) prefetch_later(next + i);
  }
}

}  // namespace tidewheel::TW_ISA
