// Paged causal attention with grouped query heads: flash-style online softmax (https://arxiv.org/abs/2205.14135) over
// pieces and tiles that start at fixed absolute positions. K and V are always read back from the cache. A row's
// arithmetic does not depend on the other rows of its task: tokens that it does not see get weight 0.
#include <algorithm>
#include <bit>

#include "attention_products.h"
#include "kernels/attention_bytes.h"
#include "kernels/attention_elements.h"
#include "kernels/attention_nibbles.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kPieceTiles = kAttentionPiece / kAttentionTile;

template <typename T>
struct ProductsOf {
  using Type = ElementProducts<T>;
};
template <>
struct ProductsOf<bf16> {
  using Type = BFloat16Products;
};
template <>
struct ProductsOf<int8_t> {
  using Type = std::conditional_t<kDotsBytes, ByteProducts<I>, ElementProducts<int8_t>>;
};
template <>
struct ProductsOf<int4x2> {
  using Type = NibbleProducts;
};

template <typename T>
class Piece {
 public:
  Piece(const AttentionArgs& args, Scratch& scratch)
      : args_(args), rows_(args), products_(args, rows_, scratch), scale_(args.scale * kLoadedUnit<T>),
        adjusts_(P::kAdjusts || args.softcap != 0 || args.alibi_slopes) {}

  void run(int piece, Partial result) {
    result_ = result;
    products_.begin_piece(result);
    const int end = rows_.end();
    int first = std::max(piece * kPieceTiles, rows_.begin(0) / kAttentionTile);
    if (args_.prefix.has_part(piece)) {
      result_.copy(rows_.in_prefix(piece), rows_.count, rows_.values);
      first = args_.prefix.end / kAttentionTile;
    } else {
      result_.clear(rows_.count, rows_.values);
    }
    for (int tile = first; tile < (piece + 1) * kPieceTiles && tile * kAttentionTile < end; ++tile) {
      const int seen = std::min(end - tile * kAttentionTile, kAttentionTile);
      products_.begin_tile(tile, seen);
      const auto weigh = [&](int count, int row, int tokens) { (this->*kVisits.weigh[count])(row, tile, tokens); };
      const auto sum = [&](int count, int row, int tokens) { (products_.*kVisits.sum[count])(row, tokens); };
      if constexpr (P::kSpreads) {
        if (products_.spreads()) {
          each_rows(tile, weigh);
          products_.each_columns(seen, [&] { each_rows(tile, sum); });
          continue;
        }
      }
      each_rows(tile, [&](int count, int row, int tokens) {
        weigh(count, row, tokens);
        sum(count, row, tokens);
      });
    }
  }

 private:
  using P = typename ProductsOf<T>::Type;

  // Some rows of the tile's tokens at a time.
  template <typename Visit>
  void each_rows(int tile, Visit&& visit) {
    for (int row = 0; row < rows_.count; row += P::kRows) {
      const int count = std::min(rows_.count - row, P::kRows);
      // The last token that these rows see. Slots after it may hold anything, and what is read there is not used.
      const int tokens = std::min(rows_.limit(row + count - 1) - tile * kAttentionTile, kAttentionTile);
      if (tokens > 0) visit(count, row, tokens);
    }
  }

  template <int ROWS>
  void score_rows(int row, int blocks) {
    if constexpr (requires { products_.template score_blocks<ROWS>(row, blocks); }) {
      return products_.template score_blocks<ROWS>(row, blocks);
    } else {
      score_vectors<ROWS>(row, blocks);
    }
  }
  template <int ROWS>
  void score_vectors(int row, int blocks) {
    // Whole blocks, or parts of one if there are not enough accumulators.
    constexpr int kMany = vectors_for(ROWS), kFew = std::min(kMany, kBlockVectors);
    const int end = blocks * kBlockVectors;
    int v = 0;
    for (; v + kMany <= end; v += kMany) products_.template score_vectors<ROWS, kMany>(row, v);
    for (; v < end; v += kFew) products_.template score_vectors<ROWS, kFew>(row, v);
  }

