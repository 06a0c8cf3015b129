// What adapters add to a tile of products. It depends only on a product's own row and column.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

// Rows that share what is loaded of B.
constexpr int kStripeRows = 4;

// Adds B h to some rows of a tile: `h` and `y` are theirs.
template <typename T, int ROWS>
TW_INLINE void add_stripe(const LowRankStripe& stripe, const void* const* h, float* const* y) {
  using E = Element<T>;
  constexpr int kTogether = 2 * E::kStep;
  static_assert(kLowRankValues % kTogether == 0);
  for (int v = 0; v < kStripe; v += kLanes) {
    // Even and odd steps have sums of their own: one chain of additions would be waited for.
    F sums[2][ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sums[0][r] = sums[1][r] = zero();
    const T* b = static_cast<const T*>(stripe.b) + v * E::kStep;
    for (int i = stripe.first; i < stripe.first + stripe.count; i += kTogether, b += kTogether * kStripe) {
      const typename E::Vector even = E::load_step(b), odd = E::load_step(b + E::kStep * kStripe);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const auto* const values = static_cast<const typename E::Activation*>(h[r]) + i;
        sums[0][r] = E::dot(sums[0][r], even, values);
        sums[1][r] = E::dot(sums[1][r], odd, values + E::kStep);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      float* const at = y[r] + v;
      store(at, add(load(at), add(sums[0][r], sums[1][r])));
    }
  }
}

template <typename T>
TW_INLINE void add_panel(const LowRankStripe* stripes, const void* const* h, float* const* y, int rows) {
  for (int s = 0; s < kPanel / kStripe; ++s) {
    float* at[kStripeRows];
    for (int r = 0; r < rows; ++r) at[r] = y[r] + s * kStripe;
    switch (rows) {
      case 1: add_stripe<T, 1>(stripes[s], h, at); break;
      case 2: add_stripe<T, 2>(stripes[s], h, at); break;
      case 3: add_stripe<T, 3>(stripes[s], h, at); break;
      default: add_stripe<T, kStripeRows>(stripes[s], h, at); break;
    }
  }
}

// `tile` [count, kPanel] are the products of at most 64 rows with the panel.
TW_INLINE void add_to_rows(const LowRankRow* rows, int count, int panel, float* tile) {
  constexpr int kStripes = kPanel / kStripe;
  uint64_t left = 0;  // rows that something is added to
  for (int r = 0; r < count; ++r) left |= uint64_t{rows[r].stripes != nullptr} << r;
  while (left) {
    // The first of them, with others of the same adapter.
    const LowRankRow& row = rows[__builtin_ctzll(left)];
    const void* h[kStripeRows];
    float* y[kStripeRows];
    int together = 0;
    for (uint64_t next = left; next && together < kStripeRows; next &= next - 1) {
      const int r = __builtin_ctzll(next);
      if (rows[r].stripes != row.stripes) continue;
      h[together] = rows[r].h, y[together] = tile + r * kPanel;
      left &= ~(uint64_t{1} << r);
      ++together;
    }
    const LowRankStripe* const stripes = row.stripes + panel * kStripes;
    switch (row.type) {
      case DType::kFloat32: add_panel<float>(stripes, h, y, together); break;
      case DType::kBFloat16: add_panel<bf16>(stripes, h, y, together); break;
      case DType::kFloat16: add_panel<f16>(stripes, h, y, together); break;
    }
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
  const LowRankStripe* last = nullptr;  // rows of one adapter are mostly side by side
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

TW_INLINE void add_low_rank(const LowRankRow* rows, int count, int panel, float* tile) {
  constexpr int kMost = 64;
  for (int begin = 0; begin < count; begin += kMost) {
    add_to_rows(rows + begin, count - begin < kMost ? count - begin : kMost, panel, tile + begin * kPanel);
  }
}

}  // namespace tidewheel::TW_ISA
