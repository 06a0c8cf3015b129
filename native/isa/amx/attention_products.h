// Attention's products on tile registers, with K and V of bfloat16 and int8. A cached block of K already has the layout
// that tiles need: a line holds the same few elements of all 16 tokens. Of V, a line holds 16 elements of two or four
// tokens, so a tile's V is copied once for all rows, to where the lines of blocks follow each other. A row is summed by
// whole instructions, in the order of K's elements and of V's tokens, so its result is the same alone and among other
// rows.
#pragma once

#include "attention_tiles.h"
#include "kernels/attention_bytes.h"

namespace tidewheel::TW_ISA {

// Reads K and V of type T as tiles.
template <typename T>
class TileReader : public ElementReader<T> {
 public:
  static constexpr int kRows = TileSums::kRows;
  static constexpr int rows_at_once(int left) { return std::min(left, kRows); }
  using ElementReader<T>::dim_, ElementReader<T>::values_, ElementReader<T>::scores_, ElementReader<T>::spread_,
      ElementReader<T>::columns_, ElementReader<T>::head, ElementReader<T>::ahead;

  TileReader(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : ElementReader<T>(args, rows, scratch, kRows), is_single_(rows.count <= kRows), steps_((dim_ + kInputs - 1) / kInputs),
        last_step_(dim_ % kInputs ? scratch.take<T>(kAttentionTile * kInputs) : nullptr),
        v_(spread_ ? spread_ : scratch.take<T>(kAttentionTile * values_)), line_(spread_ ? kSpreadValues : values_) {
    if (last_step_) std::fill_n(last_step_, kAttentionTile * kInputs, T{});
  }

  void begin_tile(int tile, int tokens) {
    ElementReader<T>::begin_tile(tile, tokens);
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const int block = t / kBlockTokens;
      if (last_step_) {
        std::memcpy(last_step_ + t * kInputs, head(block).k_step(0, (steps_ - 1) * kInputs),
                    sizeof(T) * kBlockTokens * (dim_ % kInputs));
      }
      if (!spread_ && !is_single_) copy_values(block, 0, 1);
    }
    if (!spread_ && !is_single_) clear_values(tokens);
  }

  template <typename Sum>
  void each_columns(int tokens, Sum&& sum) {
    ElementReader<T>::each_columns(tokens, [&] {
      clear_values(tokens);
      sum();
    });
  }

 protected:
  static constexpr int kInputs = kTileLine / int{sizeof(T)};  // summed by one product; a line
  static_assert(kAttentionTile % kInputs == 0 && kInputs % kBlockTokens == 0);

  // Elements from one row of queries to the next, with zeros behind the last.
  int query_size() const { return steps_ * kInputs; }

  // Writes the dot products of `rows` rows, at q, with K of the tile's first `blocks` blocks to the scores.
  template <typename Dot>
  void multiply_keys(int rows, int row, const T* q, int blocks, Dot&& dot) {
    sums_of_tiles_.shape(rows);
    sums_of_tiles_.multiply<false>(q, query_size() * sizeof(T), steps_, blocks, kTileLine, scores_,
                                   kAttentionTile * sizeof(float), dot, [&](int step, int block) {
      const T* const k = head(block).k_step(0, step * kInputs);
      // Only a task's first rows do this, because the other rows read the same memory.
      if (row == 0) bring_tile(k, ahead(block));
      if (!spread_ && is_single_) copy_values(block, step, steps_);
      const bool is_last = last_step_ && step == steps_ - 1;
      return is_last ? last_step_ + block * kBlockTokens * kInputs : k;
    });
  }

