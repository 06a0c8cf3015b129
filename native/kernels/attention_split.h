// Paged attention with grouped query heads: flash-style online softmax (https://arxiv.org/abs/2205.14135) over
// KV splits and tiles that start at fixed absolute positions. K and V are always read back from the cache. A row's
// arithmetic does not depend on the other rows of its task: tokens that it does not see get weight 0.
#pragma once

#include <algorithm>

#include "kernels/attention_fold.h"
#include "kernels/attention_parts.h"
#include "kernels/attention_positions.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {

// The class of products for K and V of type T. The types' own files define it.
template <typename T>
struct ProductsOf;

// Calls `body` with a null pointer to the class for a task with so many rows.
template <typename T, typename Body>
TW_INLINE void with_products(int rows, Body&& body) {
  using P = typename ProductsOf<T>::Type;
  if constexpr (requires { typename P::ForFewRows; }) {
    if (rows <= P::kFewRows) return body(static_cast<typename P::ForFewRows*>(nullptr));
  }
  body(static_cast<P*>(nullptr));
}

namespace {

constexpr int kSplitTiles = kKvSplit / kAttentionTile;

template <typename T, typename P>
class KvSplit {
 public:
  KvSplit(const AttentionArgs& args, Scratch& scratch)
      : args_(args), rows_(args), products_(args, rows_, scratch), scale_(args.scale * kLoadedUnit<T>),
        adjusts_(P::kAdjusts || args.softcap != 0 || args.alibi_slopes || args.distance_bias || args.position_scores.rows) {}

  // For a task that is one KV split.
  void run_alone(int split, Partial result) {
    products_.end_at((split + 1) * kKvSplit);
    run(split, result);
  }

