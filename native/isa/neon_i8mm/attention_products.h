// Attention's products with bfloat16 K and V, by matrix products. A cached vector has two elements of four tokens of K,
// or two tokens of four elements of V. With the next such vector it becomes four inputs each of two and two columns.
// Queries and weights are kept as pairs of rows in the same order, [row pairs][inputs / 4][2][4]. An instruction goes
// through the inputs of each output in order, so a row's result is the same alone and in any pair.
#pragma once

#include "kernels/attention_bytes.h"

namespace tidewheel::TW_ISA {

class MatrixProducts : public ElementReader<bf16> {
 public:
  static constexpr bool kAdjusts = false;

  MatrixProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : ElementReader(args, rows, scratch), q_(scratch.take<bf16>(size_t(even(rows.count)) * dim_)),
        weights_(scratch.take<bf16>(even(spread_ ? rows.count : kRows) * kAttentionTile)) {
    for (int r = 0; r < rows.count; ++r) {
      const bf16* const query = rows.query<bf16>(r);
      for (int d = 0; d < dim_; d += kUnit) std::memcpy(unit(q_, dim_, r, d), query + d, kUnit * sizeof(bf16));
    }
  }

  template <int ROWS, int VECTORS>
  void score_vectors(int row, int first) {
    Columns<bf16, VECTORS> columns;
    columns.line_pairs = args_.line_pairs;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int block = (first + v) / kBlockVectors;
      columns.start[v] = head(block).k + (first + v) % kBlockVectors * kLanes * 2;
      columns.ahead[v] = row == 0 ? ahead(block) : 0;
    }
    Sums<ROWS, VECTORS> sums;
    sums.each([](int, int, float32x4_t& low, float32x4_t& high) __attribute__((always_inline)) {
      low = high = vdupq_n_f32(0.0f);
    });
    multiply(sums, unit(q_, dim_, row, 0), dim_, columns, kBlockTokens * 2, dim_ / kUnit);
    sums.each([&](int r, int v, float32x4_t low, float32x4_t high) __attribute__((always_inline)) {
      store_rows<ROWS>(scores(r) + (first + v) * kLanes, kAttentionTile, r, low, high);
    });
  }

  F adjusted(F x, int, int) const { return x; }

  bf16* begin_row(int index, int row) { return unit(weights(row - index), kAttentionTile, index, 0); }
  void put_weights(bf16* row, int t, F p) { store(row + 2 * t, p); }
  void end_row(const bf16*, int) {}
  void end_weights(int, int, int) {}

  template <int ROWS>
  void sum_rows(int row, int tokens) {
    spread_ ? sum_rows<ROWS, true>(row, tokens) : sum_rows<ROWS, false>(row, tokens);
  }

 private:
  static constexpr int kUnit = 4;  // inputs of a row that an instruction takes
  static_assert(kUnit == kLanes && kBlockTokens % kUnit == 0 && kRows % 2 == 0);

  static constexpr int even(int rows) { return (rows + 1) / 2 * 2; }

  // Row `row`'s inputs from i on, in rows with `size` inputs each.
  TW_INLINE bf16* unit(bf16* rows, int size, int row, int i) {
    return rows + size_t(row / 2) * 2 * size + (i * 2 + row % 2 * kUnit);
  }
  // The weights of these rows. The weights of all rows of the task are kept only if V is spread.
  bf16* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  // For each pair of rows and vector of columns: both rows of its first two columns, then of its other two.
  template <int ROWS, int VECTORS>
  struct Sums {
    static constexpr int kPairs = (ROWS + 1) / 2;
    float32x4_t v[kPairs][VECTORS][2];