  // Adds weighted V to `out`, or writes it there, for `count` tiles of columns from element d on. `weights` has
  // kAttentionTile weights for each row, zeros up to the next multiple of kInputs.
  template <bool ADD, typename Dot>
  void multiply_values(int rows, int row, const void* weights, int tokens, int d, int count, void* out, size_t out_line,
                       Dot&& dot) {
    if (!spread_ && is_single_) clear_values(tokens);
    sums_of_tiles_.shape(rows);
    const size_t line = line_ * kTileLine / kTileColumns;
    const char* const v = reinterpret_cast<const char*>(v_) + (d - columns_.begin) * (kTileLine / kTileColumns);
    sums_of_tiles_.multiply<ADD>(weights, kAttentionTile * sizeof(T), (tokens + kInputs - 1) / kInputs, count, line, out,
                                 out_line, dot, [&](int step, int column) {
      if (row == 0 && !spread_) bring_values(step * kInputs, std::min(tokens, (step + 1) * kInputs), d + column * kTileColumns);
      return v + step * kTileHeight * line + column * kTileLine;
    });
  }

  // The width of rows' weights, rounded up to whole products.
  static int padded(int width) { return (width + kInputs - 1) / kInputs * kInputs; }

 private:
  // Slots after the last token may hold anything from earlier use of the block, even NaN.
  void clear_values(int tokens) {
    constexpr int kStep = Cached<T>::kStep;
    int t = tokens;
    for (; t % kStep; ++t) {
      for (int d = 0; d < line_; ++d) v_[(t / kStep * line_ + d) * kStep + t % kStep] = T{};
    }
    std::fill(v_ + t * line_, v_ + padded(tokens) * line_, T{});
  }

  // Copies one of some parts of a block's V.
  void copy_values(int block, int part, int parts) const {
    const int size = kBlockTokens * values_, lines = size / kInputs;
    const T* const from = head(block).v();
    T* const to = v_ + block * size;
    for (int i = lines * part / parts; i < lines * (part + 1) / parts; ++i) {
      std::memcpy(to + i * kInputs, from + i * kInputs, kTileLine);
    }
  }

  // Prefetches for later what a tile of V from element d on was copied from.
  void bring_values(int token, int end, int d) const {
    for (; token < end; token += kBlockTokens) {
      const int block = token / kBlockTokens;
      for (int slot = 0; slot < kBlockTokens; slot += Cached<T>::kStep) {
        prefetch_later(reinterpret_cast<const char*>(head(block).v_element(slot, d)) + ahead(block));
      }
    }
  }

  static void bring_tile(const T* p, ptrdiff_t distance) {
    const char* const later = reinterpret_cast<const char*>(p) + distance;
    for (int i = 0; i < kTileHeight; ++i) prefetch_later(later + i * kTileLine);
  }

  const bool is_single_;  // all rows are computed at once, and V is copied beside the products with K
  const int steps_;       // products for a head of K
  T* const last_step_;    // K of the last step [blocks, kTileHeight lines], zeros behind its end; null if it is whole
  T* const v_;            // V [kAttentionTile / kStep, line_, kStep]
  const int line_;
  TileSums sums_of_tiles_;
};

class TileProducts : public TileReader<bf16> {
 public:
  TileProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : TileReader(args, rows, scratch), q_(scratch.take<bf16>(size_t(rows.count) * query_size())),
        weights_(scratch.take<bf16>((spread_ ? rows.count : kRows) * kAttentionTile)) {
    for (int r = 0; r < rows.count; ++r) {
      bf16* const q = q_ + size_t(r) * query_size();
      std::memcpy(q, rows.query<bf16>(r), sizeof(bf16) * dim_);
      std::fill(q + dim_, q + query_size(), bf16{});
    }
  }

  void score_blocks(int rows, int row, int blocks) {
    multiply_keys(rows, row, q_ + size_t(row) * query_size(), blocks, dot);
  }

  F adjusted(F x, int, int) const { return x; }

