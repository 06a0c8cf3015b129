// Integer products with int8 K and V, for levels that have dot products of unsigned with signed bytes (VNNI). Other
// levels use ElementProducts. Each query row is rounded to signed bytes, with a scale of its own. A tile's weights,
// multiplied by their tokens' V scales, are rounded to unsigned bytes, with a scale for each row and tile. Sums are
// exact. The rounding of a row depends on that row alone.
#pragma once

#include <utility>

#include "kernels/attention_elements.h"
#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

constexpr int kLargestByte = 127, kLargestWeight = 255;
constexpr float kMinToDivideBy = 0x1p-110f;  // below the scale of any V that is not stored as zeros

// How queries and weights become bytes, for products that READER reads K and V for. The level's int32 vector is a
// template parameter because levels without `kDotsBytes` lack some functions used here.
template <typename Reader, typename Ints>
class RoundedRows : public Reader {
 public:
  using Reader::args_, Reader::rows_, Reader::dim_, Reader::values_, Reader::rescale_, Reader::sums_, Reader::k_scales_,
      Reader::v_scales_, Reader::spread_, Reader::columns_, Reader::head, Reader::ahead, Reader::scores, Reader::kRows;

  // Rows of weights have room for whole lines of K and V.
  RoundedRows(const AttentionArgs& args, const Rows& rows, Scratch& scratch, int query_bytes)
      : Reader(args, rows, scratch), q_(scratch.take<int8_t>(size_t(rows.count) * query_bytes)),
        q_scales_(scratch.take<float>(rows.count)), q_sums_(scratch.take<int32_t>(rows.count)),
        weights_(scratch.take<uint8_t>((spread_ ? rows.count : kRows) * kAttentionTile)),
        weight_scales_(scratch.take<float>(rows.count)) {}

  static constexpr bool kAdjusts = false;
  F adjusted(F x, int, int) const { return x; }

  // A row's weights times scales, the largest, and the sum, which is NaN or infinite if any of them is.
  struct RowWeights {
    float* to;
    const float* scales;
    F largest = zero(), poison = zero();
  };
  RowWeights begin_row(int index, int) { return {scores(index), v_scales_}; }
  void put_weights(RowWeights& row, int t, F p) {
    // If the weight is 0, the scale may be NaN, because the row does not see the token or the slot holds old content of
    // the block.
    const F x = keep_if(mul(p, load(row.scales + t)), p, set1(0x1p-126f));
    row.largest = max(x, row.largest);  // none is negative
    row.poison = add(row.poison, x);
    store(row.to + t, x);
  }
  void end_row(const RowWeights& row, int index) {
    largest_[index] = row.largest;
    poison_[index] = row.poison;
  }

  // Handles all rows together, so that no row waits for the quotient of another one.
  void end_weights(int rows, int row, int width) {
    float factors[kPadded], scales[kPadded], tops[kPadded] = {}, poisons[kPadded] = {};
    hmax_each<kRows>(largest_, rows, tops);
    hsum_each<kRows>(poison_, rows, poisons);
    for (int i = 0; i < rows; i += kLanes) {
      const F top = load(tops + i), least = set1(kMinToDivideBy);
      store(factors + i, keep_if(div(set1(kLargestWeight), max(top, least)), top, least));
      store(scales + i, fma(load(poisons + i), zero(), keep_if(mul(top, set1(1.0f / kLargestWeight)), top, least)));
    }
    copy_some<kRows>(scales, rows, weight_scales_ + row);
    const float* x = scores(0);
    uint8_t* to = weights(row);
    for (int r = 0; r < rows; ++r, x += kAttentionTile, to += kAttentionTile) {
      const F factor = set1(factors[r]);
      for (int t = 0; t < width; t += kLanes) {
        const Ints rounded = round_to_int(mul(load(x + t), factor));  // at most kLargestWeight, or not a number
        store(to + t, rounded);
      }
    }
  }

