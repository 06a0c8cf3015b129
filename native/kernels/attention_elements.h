// Products with K and V whose elements are whole bytes. They are widened to the type that the level multiplies.
#pragma once

#include "kernels/attention_parts.h"

namespace tidewheel::TW_ISA {

// Elements of V that are copied out of K at a time, so that they stay in the L1 cache.
constexpr int kSpreadValues = 64;

// VECTORS vectors of K or V, which advance by a stride at each step, and the distance to a later block that is
// prefetched: 0 but for a task's first rows, because the other rows read the same memory.
template <typename T, int VECTORS>
struct Columns {
  const T* start[VECTORS];
  ptrdiff_t ahead[VECTORS];  // bytes
  unsigned line_pairs;       // as in AttentionArgs, or 0
};

// Multiplies ROWS rows of queries or probabilities by `columns` in `steps` steps, and adds the products to `acc`. A row's
// x are `x_stride` behind those of the row before, and `x_step` behind those of the step before.
template <typename T, int ROWS, int VECTORS>
TW_INLINE void contract(const typename Cached<T>::Query* x, size_t x_stride, size_t x_step,
                        const Columns<T, VECTORS>& columns, size_t step_stride, int steps, F (&acc)[ROWS][VECTORS]) {
  using C = Cached<T>;
  for (int s = 0; s < steps; ++s) {
    const auto at = [&](int v) { return columns.start[v] + s * step_stride; };
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      // A block's vectors are contiguous. If they are short, several share a cache line.
      constexpr size_t kBytes = kLanes * C::kStep * sizeof(T);
      if (v % kBlockVectors * kBytes % 64 == 0 && ((s + v) & columns.line_pairs) == 0) {
        prefetch_later(reinterpret_cast<const char*>(at(v)) + columns.ahead[v]);
      }
    }
    add_products<C>(acc, at, x + s * x_step, x_stride);
  }
}

// Reads tokens' scales, and V that is a part of K.
template <typename T>
class ElementReader : public Products {
 public:
  static constexpr bool kAdjusts = kHasScales<T>, kSpreads = true;
  // Widening 8-bit floats takes longer than multiplying them, so they are read once for all rows.
  static constexpr bool kReadsOnce = std::is_same_v<T, e5m2> || std::is_same_v<T, e4m3>;
  static constexpr int rows_at_once(int left) { return kReadsOnce ? std::min(left, kRows) : Products::rows_at_once(left); }

  ElementReader(const AttentionArgs& args, const Rows& rows, Scratch& scratch, int height = kRows)
      : Products(args, rows, scratch, height), k_scales_(scratch.take<float>(kAttentionTile)),
        v_scales_(scratch.take<float>(kAttentionTile)),
        spread_(stored_values_ ? nullptr : scratch.take<T>(kAttentionTile * kSpreadValues)), columns_{0, values_} {}

  void begin_tile(int tile, int tokens) {
    Products::begin_tile(tile, tokens);
    if constexpr (kHasScales<T>) {
      for (int t = 0; t < tokens; t += kBlockTokens) {
        const int block = t / kBlockTokens;
        const CachedHead<T> h = head(block);
        for (const float* scales : {h.k_scales(), h.v_scales()}) {
          prefetch_later(reinterpret_cast<const char*>(scales) + ahead(block));
        }
        std::memcpy(k_scales_ + t, h.k_scales(), kBlockTokens * sizeof(float));
        std::memcpy(v_scales_ + t, spread_ ? h.k_scales() : h.v_scales(), kBlockTokens * sizeof(float));
      }
    }
  }

  // Copies V out of K, some columns of the tile at a time, once for all rows, and calls `sum` for these columns.
  template <typename Sum>
  void each_columns(int tokens, Sum&& sum) {
    for (int d = 0; d < values_; d += kSpreadValues) {
      columns_ = {d, std::min(d + kSpreadValues, values_)};
      for (int t = 0; t < tokens; t += kBlockTokens) {
        spread_values<kSpreadValues>(head(t / kBlockTokens), args_.heads.value_start + d, columns_.end - d,
                                     spread_ + t * kSpreadValues);
      }
      sum();
    }
  }

 protected:
  CachedHead<T> head(int block) const {
    return {reinterpret_cast<T*>(const_cast<char*>(cached(block))), dim_, stored_values_};
  }

  float* const k_scales_;  // [kAttentionTile], for int8
  float* const v_scales_;
  T* const spread_;        // [kAttentionTile, kSpreadValues]: V in the layout of cached V; null if the cache stores V
  struct {
    int begin, end;
  } columns_;              // the columns of V that are summed
};

template <typename T>
class ElementProducts : public ElementReader<T> {
 public:
  using Q = typename Cached<T>::Query;
  static constexpr int kStep = Cached<T>::kStep;
  using ElementReader<T>::args_, ElementReader<T>::rows_, ElementReader<T>::dim_, ElementReader<T>::values_,
      ElementReader<T>::stored_values_, ElementReader<T>::scores_, ElementReader<T>::rescale_, ElementReader<T>::sums_,
      ElementReader<T>::k_scales_, ElementReader<T>::v_scales_, ElementReader<T>::spread_, ElementReader<T>::columns_,
      ElementReader<T>::head, ElementReader<T>::ahead;

  ElementProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : ElementReader<T>(args, rows, scratch), q_(scratch.take<Q>(size_t(rows.count) * dim_)),
        weights_(scratch.take<Q>((spread_ ? rows.count : kTileRows) * kAttentionTile)) {
    for (int begin = 0, count; begin < rows.count; begin += count) {
      count = ElementReader<T>::rows_at_once(rows.count - begin);
      Q* const packed = q_ + size_t(begin) * dim_;
      const Q* queries[Products::kRows];
      for (int r = 0; r < count; ++r) queries[r] = rows.template query<Q>(begin + r);
      for (int d = 0; d < dim_; d += kStep) {
        for (int r = 0; r < count; ++r) std::memcpy(packed + d * count + r * kStep, queries[r] + d, kStep * sizeof(Q));
      }
    }
  }

  template <int ROWS, int VECTORS>
  void score_vectors(int row, int first) {
    Columns<T, VECTORS> columns;
    columns.line_pairs = line_pairs();
    F acc[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int block = (first + v) / kBlockVectors;
      columns.start[v] = head(block).k + (first + v) % kBlockVectors * kLanes * kStep;
      columns.ahead[v] = row == 0 ? ahead(block) : 0;
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][v] = zero();
    }
    contract<T, ROWS, VECTORS>(q_ + size_t(row) * dim_, kStep, ROWS * kStep, columns, kBlockTokens * kStep, dim_ / kStep, acc);
    float* const to = scores_ + first * kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(to + r * kAttentionTile + v * kLanes, acc[r][v]);
    }
  }

  F adjusted(F x, int, int t) const {
    if constexpr (kHasScales<T>) x = mul(x, load(k_scales_ + t));
    return x;
  }

  Q* begin_row(int index, int row) { return weights(row - index) + index * kAttentionTile; }
  void put_weights(Q* row, int t, F p) {
    // If the weight is 0, the scale may be NaN, because the row does not see the token or the slot holds old content of
    // the block.
    if constexpr (kHasScales<T>) p = keep_if(mul(p, load(v_scales_ + t)), p, set1(0x1p-126f));
    if constexpr (kLoadedUnit<T> != 1.0f) p = mul(p, set1(kLoadedUnit<T>));
    store(row + t, p);
  }
  void end_row(const Q*, int) {}
  void end_weights(int, int, int) {}

  template <int ROWS>
  void sum_rows(int row, int tokens) {
    spread_ ? sum_rows<ROWS, true>(row, tokens) : sum_rows<ROWS, false>(row, tokens);
  }

 private:
  // Every line is prefetched if the second of a pair would come late: K and V of single bytes are too short, and vectors
  // of 8 lanes read two blocks side by side, not four.
  unsigned line_pairs() const { return sizeof(T) > 1 && kLanes != 8 ? args_.line_pairs : 0; }

  // The weights of these rows. The weights of all rows of the task are kept only if V is spread.
  Q* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  // SPREAD: whether V is spread. It is a template parameter because strides unknown at compile time would take
  // registers that the sums need.
  template <int ROWS, bool SPREAD>
  void sum_rows(int row, int tokens) {
    constexpr int kVectors = vectors_for(ROWS);
    const int end = columns_.end;
    int d = columns_.begin;
    for (; d + kVectors * kLanes <= end; d += kVectors * kLanes) sum_columns<ROWS, kVectors, SPREAD>(row, tokens, d);
    for (; d < end; d += kLanes) sum_columns<ROWS, 1, SPREAD>(row, tokens, d);
  }

  template <int ROWS, int VECTORS, bool SPREAD>
  void sum_columns(int row, int tokens, int d) {
    const size_t stride = values_;
    float* const sums = sums_ + row * stride + d;
    F acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = mul(load(sums + r * stride + v * kLanes), set1(rescale_[row + r]));
    }
    const size_t step_stride = size_t(SPREAD ? kSpreadValues : values_) * kStep;
    const Q* w = weights(row);
    const auto values = [&](int t) {
      return SPREAD ? spread_ + t * kSpreadValues + (d - columns_.begin) * kStep : head(t / kBlockTokens).v_element(0, d);
    };
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const T* v = values(t);
      const int steps = std::min(tokens - t, kBlockTokens) / kStep;
      Columns<T, VECTORS> columns;
      columns.line_pairs = line_pairs();
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) {
        columns.start[i] = v + i * kLanes * kStep;
        columns.ahead[i] = SPREAD || row ? 0 : ahead(t / kBlockTokens);
      }
      contract<T, ROWS, VECTORS>(w + t, kAttentionTile, kStep, columns, step_stride, steps, acc);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(sums + r * stride + v * kLanes, acc[r][v]);
    }
    if constexpr (kStep == 2) {
      if (const int last = tokens - 1, begin = last / kBlockTokens * kBlockTokens; tokens % 2) {
        last_half_pair<ROWS, VECTORS>(w + last, values(begin) + (last - begin) / kStep * step_stride, sums, stride);
      }
    }
  }

  // The slot after the last token may hold anything, even NaN, from earlier use of the block. This is a function of its
  // own, so that the loop before it need not share its registers.
  template <int ROWS, int VECTORS>
  [[gnu::noinline]] static void last_half_pair(const Q* p, const T* v, float* sums, size_t stride) {
    for (int i = 0; i < VECTORS; ++i) {
      const auto pairs = drop_odd(Cached<T>::load_step(v + i * kLanes * kStep));
      for (int r = 0; r < ROWS; ++r) {
        float* const sum = sums + r * stride + i * kLanes;
        store(sum, Cached<T>::dot(load(sum), pairs, p + r * kAttentionTile));
      }
    }
  }

  Q* const q_;        // for each set of rows computed at once: [dim / kStep][rows][kStep]
  Q* const weights_;  // [kTileRows, or all rows if V is spread, kAttentionTile]
};

}  // namespace tidewheel::TW_ISA