    // Calls `body` with the first row of each pair, the vector and the sums.
    template <typename Body>
    [[gnu::always_inline]] void each(Body&& body) {
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) body(2 * p, i, v[p][i][0], v[p][i][1]);
      }
    }

    // Adds the products of four inputs. `x` has the first pair's; those of another pair are `stride` further. load(i) gives
    // a vector of columns, the first two inputs and the next two.
    template <typename Load>
    [[gnu::always_inline]] void add(const bf16* x, size_t stride, Load&& load) {
      bfloat16x8_t rows[kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const auto* const from = reinterpret_cast<const uint16_t*>(x) + p * stride;
        const bool both = 2 * p + 1 < ROWS;
        rows[p] = vreinterpretq_bf16_u16(both ? vld1q_u16(from) : vcombine_u16(vld1_u16(from), vdup_n_u16(0)));
      }
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) {
        const auto [columns, next] = load(i);
        const uint32x4_t a = vreinterpretq_u32_bf16(columns.v), b = vreinterpretq_u32_bf16(next.v);
        const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(a, b)), high = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) {
          v[p][i][0] = vbfmmlaq_f32(v[p][i][0], rows[p], low);
          v[p][i][1] = vbfmmlaq_f32(v[p][i][1], rows[p], high);
        }
      }
    }
  };

  struct TwoPairs {
    Pairs columns, next;
  };

  template <int ROWS, int VECTORS>
  TW_INLINE void multiply(Sums<ROWS, VECTORS>& sums, const bf16* x, size_t row_size, const Columns<bf16, VECTORS>& columns,
                          size_t stride, int units) {
    for (int u = 0; u < units; ++u) {
      sums.add(x + u * 2 * kUnit, 2 * row_size, [&](int v) __attribute__((always_inline)) {
        const bf16* const at = columns.start[v] + 2 * u * stride;
        // A block's vectors are contiguous, and four of them fill a cache line.
        if (v % kBlockVectors == 0) {
#pragma GCC unroll 2
          for (int line = 0; line < 2; ++line) {
            if (((2 * u + line + v) & columns.line_pairs) == 0) {
              prefetch_later(reinterpret_cast<const char*>(at + line * stride) + columns.ahead[v]);
            }
          }
        }
        return TwoPairs{load_pairs(at), load_pairs(at + stride)};
      });
    }
  }

  // What rows r and r + 1 of ROWS have for a vector of columns, `stride` apart.
  template <int ROWS>
  TW_INLINE void store_rows(float* to, size_t stride, int r, float32x4_t low, float32x4_t high) {
    const float64x2_t a = vreinterpretq_f64_f32(low), b = vreinterpretq_f64_f32(high);
    vst1q_f32(to, vreinterpretq_f32_f64(vzip1q_f64(a, b)));
    if (r + 1 < ROWS) vst1q_f32(to + stride, vreinterpretq_f32_f64(vzip2q_f64(a, b)));
  }

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
    float* const first = sums_ + size_t(row) * values_ + d;
    Sums<ROWS, VECTORS> sums;
    sums.each([&](int r, int v, float32x4_t& low, float32x4_t& high) __attribute__((always_inline)) {
      const auto rescaled = [&](int i) {
        const F scaled = mul(load(first + i * values_ + v * kLanes), set1(rescale_[row + i]));
        return vreinterpretq_f64_f32(scaled.v);
      };
      const float64x2_t a = rescaled(r), b = r + 1 < ROWS ? rescaled(r + 1) : a;
      low = vreinterpretq_f32_f64(vzip1q_f64(a, b)), high = vreinterpretq_f32_f64(vzip2q_f64(a, b));
    });
    const size_t stride = size_t(SPREAD ? kSpreadValues : values_) * 2;
    const bf16* const w = weights(row);
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const int block = t / kBlockTokens, count = std::min(tokens - t, kBlockTokens), units = count / kUnit;
      const bf16* const v = SPREAD ? spread_ + t * kSpreadValues + (d - columns_.begin) * 2 : head(block).v_element(0, d);
      Columns<bf16, VECTORS> columns;
      columns.line_pairs = args_.line_pairs;
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) {
        columns.start[i] = v + i * kLanes * 2;
        columns.ahead[i] = SPREAD || row ? 0 : ahead(block);
      }
      multiply(sums, w + t * 2, kAttentionTile, columns, stride, units);
      if (const int rest = count % kUnit) {
        // Slots after the last token may hold anything, even NaN, from earlier use of the block.
        const bf16* const last = v + 2 * units * stride;
        sums.add(w + (t + units * kUnit) * 2, 2 * kAttentionTile, [&](int i) __attribute__((always_inline)) {
          const Pairs pairs = load_pairs(last + i * kLanes * 2), none = {vreinterpretq_bf16_u16(vdupq_n_u16(0))};
          return TwoPairs{rest == 1 ? drop_odd(pairs) : pairs,
                          rest == 3 ? drop_odd(load_pairs(last + stride + i * kLanes * 2)) : none};
        });
      }
    }
    sums.each([&](int r, int v, float32x4_t low, float32x4_t high) __attribute__((always_inline)) {
      store_rows<ROWS>(first + r * values_ + v * kLanes, values_, r, low, high);
    });
  }

  bf16* const q_;        // [row pairs, dim / 4, 2, 4]
  bf16* const weights_;  // the same, of [kRows, or all rows if V is spread, kAttentionTile]
};

using BFloat16Products = MatrixProducts;
using Int8Products = Int8VectorProducts;

}  // namespace tidewheel::TW_ISA