 protected:
  // Rounds row r to bytes at `to`. Its groups of four bytes are `stride` apart. A row that is too small to divide by
  // becomes zeros. If any number is not finite, the scale is NaN.
  void round_query(int r, int8_t* to, size_t stride) {
    const float* const x = rows_.template query<float>(r);
    F largest = zero(), poison = zero();
    for (int i = 0; i < dim_; i += kLanes) {
      largest = max(abs(load(x + i)), largest);
      poison = fma(load(x + i), zero(), poison);
    }
    const float top = hmax(largest);
    const bool small = !(top >= kMinToDivideBy);
    q_scales_[r] = (small ? 0.0f : top / kLargestByte) + hsum(poison);
    const F factor = set1(small ? 0.0f : kLargestByte / top), bound = set1(kLargestByte);
    Ints total = set1_int(0);
    for (int i = 0; i < dim_; i += kLanes) {
      const Ints rounded = round_to_int(min(max(mul(load(x + i), factor), sub(zero(), bound)), bound));
      total = add(total, rounded);
      int8_t bytes[kLanes];
      store(bytes, rounded);
      for (int j = 0; j < kLanes; j += kQuad, to += stride) std::memcpy(to, bytes + j, kQuad);
    }
    q_sums_[r] = hsum(total);
  }

  // The weights of these rows. The weights of all rows of the task are kept only if V is spread.
  uint8_t* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  int8_t* const q_;
  float* const q_scales_;       // [rows]
  int32_t* const q_sums_;       // [rows]
  uint8_t* const weights_;      // [kRows, or all rows if V is spread, kAttentionTile]
  float* const weight_scales_;  // [rows], for this tile

 private:
  static constexpr int kPadded = (kRows + kLanes - 1) / kLanes * kLanes;
  F largest_[kRows], poison_[kRows];  // of the rows whose weights are computed at a time, in any lane
};

// A block's K or V: the first column for these products, and the distance to a later block that is prefetched, as in
// Columns.
struct ByteColumns {
  const int8_t* start;
  ptrdiff_t ahead;  // bytes
};

template <typename Ints>
class ByteProducts : public RoundedRows<ElementReader<int8_t>, Ints> {
 public:
  using Base = RoundedRows<ElementReader<int8_t>, Ints>;
  using Base::ahead, Base::columns_, Base::dim_, Base::head, Base::k_scales_, Base::q_, Base::q_scales_, Base::q_sums_,
      Base::rescale_, Base::rows_at_once, Base::scores, Base::spread_, Base::sums_, Base::values_, Base::weight_scales_,
      Base::weights;

  ByteProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch) : Base(args, rows, scratch, rows.dim) {
    // For each set of rows computed at once: [dim / 4][rows][4].
    for (int begin = 0, count; begin < rows.count; begin += count) {
      count = rows_at_once(rows.count - begin);
      for (int r = 0; r < count; ++r) this->round_query(begin + r, q_ + size_t(begin) * dim_ + r * kQuad, count * kQuad);
    }
  }

  template <int ROWS, int VECTORS>
  void score_vectors(int row, int first) {
    ByteColumns columns[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int block = (first + v) / kBlockVectors;
      columns[v] = {head(block).k + (first + v) % kBlockVectors * kLanes * kQuad, row == 0 ? ahead(block) : 0};
    }
    const int8_t* const q = q_ + size_t(row) * dim_;
    Ints acc[ROWS][VECTORS];
    clear(acc);
    dot(columns, kBlockTokens * kQuad, dim_ / kQuad, acc, [&](Ints sum, Bytes k, int step, int r) {
      return dot_quads(sum, as_quads(sub(k, kQuadZero)), q + (step * ROWS + r) * kQuad);
    });
    float* const to = scores(0) + first * kLanes;
    const float* const q_scales = q_scales_ + row;
    const int32_t* const q_sums = q_sums_ + row;
    F k_scales[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) k_scales[v] = load(k_scales_ + (first + v) * kLanes);
    repeat<ROWS>([&](auto r) __attribute__((always_inline)) {
      const Ints correction = set1_int(-kQuadZero * q_sums[r]);
      const F scale = set1(q_scales[r]);
      repeat<VECTORS>([&](auto v) __attribute__((always_inline)) {
        store(to + r * kAttentionTile + v * kLanes, mul(to_floats(add(acc[r][v], correction)), mul(scale, k_scales[v])));
      });
    });
  }

  template <int ROWS>
  void sum_rows(int row, int tokens) {
    constexpr int kVectors = vectors_for(ROWS);
    const int end = columns_.end;
    int d = columns_.begin;
    for (; d + kVectors * kLanes <= end; d += kVectors * kLanes) sum_columns<ROWS, kVectors>(row, tokens, d);
    for (; d < end; d += kLanes) sum_columns<ROWS, 1>(row, tokens, d);
  }

 private:
  template <int ROWS, int VECTORS>
  TW_INLINE void clear(Ints (&acc)[ROWS][VECTORS]) {
    repeat<ROWS>([&](auto r) __attribute__((always_inline)) {
      repeat<VECTORS>([&](auto v) __attribute__((always_inline)) { acc[r][v] = set1_int(0); });
    });
  }

  // Adds to `acc[r][v]` its products with each of `steps` quads of columns: multiply(sum, columns, step, r).
  template <int ROWS, int VECTORS, typename Multiply>
  TW_INLINE void dot(const ByteColumns (&columns)[VECTORS], size_t step_stride, int steps, Ints (&acc)[ROWS][VECTORS],
                     Multiply&& multiply) {
    for (int s = 0; s < steps; ++s) {
      Bytes bytes[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int8_t* const p = columns[v].start + s * step_stride;
        // A block's vectors are contiguous. If they are short, several share a cache line.
        if (v % kBlockVectors * kLanes * kQuad % 64 == 0) prefetch_later(p + columns[v].ahead);
        bytes[v] = load_bytes(reinterpret_cast<const uint8_t*>(p));
      }
      repeat<ROWS>([&](auto r) __attribute__((always_inline)) {
        repeat<VECTORS>([&](auto v) __attribute__((always_inline)) {
          acc[r][v] = multiply(acc[r][v], bytes[v], s, r);
        });
      });
    }
    repeat<ROWS>([&](auto r) __attribute__((always_inline)) {
      repeat<VECTORS>([&](auto v) __attribute__((always_inline)) { acc[r][v] = settled(acc[r][v]); });
    });
  }

  template <int ROWS, int VECTORS>
  void sum_columns(int row, int tokens, int d) {
    Ints acc[ROWS][VECTORS];
    clear(acc);
    const size_t step_stride = size_t(spread_ ? kSpreadValues : values_) * kQuad;
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const int block = t / kBlockTokens;
      const int8_t* v =
          spread_ ? spread_ + t * kSpreadValues + (d - columns_.begin) * kQuad : head(block).v_element(0, d);
      ByteColumns columns[VECTORS];
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) columns[i] = {v + i * kLanes * kQuad, spread_ || row ? 0 : ahead(block)};
      const uint8_t* const w = weights(row) + t;
      dot(columns, step_stride, kBlockTokens / kQuad, acc, [&](Ints sum, Bytes values, int step, int r) {
        return dot_quads(sum, w + step * kQuad + r * kAttentionTile, as_quads(values));
      });
    }
    const size_t stride = values_;
    float* const sums = sums_ + row * stride + d;
    const float* const scales = weight_scales_ + row;
    const float* const rescales = rescale_ + row;
    repeat<ROWS>([&](auto r) __attribute__((always_inline)) {
      const F scale = set1(scales[r]), rescale = set1(rescales[r]);
      repeat<VECTORS>([&](auto v) __attribute__((always_inline)) {
        float* const p = sums + r * stride + v * kLanes;
        store(p, fma(to_floats(acc[r][v]), scale, mul(load(p), rescale)));
      });
    });
  }
};

using Int8VectorProducts = std::conditional_t<kDotsBytes, ByteProducts<I>, ElementProducts<int8_t>>;

}  // namespace tidewheel::TW_ISA
