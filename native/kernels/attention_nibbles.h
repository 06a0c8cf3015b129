// Products with 4-bit K and V, in groups that each have a scale.
#pragma once

#include "kernels/attention_parts.h"

namespace tidewheel::TW_ISA {

class NibbleProducts : public Products {
 public:
  static constexpr bool kAdjusts = false, kSpreads = false;

  NibbleProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : Products(args, rows, scratch), q_(rows.queries<float>(scratch)),
        weights_(scratch.take<float>(kTileRows * kAttentionTile)),
        scaled_(scratch.take<float>(kTileRows * kAttentionTile)) {}

  template <int ROWS, int VECTORS>
  void score_vectors(int row, int first) {
    float* const scores = scores_ + first * kLanes;
    for (int group = 0; group < cache_groups(dim_); ++group) {
      const uint8_t* start[VECTORS];
      const f16* scales[VECTORS];
      ptrdiff_t later[VECTORS];
      F acc[ROWS][VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int block = (first + v) / kBlockVectors, slot = (first + v) % kBlockVectors * kLanes;
        start[v] = head(block).k_pair(slot, group * kCacheGroup);
        scales[v] = head(block).k_scales(group) + slot;
        later[v] = ahead(block);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r][v] = zero();
      }
      const int pairs = std::min(kCacheGroup, dim_ - group * kCacheGroup) / 2;
      const float* q = q_ + size_t(row) * dim_ + group * kCacheGroup;
      for (int i = 0; i < pairs; ++i) {
        NibbleFloats k[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const uint8_t* p = start[v] + i * kBlockTokens;
          if (v % kBlockVectors == 0 && i * kBlockTokens % 64 == 0) prefetch_later(p + later[v]);
          k[v] = load_signed_nibbles(p);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) {
            acc[r][v] = dot_single(acc[r][v], k[v].low, q + r * dim_ + 2 * i);
            acc[r][v] = dot_single(acc[r][v], k[v].high, q + r * dim_ + 2 * i + 1);
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          float* sum = scores + r * kAttentionTile + v * kLanes;
          store(sum, group ? fma(acc[r][v], load(scales[v]), load(sum)) : mul(acc[r][v], load(scales[v])));
        }
      }
    }
  }

  F adjusted(F x, int, int) const { return x; }

  float* begin_row(int index, int) { return weights_ + index * kAttentionTile; }
  void put_weights(float* row, int t, F p) { store(row + t, p); }
  void end_row(const float*, int) {}
  void end_weights(int, int, int) {}

  template <int ROWS>
  void sum_rows(int row, int tokens) {
    constexpr int kHalf = kCacheGroup / 2;
    constexpr int kVectors = std::min(std::max(vectors_for(ROWS) / 2, 1), kHalf / kLanes);
    const float* w = weights_;
    for (int group = 0; group < cache_groups(values_); ++group) {
      for (int t = 0; t < tokens; t += kLanes) {
        const F scales = load(head(t / kBlockTokens).v_scales(group) + t % kBlockTokens);
        for (int r = 0; r < ROWS; ++r) {
          // If the weight is 0, the scale may be NaN, as in ElementProducts.
          const F p = load(w + r * kAttentionTile + t);
          store(scaled_ + r * kAttentionTile + t, keep_if(mul(p, scales), p, set1(0x1p-126f)));
        }
      }
      for (int i = 0; i < kHalf; i += kVectors * kLanes) sum_nibbles<ROWS, kVectors>(row, tokens, group, i);
    }
  }

 private:
  CachedInt4Head head(int block) const {
    return {reinterpret_cast<uint8_t*>(const_cast<char*>(cached(block))), dim_, stored_values_};
  }

  // Sums the columns in bytes `first` to first + VECTORS * kLanes - 1 of the group: their lower and their upper
  // numbers.
  template <int ROWS, int VECTORS>
  void sum_nibbles(int row, int tokens, int group, int first) {
    constexpr int kHalf = kCacheGroup / 2;
    const int d = group * kCacheGroup + first;
    const bool has_upper = d + kHalf < values_;
    float* sums = sums_ + size_t(row) * values_ + d;
    F low[ROWS][VECTORS], high[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const F rescale = set1(rescale_[row + r]);
        low[r][v] = mul(load(sums + r * values_ + v * kLanes), rescale);
        high[r][v] = has_upper ? mul(load(sums + r * values_ + kHalf + v * kLanes), rescale) : zero();
      }
    }
    for (int begin = 0; begin < tokens; begin += kBlockTokens) {
      const int block = begin / kBlockTokens, count = std::min(tokens - begin, kBlockTokens);
      const uint8_t* bytes = head(block).v_group(0, group) + first;
      const ptrdiff_t later = ahead(block);
      for (int t = 0; t < count; ++t) {
        const uint8_t* p = bytes + t * kHalf;
        if (first == 0 && t * kHalf % 64 == 0) prefetch_later(p + later);
        NibbleFloats v4[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) v4[v] = load_signed_nibbles(p + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          const float* weight = scaled_ + r * kAttentionTile + begin + t;
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) {
            low[r][v] = dot_single(low[r][v], v4[v].low, weight);
            high[r][v] = dot_single(high[r][v], v4[v].high, weight);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        store(sums + r * values_ + v * kLanes, low[r][v]);
        if (has_upper) store(sums + r * values_ + kHalf + v * kLanes, high[r][v]);
      }
    }
  }

  float* const q_;        // [rows, dim]
  float* const weights_;  // [kTileRows, kAttentionTile]
  float* const scaled_;   // the same, multiplied by a group's V scales
};

}  // namespace tidewheel::TW_ISA