  bf16* begin_row(int index, int row) { return weights(row - index) + index * kAttentionTile; }
  void put_weights(bf16* row, int t, F p) { store(row + t, p); }
  void end_row(const bf16*, int) {}
  void end_weights(int rows, int row, int width) {
    for (int r = 0; width != padded(width) && r < rows; ++r) {
      bf16* const w = weights(row) + r * kAttentionTile;
      std::fill(w + width, w + padded(width), bf16{});
    }
  }

  void sum_rows(int rows, int row, int tokens) {
    float* const sums = sums_ + size_t(row) * values_;
    for (int r = 0; r < rows; ++r) {
      if (rescale_[row + r] == 1.0f) continue;
      const F rescale = set1(rescale_[row + r]);
      for (int d = columns_.begin; d < columns_.end; d += kLanes) {
        store(sums + r * values_ + d, mul(load(sums + r * values_ + d), rescale));
      }
    }
    const int columns = (columns_.end - columns_.begin) / kTileColumns;
    multiply_values<true>(rows, row, weights(row), tokens, columns_.begin, columns, sums + columns_.begin,
                          values_ * sizeof(float), dot);
  }

 private:
  static constexpr auto dot = [](auto c, auto a, auto b) { tdpbf16ps<c, a, b>(); };

  bf16* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  bf16* const q_;        // [rows, query_size]
  bf16* const weights_;  // [kRows, or all rows if V is spread, kAttentionTile]
};

class TileByteProducts : public RoundedRows<TileReader<int8_t>, I> {
 public:
  // Vectors read K and V of a decoding token faster: they need no copy. Integers are the same.
  using ForFewRows = ByteProducts<I>;
  static constexpr int kFewRows = 8;

  TileByteProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : RoundedRows(args, rows, scratch, round_up_to(rows.dim, kInputs)) {
    for (int r = 0; r < rows.count; ++r) {
      int8_t* const q = q_ + size_t(r) * query_size();
      round_query(r, q, kQuad);
      std::fill(q + dim_, q + query_size(), int8_t{});
    }
  }

  void score_blocks(int rows, int row, int blocks) {
    multiply_keys(rows, row, q_ + size_t(row) * query_size(), blocks, [](auto c, auto a, auto b) { tdpbssd<c, a, b>(); });
    for (int r = 0; r < rows; ++r) {
      const F scale = set1(q_scales_[row + r]);
      float* const s = scores(r);
      for (int t = 0; t < blocks * kBlockTokens; t += kLanes) {
        const I dots = load(reinterpret_cast<const uint32_t*>(s + t));
        store(s + t, mul(to_floats(dots), mul(scale, load(k_scales_ + t))));
      }
    }
  }

  void end_weights(int rows, int row, int width) {
    RoundedRows::end_weights(rows, row, width);
    for (int r = 0; width != padded(width) && r < rows; ++r) {
      uint8_t* const w = weights(row) + r * kAttentionTile;
      std::fill(w + width, w + padded(width), uint8_t{});
    }
  }

  void sum_rows(int rows, int row, int tokens) {
    constexpr int kMost = 4 * kTileColumns;  // columns at a time
    alignas(kTileLine) uint32_t added[kRows][kMost];
    for (int d = columns_.begin; d < columns_.end; d += kMost) {
      const int columns = std::min(columns_.end - d, kMost);
      multiply_values<false>(rows, row, weights(row), tokens, d, columns / kTileColumns, added, sizeof added[0],
                             [](auto c, auto a, auto b) { tdpbusd<c, a, b>(); });
      for (int r = 0; r < rows; ++r) {
        const F scale = set1(weight_scales_[row + r]), rescale = set1(rescale_[row + r]);
        float* const sums = sums_ + size_t(row + r) * values_ + d;
        for (int i = 0; i < columns; i += kLanes) {
          store(sums + i, fma(to_floats(load(added[r] + i)), scale, mul(load(sums + i), rescale)));
        }
      }
    }
  }
};

using BFloat16Products = TileProducts;
using Int8Products = TileByteProducts;

}  // namespace tidewheel::TW_ISA