  // Adjusts the scores of one row beyond the dot product and the row's limits, before `scale`.
  F adjusted(F x, int row, int tile, int t) const {
    x = products_.adjusted(x, row, t);
    if (args_.softcap != 0) {
      const float limit = args_.softcap / scale_;
      x = mul(set1(limit), tanh(mul(x, set1(1.0f / limit))));
    }
    if (args_.alibi_slopes) {
      const int distance = tile * kAttentionTile + t - rows_.position(row);
      const F distances = add(set1(static_cast<float>(distance)), load(kEdges.index));
      x = fma(set1(args_.alibi_slopes[rows_.head(row)] / scale_), distances, x);
    }
    return x;
  }

  // Turns scores of a few rows into weights, and tells by how much the results of earlier tiles shrink. What waits for
  // all lanes of a row is done for all rows before the next step, so that they wait together. Nothing is branched on:
  // where a maximum changes cannot be predicted.
  template <int ROWS>
  void soften(int row, int tile, int width) {
    constexpr int kPadded = (ROWS + kLanes - 1) / kLanes * kLanes;
    float maximum[ROWS], rescale[kPadded] = {};
    for (int r = 0; r < ROWS; ++r) {
      maximum[r] = std::max(hmax(peak(r, row + r, tile, width)) * (scale_ * kLog2E), result_.maximum[row + r]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float& last = result_.maximum[row + r];
      rescale[r] = last == maximum[r] ? 0.0f : last - maximum[r];
      last = maximum[r];
    }
    for (int r = 0; r < ROWS; r += kLanes) store(rescale + r, exp2(load(rescale + r)));
    std::memcpy(products_.rescale() + row, rescale, ROWS * sizeof(float));
    const F factor = set1(scale_ * kLog2E);  // so that powers of 2 can be used
    for (int r = 0; r < ROWS; ++r) {
      const float* const s = products_.scores(r);
      F sum = zero();
      const F shift = set1(maximum[r] == -kInfinity ? 0.0f : -maximum[r]);  // a row that saw nothing gets weights of 0
      for (int t = 0; t < width; t += kLanes) {
        const F p = exp2(fma(load(s + t), factor, shift));
        sum = add(sum, p);
        products_.put_weights(r, row + r, t, p);
      }
      result_.total[row + r] = result_.total[row + r] * rescale[r] + hsum(sum);
    }
  }

  // The largest score of one row, in any lane, after what the scores are adjusted by.
  F peak(int index, int row, int tile, int width) {
    float* const s = products_.scores(index);
    const int first = rows_.begin(row) - tile * kAttentionTile, last = rows_.limit(row) - tile * kAttentionTile;
    F peak = set1(-kInfinity);
    if (adjusts_ || first > 0 || last < width) {
      for (int t = 0; t < width; t += kLanes) {
        F x = load(s + t);
        if (adjusts_) x = adjusted(x, row, tile, t);
        x = min(x, min(visible_from(first - t), visible_until(last - t)));
        store(s + t, x);
        peak = max(peak, x);
      }
    } else {
      for (int t = 0; t < width; t += kLanes) peak = max(peak, load(s + t));
    }
    return peak;
  }

  template <int ROWS>
  void weigh_rows(int row, int tile, int tokens) {
    const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    score_rows<ROWS>(row, blocks);
    soften<ROWS>(row, tile, blocks * kBlockTokens);
    products_.template end_weights<ROWS>(row, blocks * kBlockTokens);
  }

  // By the number of rows.
  struct Visits {
    void (Piece::*weigh[P::kRows + 1])(int row, int tile, int tokens) = {};
    void (P::*sum[P::kRows + 1])(int row, int tokens) = {};
    constexpr Visits() { add(std::make_integer_sequence<int, P::kRows>{}); }
    template <int... I>
    constexpr void add(std::integer_sequence<int, I...>) {
      ((weigh[I + 1] = &Piece::template weigh_rows<I + 1>, sum[I + 1] = &P::template sum_rows<I + 1>), ...);
    }
  };
  static const Visits kVisits;

  const AttentionArgs& args_;
  const Rows rows_;
  P products_;
  const float scale_;  // of the dot products with K as it is loaded
  const bool adjusts_;
  Partial result_{nullptr, 0, 0};
};

template <typename T>
const typename Piece<T>::Visits Piece<T>::kVisits{};

// Combines pieces one after the other, in ascending order.
class Fold {
 public:
  Fold(const AttentionArgs& args, Scratch& scratch)
      : rows_(args), result_(scratch.take<float>(args.heads.partial_floats(args.num_tokens)), rows_.count, rows_.values) {
    result_.clear(rows_.count, rows_.values);
  }

