// Attention's products with bfloat16 K and V, on tile registers. Cached blocks already have the layout that tiles need:
// a line of K holds the same two elements of all 16 tokens, and a line of V holds 16 elements of two tokens. A row is
// summed by whole instructions, in the order of K's elements and of V's blocks, so its result is the same alone and
// among other rows.
#pragma once

#include "kernels/attention_elements.h"
#include "tiles.h"

namespace tidewheel::TW_ISA {

class TileProducts : public ElementReader<bf16> {
 public:
  static constexpr int kRows = kTileHeight;
  static constexpr int rows_at_once(int left) { return std::min(left, kRows); }

  TileProducts(const AttentionArgs& args, const Rows& rows, Scratch& scratch)
      : ElementReader(args, rows, scratch, kRows), q_(rows.queries<bf16>(scratch)),
        weights_(scratch.take<bf16>((spread_ ? rows.count : kRows) * kAttentionTile)),
        line_(spread_ ? kSpreadValues : values_), last_block_(scratch.take<bf16>(kBlockTokens * line_)) {}

  // Writes the dot products of `rows` rows with K of the tile's first `blocks` blocks.
  void score_blocks(int rows, int row, int blocks) {
    tiles_.shape(rows, shapes);
    int block = 0;
    for (; block + kSums <= blocks; block += kSums) score<kSums>(row, block);
    for (; block < blocks; ++block) score<1>(row, block);
  }

  F adjusted(F x, int, int) const { return x; }

  void put_weights(int index, int row, int t, F p) { store(weights(row - index) + index * kAttentionTile + t, p); }
  void end_weights(int, int, int) {}

  void sum_rows(int rows, int row, int tokens) {
    tiles_.shape(rows, shapes);
    if (tokens % kBlockTokens) copy_last_block(tokens);
    constexpr int kMany = kSums * kColumns;
    int d = columns_.begin;
    for (; d + kMany <= columns_.end; d += kMany) sum<kSums>(rows, row, tokens, d);
    for (; d < columns_.end; d += kColumns) sum<1>(rows, row, tokens, d);
  }

 private:
  static constexpr int kSums = 4;  // tiles 0 to 3
  static constexpr int kInputs = kTileLine / int{sizeof(bf16)};    // summed by one product: twice a block's tokens
  static constexpr int kColumns = kTileLine / int{sizeof(float)};  // of one tile of sums
  static_assert(kColumns == kBlockTokens && kInputs == 2 * kBlockTokens);

  // Tiles 4 and 5 hold 32 and 16 inputs of queries or weights. They are multiplied by tiles 6 and 7.
  static TileShapes shapes(int rows) {
    TileShapes s;
    for (const int tile : {0, 1, 2, 3, 4}) s.set(tile, rows, kTileLine);
    s.set(5, rows, kTileLine / 2);
    s.set(6, kTileHeight, kTileLine);
    s.set(7, kTileHeight / 2, kTileLine);
    return s;
  }

  template <int COUNT>
  void score(int row, int first) {
    repeat<COUNT>([&](auto i) { tilezero<i>(); });
    int d = 0;
    for (; d + kInputs <= dim_; d += kInputs) add_scores<COUNT, 4, 6>(row, first, d);
    if (d < dim_) add_scores<COUNT, 5, 7>(row, first, d);
    repeat<COUNT>([&](auto i) { tilestored<i>(scores_ + (first + i) * kBlockTokens, kAttentionTile * sizeof(float)); });
  }

  // Adds the products of Q and K for one tile of elements, from element d on.
  template <int COUNT, int A, int B>
  void add_scores(int row, int first, int d) {
    tileloadd<A>(q_ + size_t(row) * dim_ + d, dim_ * sizeof(bf16));
    repeat<COUNT>([&](auto i) {
      const bf16* const k = head(first + i).k_step(0, d);
      if (row == 0) bring_tile<B>(k, kTileLine, ahead(first + i));
      tileloadd<B>(k, kTileLine);
      tdpbf16ps<i, A, B>();
    });
  }

  template <int COUNT>
  void sum(int rows, int row, int tokens, int d) {
    const bf16* const w = weights(row);
    const size_t line = 2 * line_ * sizeof(bf16);
    repeat<COUNT>([&](auto i) { tilezero<i>(); });
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const bf16* const v = values(t, tokens, d);
      tileloadd<5>(w + t, kAttentionTile * sizeof(bf16));
      repeat<COUNT>([&](auto i) {
        const bf16* const columns = v + i * kColumns * 2;
        if (row == 0 && !spread_) bring_tile<7>(columns, line, ahead(t / kBlockTokens));
        tileloadd<7>(columns, line);
        tdpbf16ps<i, 5, 7>();
      });
    }
    alignas(64) float added[kRows][COUNT * kColumns];
    repeat<COUNT>([&](auto i) { tilestored<i>(added[0] + i * kColumns, sizeof added[0]); });
    for (int r = 0; r < rows; ++r) {
      const F rescale = set1(rescale_[row + r]);
      float* const sums = sums_ + size_t(row + r) * values_ + d;
      repeat<COUNT>([&](auto i) {
        store(sums + i * kColumns, fma(load(sums + i * kColumns), rescale, load(added[r] + i * kColumns)));
      });
    }
  }

  // V of the block that begins with the tile's token t, from element d on.
  const bf16* values(int t, int tokens, int d) const {
    const bf16* const block = t + kBlockTokens > tokens ? last_block_
                              : spread_                 ? spread_ + t * kSpreadValues
                                                        : head(t / kBlockTokens).v();
    return block + (d - (spread_ ? columns_.begin : 0)) * 2;
  }

  // Slots after the last token may hold anything from earlier use of the block, even NaN. In the copy they are zeros.
  void copy_last_block(int tokens) {
    const int count = tokens % kBlockTokens, t = tokens - count, whole = count / 2 * 2 * line_;
    const bf16* const block = spread_ ? spread_ + t * kSpreadValues : head(t / kBlockTokens).v();
    std::copy_n(block, whole, last_block_);
    std::fill(last_block_ + whole, last_block_ + kBlockTokens * line_, bf16{});
    if (count % 2) {
      for (int i = whole; i < whole + 2 * line_; i += 2) last_block_[i] = block[i];
    }
  }

  // Prefetches what a later load into tile TILE will read, from a block `ahead` bytes away. Only a task's first rows do
  // this, because the other rows read the same memory.
  template <int TILE>
  static void bring_tile(const bf16* p, size_t line, ptrdiff_t ahead) {
    const char* const later = reinterpret_cast<const char*>(p) + ahead;
    for (int i = 0; i < (TILE == 6 ? kTileHeight : kTileHeight / 2); ++i) prefetch_later(later + i * line);
  }

  bf16* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  bf16* const q_;           // [rows, dim]
  bf16* const weights_;     // [kRows, or all rows if V is spread, kAttentionTile]
  const int line_;          // V's elements from one line of a block to the next; a line holds two tokens
  bf16* const last_block_;  // [kBlockTokens / 2, line_, 2]
  Tiles tiles_;
};

using BFloat16Products = TileProducts;

}  // namespace tidewheel::TW_ISA