  void run(int split, Partial result) {
    result_ = result;
    products_.begin_split(result);
    const int end = rows_.end();
    int first = std::max(split * kSplitTiles, rows_.begin(0) / kAttentionTile);
    if (args_.prefix.has_part(split)) {
      result_.copy(rows_.in_prefix(split), rows_.count, rows_.values);
      first = args_.prefix.end / kAttentionTile;
    } else {
      result_.clear(rows_.count, rows_.values);
    }
    for (int tile = first; tile < (split + 1) * kSplitTiles && tile * kAttentionTile < end; ++tile) {
      const int seen = std::min(end - tile * kAttentionTile, kAttentionTile);
      products_.begin_tile(tile, seen);
      const auto weigh = [&](int count, int row, int tokens) { weigh_rows(count, row, tile, tokens); };
      const auto sum = [&](int count, int row, int tokens) { sum_rows(count, row, tokens); };
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
  // Weights that are rounded afterwards, or multiply what was rounded, need no better powers.
  static constexpr int kDegree = Cached<T>::kType == CacheType::kFloat32 ? 5 : 4;

  // Visits all rows, some at a time.
  template <typename Visit>
  void each_rows(int tile, Visit&& visit) {
    for (int row = 0, count; row < rows_.count; row += count) {
      count = P::rows_at_once(rows_.count - row);
      // The tile's tokens that these rows see. Slots after them may hold anything; what is read there is not used.
      const int tokens = std::min(rows_.limit(row + count - 1) - tile * kAttentionTile, kAttentionTile);
      if (tokens > 0) visit(count, row, tokens);
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

  // Adjusts one row's scores before `scale` is applied: what the products adjust, softcap, and positions. What positions
  // add by what tokens contain is a part of the product, so it comes before the softcap.
  F adjusted(F x, int row, int tile, int t) const {
    x = products_.adjusted(x, row, t);
    if (args_.position_scores.rows) {
      const int key = tile * kAttentionTile + t, query = rows_.position(row) - args_.first_position;
      x = fma(position_scores(args_.position_scores, query, key, key - rows_.position(row)), set1(args_.scale / scale_), x);
    }
    if (args_.softcap != 0) {
      const float limit = args_.softcap / scale_;
      x = mul(set1(limit), tanh(mul(x, set1(1.0f / limit))));
    }
    if (args_.alibi_slopes) {
      const int distance = tile * kAttentionTile + t - rows_.position(row);
      const F distances = add(set1(static_cast<float>(distance)), load(kEdges.index));
      x = fma(set1(args_.alibi_slopes[rows_.head(row)] / scale_), min(distances, sub(zero(), distances)), x);
    }
    if (args_.distance_bias) {
      // Lanes before and behind the span read the padding, which repeats its edges.
      const int span = args_.bias_span, distance = tile * kAttentionTile + t - rows_.position(row);
      const float* const biases = args_.distance_bias + size_t(rows_.head(row)) * distance_biases(span);
      x = fma(load(biases + std::clamp(distance, -span - kBiasPadding, span) + span + kBiasPadding), set1(1.0f / scale_), x);
    }
    return x;
  }

  // Turns the scores of a few rows into weights, and computes the factors by which earlier tiles' results shrink.
  // Reductions over a row's lanes are done for all rows before the next step, so that their latencies overlap. There
  // are no branches, because it cannot be predicted where a maximum changes.
  void soften(int rows, int row, int tile, int width) {
    constexpr int kMost = P::kRows, kPadded = (kMost + kLanes - 1) / kLanes * kLanes;
    F parts[kMost];
    float lanes[kPadded] = {}, last[kPadded] = {}, rescale[kPadded], shift[kPadded];
    if (sees_all(rows, row, tile, width)) {
      const float* s = products_.scores(0);
      for (int r = 0; r < rows; ++r, s += kAttentionTile) {
        F peak = set1(-kInfinity);
        for (int t = 0; t < width; t += kLanes) peak = max(peak, load(s + t));
        parts[r] = peak;
      }
    } else {
      for (int r = 0; r < rows; ++r) parts[r] = adjust_row(r, row + r, tile, width);
    }
    hmax_each<kMost>(parts, rows, lanes);
    float* const maximum = result_.maximum + row;
    const F factor = set1(scale_ * kLog2E);  // so that powers of 2 can be used
    copy_some<kMost>(maximum, rows, last);
    for (int r = 0; r < rows; r += kLanes) {
      // exp2 makes 0 of NaN: a row that saw nothing yet, or sees nothing here, has no weights that could count.
      const F most = max(load(last + r), mul(load(lanes + r), factor));
      store(rescale + r, exp2(sub(load(last + r), most)));
      store(shift + r, sub(zero(), most));
      store(last + r, most);
    }
    copy_some<kMost>(last, rows, maximum);
    copy_some<kMost>(rescale, rows, products_.rescale() + row);
    for (int r = 0; r < rows; ++r) {
      const float* const s = products_.scores(r);
      F sum = zero();
      const F below = set1(shift[r]);
      auto weights = products_.begin_row(r, row + r);
      for (int t = 0; t < width; t += kLanes) {
        const F p = exp2<kDegree>(fma(load(s + t), factor, below));
        sum = add(sum, p);
        products_.put_weights(weights, t, p);
      }
      products_.end_row(weights, r);
      parts[r] = sum;
    }
    hsum_each<kMost>(parts, rows, lanes);
    float* const total = result_.total + row;
    copy_some<kMost>(total, rows, last);
    for (int r = 0; r < rows; r += kLanes) store(last + r, add(mul(load(last + r), load(rescale + r)), load(lanes + r)));
    copy_some<kMost>(last, rows, total);
  }

  // Whether no score of these rows is adjusted or masked.
  bool sees_all(int rows, int row, int tile, int width) const {
    const int first = tile * kAttentionTile;
    return !adjusts_ && !args_.tokens && rows_.begin(row + rows - 1) <= first && rows_.limit(row) >= first + width;
  }

  // Adjusts and masks the scores of one row. Returns the largest, in any lane.
  F adjust_row(int index, int row, int tile, int width) {
    float* const s = products_.scores(index);
    const int first = rows_.begin(row) - tile * kAttentionTile, last = rows_.limit(row) - tile * kAttentionTile;
    F peak = set1(-kInfinity);
    for (int t = 0; t < width; t += kLanes) {
      F x = load(s + t);
      if (adjusts_) x = adjusted(x, row, tile, t);
      x = min(x, min(visible_from(first - t), visible_until(last - t)));
      store(s + t, x);
      peak = max(peak, x);
    }
    return peak;
  }

  void weigh_rows(int rows, int row, int tile, int tokens) {
    const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    if constexpr (kAnyRows) {
      products_.score_blocks(rows, row, blocks);
    } else {
      (this->*kVisits.score[rows])(row, blocks);
    }
    soften(rows, row, tile, blocks * kBlockTokens);
    products_.end_weights(rows, row, blocks * kBlockTokens);
  }

  void sum_rows(int rows, int row, int tokens) {
    if constexpr (kAnyRows) {
      products_.sum_rows(rows, row, tokens);
    } else {
      (products_.*kVisits.sum[rows])(row, tokens);
    }
  }

  // Whether the products have one function for any number of rows.
  static constexpr bool kAnyRows = requires(P products) { products.score_blocks(1, 0, 1); };

  // Functions by number of rows, for the numbers that rows_at_once returns.
  struct Visits {
    void (KvSplit::*score[P::kRows + 1])(int row, int blocks) = {};
    void (P::*sum[P::kRows + 1])(int row, int tokens) = {};
    constexpr Visits() {
      if constexpr (!kAnyRows) add(std::make_integer_sequence<int, P::kRows>{});
    }
    template <int... I>
    constexpr void add(std::integer_sequence<int, I...>) {
      (add_rows<I + 1>(), ...);
    }
    template <int ROWS>
    constexpr void add_rows() {
      if constexpr (P::rows_at_once(ROWS) == ROWS) {
        score[ROWS] = &KvSplit::template score_vectors<ROWS>, sum[ROWS] = &P::template sum_rows<ROWS>;
      }
    }
  };
  static const Visits kVisits;

  const AttentionArgs& args_;
  const Rows rows_;
  P products_;
  const float scale_;  // for the dot products with K as it is loaded
  const bool adjusts_;
  Partial result_{nullptr, 0, 0};
};

template <typename T, typename P>
const typename KvSplit<T, P>::Visits KvSplit<T, P>::kVisits{};

}  // namespace

template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  const Partial partial(scratch.take<float>(args.heads.partial_floats(args.num_tokens)), rows.count, rows.values);
  Fold fold(args, scratch);
  with_products<T>(rows.count, [&]<typename P>(P*) {
    KvSplit<T, P> split(args, scratch);
    for (int i = args.split_begin(); i < args.split_end(); ++i) {
      if (args.prefix.has_whole(i)) {
        fold.add(rows.in_prefix(i));
        continue;
      }
      split.run(i, partial);
      fold.add(partial);
    }
  });
  fold.write();
}

template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial) {
  Scratch scratch(args.scratch);
  const Rows rows(args);
  with_products<T>(rows.count, [&]<typename P>(P*) {
    KvSplit<T, P>(args, scratch).run_alone(split, {partial, rows.count, rows.values});
  });
}

}  // namespace tidewheel::TW_ISA