  void add(const Partial& piece) {
    for (int r = 0; r < rows_.count; ++r) {
      if (piece.maximum[r] == -kInfinity) continue;
      const float maximum = std::max(result_.maximum[r], piece.maximum[r]);
      const float old_factor = exp2(result_.maximum[r] - maximum), factor = exp2(piece.maximum[r] - maximum);
      result_.maximum[r] = maximum;
      result_.total[r] = result_.total[r] * old_factor + piece.total[r] * factor;
      float* sums = result_.sums + size_t(r) * rows_.values;
      const float* more = piece.sums + size_t(r) * rows_.values;
      for (int d = 0; d < rows_.values; d += kLanes) {
        store(sums + d, fma(load(sums + d), set1(old_factor), mul(load(more + d), set1(factor))));
      }
    }
  }

  void write() {
    const AttentionArgs& args = rows_.args;
    const int size = args.heads.values();
    for (int r = 0; r < rows_.count; ++r) {
      const F inverse = set1((args.sinks ? share_with_sink(r) : 1.0f / result_.total[r]) * args.value_scale);
      float* out = args.out + r / rows_.group * args.out_stride + size_t(rows_.head(r)) * size;
      float* sums = result_.sums + size_t(r) * rows_.values;
      for (int d = 0; d < rows_.values; d += kLanes) store(sums + d, mul(load(sums + d), inverse));
      std::memcpy(out, sums, sizeof(float) * size);
    }
  }

 private:
  // What the sums are multiplied with where the softmax has one more score. It enters here, once a row, so that it cannot
  // matter in which pieces the rest was computed.
  float share_with_sink(int row) const {
    const float sink = rows_.args.sinks[rows_.head(row)] * kLog2E, maximum = std::max(result_.maximum[row], sink);
    const float factor = exp2(result_.maximum[row] - maximum);
    return factor / (result_.total[row] * factor + exp2(sink - maximum));
  }

  const Rows rows_;
  Partial result_;
};

}  // namespace

size_t attention_scratch_bytes(const Heads& heads) {
  const int tokens = std::max(1, kAttentionRows / heads.group());
  const size_t rows = size_t(tokens) * heads.group();
  const size_t spread = heads.values_in_keys() ? kAttentionTile * (kSpreadValues + rows) : 0;
  const size_t last_block = kBlockTokens * std::max(heads.padded_values(), kSpreadValues) / 2;
  constexpr int kRows = std::max(kTileRows, BFloat16Products::kRows);
  return sizeof(float) * (rows * heads.padded_dim() + (3 * kRows + 2) * kAttentionTile + 4 * rows +
                          2 * heads.partial_floats(tokens) + spread + last_block) + 14 * 64;
}

void attention(CacheType type, const AttentionArgs& args) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  const Partial partial(scratch.take<float>(args.heads.partial_floats(args.num_tokens)), rows.count, rows.values);
  Fold fold(args, scratch);
  with_cached(type, [&]<typename T>(T*) {
    Piece<T> piece(args, scratch);
    for (int i = args.piece_begin(); i < args.piece_end(); ++i) {
      if (args.prefix.has_whole(i)) {
        fold.add(rows.in_prefix(i));
        continue;
      }
      piece.run(i, partial);
      fold.add(partial);
    }
  });
  fold.write();
}

void attention_piece(CacheType type, const AttentionArgs& args, int piece, float* partial) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  with_cached(type, [&]<typename T>(T*) { Piece<T>(args, scratch).run(piece, {partial, rows.count, rows.values}); });
}

void attention_merge(const AttentionArgs& args, const float* partials) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  const size_t size = args.heads.partial_floats(args.num_tokens);
  Fold fold(args, scratch);
  for (int i = 0; i < args.piece_end() - args.piece_begin(); ++i) {
    const int piece = args.piece_begin() + i;
    fold.add(args.prefix.has_whole(piece) ? rows.in_prefix(piece)
                                          : Partial{const_cast<float*>(partials) + i * size, rows.count, rows.values});
  }
  fold.write();
}

}  // namespace tidewheel::TW_ISA
