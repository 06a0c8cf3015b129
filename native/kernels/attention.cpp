// Paged causal attention with grouped query heads: flash-style online softmax (https://arxiv.org/abs/2205.14135) over
// pieces and tiles that start at fixed absolute positions. K and V are always read back from the cache. A row's
// arithmetic does not depend on the other rows of its task: tokens that it does not see get weight 0.
#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cache.h"
#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/spread_values.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr int kTileBlocks = kAttentionTile / kBlockTokens;
constexpr int kBlockVectors = kBlockTokens / kLanes;
constexpr int kPrefetchBlocks = 8;
constexpr int kPieceTiles = kAttentionPiece / kAttentionTile;
constexpr int kSpreadValues = 64;  // elements of V that are taken out of K at a time, so that they stay in the nearest cache

// 2^x for x up to about 0, to 2 ulp; 0 below 2^-126.5, minus infinity included. The polynomial's relative error is
// least over [-1/2, 1/2] among those of its degree that give 1 at 0.
TW_INLINE F exp2(F x) {
  x = max(x, set1(-127.0f));
  const F n = round(x), r = sub(x, n);
  F p = set1(1.3264727e-3f);
  p = fma(p, r, set1(9.6715130e-3f));
  p = fma(p, r, set1(5.5507336e-2f));
  p = fma(p, r, set1(2.4022242e-1f));
  p = fma(p, r, set1(6.9314700e-1f));
  p = fma(p, r, set1(1.0f));
  return mul(p, pow2(n));  // for n = -127 the exponent field of pow2(n) is 0
}

TW_INLINE float exp2(float x) {
  float lanes[kLanes];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

struct Edges {
  float bounds[48];
  float index[16];
  constexpr Edges() : bounds(), index() {
    for (int i = 0; i < 48; ++i) bounds[i] = i / 16 == 1 ? kInfinity : -kInfinity;
    for (int i = 0; i < 16; ++i) index[i] = static_cast<float>(i);
  }
};
constexpr Edges kEdges;

// Bounds for min(): plus infinity keeps a lane's number, minus infinity replaces it, NaN too.
TW_INLINE F visible_from(int lane) { return load(kEdges.bounds + 16 - std::clamp(lane, 0, 16)); }
TW_INLINE F visible_until(int lane) { return load(kEdges.bounds + 32 - std::clamp(lane, 0, 16)); }

// The result over a part of the context, for each row: sums of V weighted by 2^(score - maximum), and the weights'
// total.
struct Partial {
  float* sums;     // [rows, values]
  float* maximum;  // [rows], minus infinity for a row that saw nothing
  float* total;    // [rows]

  Partial(float* data, int rows, int values)
      : sums(data), maximum(data + size_t(rows) * values), total(data + size_t(rows) * (values + 1)) {}

  void clear(int rows, int values) {
    std::fill(sums, sums + size_t(rows) * values, 0.0f);
    std::fill(maximum, maximum + rows, -kInfinity);
    std::fill(total, total + rows, 0.0f);
  }

  void copy(const Partial& other, int rows, int values) {
    std::copy_n(other.sums, size_t(rows) * values, sums);
    std::copy_n(other.maximum, rows, maximum);
    std::copy_n(other.total, rows, total);
  }

  // The rows from `row` on.
  Partial from(int row, int values) const {
    Partial part = *this;
    part.sums += size_t(row) * values, part.maximum += row, part.total += row;
    return part;
  }
};

// The query rows of a task: all heads of a group for the first token, then for the next one, and so on. Tokens of several
// sequences are taken for rows that see the piece as far as it is common to them.
struct Rows {
  const AttentionArgs& args;
  const int dim, values, group, count;

  explicit Rows(const AttentionArgs& a)
      : args(a), dim(a.heads.padded_dim()), values(a.heads.padded_values()), group(a.heads.group()), count(a.num_tokens * group) {}

  int head(int row) const { return args.kv_head * group + row % group; }
  // Its place in q.
  int token(int row) const { return args.tokens ? args.tokens[row / group] : row / group; }
  int position(int row) const { return args.tokens ? args.positions[token(row)] : args.first_position + row / group; }
  // The row sees [begin, limit).
  int limit(int row) const { return position(row) + 1; }
  int begin(int row) const { return args.window ? std::max(limit(row) - args.window, 0) : 0; }
  // What the last row sees here.
  int end() const { return args.tokens ? args.prefix_end : limit(count - 1); }
  // The result over a piece that was computed with a common prefix.
  Partial in_prefix(int piece) const {
    const PrefixResult& prefix = args.prefix;
    const size_t size = args.heads.partial_floats(prefix.num_tokens);
    float* const data = const_cast<float*>(prefix.partials) + (piece - prefix.piece_begin) * size;
    return Partial(data, prefix.num_tokens * group, values).from(prefix.token * group, values);
  }
};

class Scratch {
 public:
  explicit Scratch(void* data) : next_(static_cast<char*>(data)) {}
  template <typename T>
  T* take(size_t count) {
    T* start = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return start;
  }

 private:
  char* next_;
};

// The number of accumulator vectors for each of these rows. All together need no more registers than the GEMM's tile. 4
// are enough to hide the latency of an instruction.
constexpr int vectors_for(int rows) { return std::clamp(kTileRows * kTileVectors / rows, 1, 4); }

// VECTORS vectors of K or V, which move by a stride at each step, and the distance to a later block, to prefetch it.
template <typename T, int VECTORS>
struct Columns {
  const T* start[VECTORS];
  ptrdiff_t ahead[VECTORS];  // bytes
};

// A contraction of ROWS query or probability rows with `columns`, `steps` steps, added to `acc`.
template <typename T, int ROWS, int VECTORS>
TW_INLINE void contract(const typename Cached<T>::Query* x, size_t x_stride, const Columns<T, VECTORS>& columns,
                        size_t step_stride, int steps, F (&acc)[ROWS][VECTORS]) {
  using C = Cached<T>;
  for (int s = 0; s < steps; ++s) {
    typename C::Vector w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const T* p = columns.start[v] + s * step_stride;
      // A block's vectors are contiguous. A cache line has several short ones.
      constexpr size_t kBytes = kLanes * C::kStep * sizeof(T);
      if (v % kBlockVectors * kBytes % 64 == 0) prefetch_later(reinterpret_cast<const char*>(p) + columns.ahead[v]);
      w[v] = C::load_step(p);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = C::dot(acc[r][v], w[v], x + r * x_stride + s * C::kStep);
    }
  }
}

template <typename T>
class Piece {
 public:
  using Q = typename Cached<T>::Query;
  static constexpr int kStep = Cached<T>::kStep;
  static constexpr bool kScaled = kHasScales<T>;
  static constexpr bool kGrouped = Cached<T>::kType == CacheType::kInt4;

  Piece(const AttentionArgs& args, Scratch& scratch)
      : args_(args), rows_(args), dim_(rows_.dim), values_(rows_.values), stored_values_(args.heads.stored_values()),
        block_stride_(args.block_stride),
        scale_(args.scale * kLoadedUnit<T>), adjusts_(kScaled || args.softcap != 0 || args.alibi_slopes),
        q_(scratch.take<Q>(size_t(rows_.count) * dim_)), scores_(scratch.take<float>(kTileRows * kAttentionTile)),
        weights_(scratch.take<Q>((stored_values_ ? kTileRows : rows_.count) * kAttentionTile)),
        k_scales_(scratch.take<float>(kAttentionTile)),
        v_scales_(scratch.take<float>(kAttentionTile)),
        scaled_(kGrouped ? scratch.take<float>(kTileRows * kAttentionTile) : nullptr),
        spread_(stored_values_ ? nullptr : scratch.take<T>(kAttentionTile * kSpreadValues)) {
    const Q* source = static_cast<const Q*>(args.q);
    for (int r = 0; r < rows_.count; ++r) {
      std::memcpy(q_ + size_t(r) * dim_, source + rows_.token(r) * args.q_stride + size_t(rows_.head(r)) * dim_,
                  sizeof(Q) * dim_);
    }
  }

  void run(int piece, Partial result) {
    result_ = result;
    const int end = rows_.end();
    int first = std::max(piece * kPieceTiles, rows_.begin(0) / kAttentionTile);
    if (args_.prefix.has_part(piece)) {
      result_.copy(rows_.in_prefix(piece), rows_.count, values_);
      first = args_.prefix.end / kAttentionTile;
    } else {
      result_.clear(rows_.count, values_);
    }
    for (int tile = first; tile < (piece + 1) * kPieceTiles && tile * kAttentionTile < end; ++tile) {
      const int seen = std::min(end - tile * kAttentionTile, kAttentionTile);
      if constexpr (kScaled) gather_scales(tile, seen);
      if (kGrouped || !spread_) {
        columns_ = {0, values_};
        each_rows(tile, [&](int count, int row, int tokens) {
          (this->*kVisits.weigh[count])(row, tile, tokens);
          (this->*kVisits.sum[count])(row, tile, tokens);
        });
        continue;
      }
      if constexpr (!kGrouped) {
        each_rows(tile, [&](int count, int row, int tokens) { (this->*kVisits.weigh[count])(row, tile, tokens); });
        for (int d = 0; d < values_; d += kSpreadValues) {
          columns_ = {d, std::min(d + kSpreadValues, values_)};
          spread(tile, seen);
          each_rows(tile, [&](int count, int row, int tokens) { (this->*kVisits.sum[count])(row, tile, tokens); });
        }
      }
    }
  }

 private:
  CachedHead<T> head(int block) const {
    const char* start = args_.cache_head + args_.block_table[block] * block_stride_;
    return {reinterpret_cast<T*>(const_cast<char*>(start)), dim_, stored_values_};
  }

  CachedInt4Head int4_head(int block) const {
    const char* start = args_.cache_head + args_.block_table[block] * block_stride_;
    return {reinterpret_cast<uint8_t*>(const_cast<char*>(start)), dim_, stored_values_};
  }

  // Bytes from a block to one that is needed a little later, by this task or the next one. Blocks are scattered in
  // memory, so the hardware cannot predict this; only the block tables tell.
  ptrdiff_t ahead(int block) const {
    const NextBlocks& next = args_.next;
    const int count = (rows_.end() + kBlockTokens - 1) / kBlockTokens;
    const int wanted = block + std::min(count, kPrefetchBlocks), beyond = wanted - count;
    int there = args_.block_table[std::min(wanted, count - 1)];
    ptrdiff_t offset = 0;
    if (beyond >= 0 && next.count) {
      there = next.block_table[std::min(beyond, next.count - 1)];
      offset = next.offset;
    }
    return (ptrdiff_t{there} - args_.block_table[block]) * static_cast<ptrdiff_t>(block_stride_) + offset;
  }

  void gather_scales(int tile, int tokens) {
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const CachedHead<T> h = head(tile * kTileBlocks + t / kBlockTokens);
      std::memcpy(k_scales_ + t, h.k_scales(), kBlockTokens * sizeof(float));
      std::memcpy(v_scales_ + t, spread_ ? h.k_scales() : h.v_scales(), kBlockTokens * sizeof(float));
    }
  }

  // Puts these columns of the tile's V where they can be read as V: once for all rows.
  void spread(int tile, int tokens) {
    for (int t = 0; t < tokens; t += kBlockTokens) {
      spread_values<kSpreadValues>(head(tile * kTileBlocks + t / kBlockTokens), args_.heads.value_start + columns_.begin,
                                   columns_.end - columns_.begin, spread_ + t * kSpreadValues);
    }
  }

  // Some rows of the tile's tokens at a time.
  template <typename Visit>
  void each_rows(int tile, Visit&& visit) {
    for (int row = 0; row < rows_.count; row += kTileRows) {
      const int count = std::min(rows_.count - row, kTileRows);
      // The last token that these rows see. Slots after it may hold anything, and what is read there is not used.
      const int tokens = std::min(rows_.limit(row + count - 1) - tile * kAttentionTile, kAttentionTile);
      if (tokens > 0) visit(count, row, tokens);
    }
  }

  // The weights of these rows, which are kept for all rows of the task only if the values wait for all of them.
  Q* weights(int row) const { return spread_ ? weights_ + row * kAttentionTile : weights_; }

  template <int ROWS>
  void score_rows(int row, int tile, int blocks) {
    // Whole blocks, or parts of one if there are not enough accumulators.
    constexpr int kVectors = vectors_for(ROWS), kBlocks = kVectors / kBlockVectors;
    constexpr int kMany = kBlocks ? kBlocks * kBlockVectors : static_cast<int>(std::bit_floor(unsigned{kVectors}));
    constexpr int kFew = std::min(kMany, kBlockVectors);
    const int end = blocks * kBlockVectors;
    int v = 0;
    for (; v + kMany <= end; v += kMany) score_vectors<ROWS, kMany>(row, tile, v);
    for (; v < end; v += kFew) score_vectors<ROWS, kFew>(row, tile, v);
  }

  // The scores of the tile's tokens from vector `first` on.
  template <int ROWS, int VECTORS>
  void score_vectors(int row, int tile, int first) {
    if constexpr (kGrouped) return score_groups<ROWS, VECTORS>(row, tile, first);
    else score_elements<ROWS, VECTORS>(row, tile, first);
  }

  template <int ROWS, int VECTORS>
  void score_elements(int row, int tile, int first) {
    Columns<T, VECTORS> columns;
    F acc[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int block = tile * kTileBlocks + (first + v) / kBlockVectors;
      columns.start[v] = head(block).k + (first + v) % kBlockVectors * kLanes * kStep;
      columns.ahead[v] = ahead(block);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][v] = zero();
    }
    contract<T, ROWS, VECTORS>(q_ + size_t(row) * dim_, dim_, columns, kBlockTokens * kStep, dim_ / kStep, acc);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(scores_ + r * kAttentionTile + (first + v) * kLanes, acc[r][v]);
    }
  }

  // The same for groups of K that each have a scale.
  template <int ROWS, int VECTORS>
  void score_groups(int row, int tile, int first) {
    float* const scores = scores_ + first * kLanes;
    for (int group = 0; group < cache_groups(dim_); ++group) {
      const uint8_t* start[VECTORS];
      const f16* scales[VECTORS];
      ptrdiff_t later[VECTORS];
      F acc[ROWS][VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int block = tile * kTileBlocks + (first + v) / kBlockVectors, slot = (first + v) % kBlockVectors * kLanes;
        start[v] = int4_head(block).k_pair(slot, group * kCacheGroup);
        scales[v] = int4_head(block).k_scales(group) + slot;
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

  // Adjusts the scores of one row beyond the dot product and the row's limits, before `scale`.
  F adjusted(F x, int row, int tile, int t) const {
    if constexpr (kScaled) x = mul(x, load(k_scales_ + t));
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

  // Turns scores into weights, and rescales the results of earlier tiles.
  void soften(int index, int row, int tile, int width) {
    float* s = scores_ + index * kAttentionTile;
    Q* w = weights(row - index) + index * kAttentionTile;
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
    const F factor = set1(scale_ * kLog2E);  // so that powers of 2 can be used
    const float maximum = std::max(hmax(peak) * (scale_ * kLog2E), result_.maximum[row]);
    if (maximum == -kInfinity) {  // the row has seen nothing yet
      for (int t = 0; t < width; t += kLanes) store(w + t, zero());
      return;
    }
    F sum = zero();
    const F shift = set1(-maximum);
    for (int t = 0; t < width; t += kLanes) {
      F p = exp2(fma(load(s + t), factor, shift));
      sum = add(sum, p);
      // If the weight is 0, the scale may be NaN: from a token that this row does not see, or from earlier use of the
      // block.
      if constexpr (kScaled) p = keep_if(mul(p, load(v_scales_ + t)), p, set1(0x1p-126f));
      if constexpr (kLoadedUnit<T> != 1.0f) p = mul(p, set1(kLoadedUnit<T>));
      store(w + t, p);
    }
    if (maximum != result_.maximum[row]) {
      const float shrink = exp2(result_.maximum[row] - maximum);
      float* sums = result_.sums + size_t(row) * values_;
      for (int d = 0; d < values_; d += kLanes) store(sums + d, mul(load(sums + d), set1(shrink)));
      result_.total[row] *= shrink;
      result_.maximum[row] = maximum;
    }
    result_.total[row] += hsum(sum);
  }

  template <int ROWS>
  void sum_rows(int row, int tile, int tokens) {
    if constexpr (kGrouped) return sum_groups<ROWS>(row, tile, tokens);
    else sum_elements<ROWS>(row, tile, tokens);
  }

  // Sums of V in groups that each have a scale.
  template <int ROWS>
  void sum_groups(int row, int tile, int tokens) {
    constexpr int kHalf = kCacheGroup / 2, kWanted = std::max(vectors_for(ROWS) / 2, 1);
    constexpr int kVectors = std::min(static_cast<int>(std::bit_floor(unsigned{kWanted})), kHalf / kLanes);
    const float* w = weights(row);
    for (int group = 0; group < cache_groups(values_); ++group) {
      for (int t = 0; t < tokens; t += kLanes) {
        const int block = tile * kTileBlocks + t / kBlockTokens;
        const F scales = load(int4_head(block).v_scales(group) + t % kBlockTokens);
        for (int r = 0; r < ROWS; ++r) {
          // If the weight is 0, the scale may be NaN, as in `soften`.
          const F p = load(w + r * kAttentionTile + t);
          store(scaled_ + r * kAttentionTile + t, keep_if(mul(p, scales), p, set1(0x1p-126f)));
        }
      }
      for (int i = 0; i < kHalf; i += kVectors * kLanes) sum_nibbles<ROWS, kVectors>(row, tile, tokens, group, i);
    }
  }

  // Of bytes `first` to first + VECTORS * kLanes - 1 of the group: their lower numbers and their upper ones.
  template <int ROWS, int VECTORS>
  void sum_nibbles(int row, int tile, int tokens, int group, int first) {
    constexpr int kHalf = kCacheGroup / 2;
    const int d = group * kCacheGroup + first;
    const bool has_upper = d + kHalf < values_;
    float* sums = result_.sums + size_t(row) * values_ + d;
    F low[ROWS][VECTORS], high[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        low[r][v] = load(sums + r * values_ + v * kLanes);
        high[r][v] = has_upper ? load(sums + r * values_ + kHalf + v * kLanes) : zero();
      }
    }
    for (int begin = 0; begin < tokens; begin += kBlockTokens) {
      const int block = tile * kTileBlocks + begin / kBlockTokens, count = std::min(tokens - begin, kBlockTokens);
      const uint8_t* bytes = int4_head(block).v_group(0, group) + first;
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

  template <int ROWS>
  void sum_elements(int row, int tile, int tokens) {
    constexpr int kVectors = vectors_for(ROWS);
    const int end = columns_.end;
    int d = columns_.begin;
    for (; d + kVectors * kLanes <= end; d += kVectors * kLanes) sum_columns<ROWS, kVectors>(row, tile, tokens, d);
    for (; d < end; d += kLanes) sum_columns<ROWS, 1>(row, tile, tokens, d);
  }

  template <int ROWS, int VECTORS>
  void sum_columns(int row, int tile, int tokens, int d) {
    float* sums = result_.sums + size_t(row) * values_ + d;
    F acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums + r * values_ + v * kLanes);
    }
    const size_t step_stride = size_t(spread_ ? kSpreadValues : values_) * kStep;
    const Q* w = weights(row);
    for (int t = 0; t < tokens; t += kBlockTokens) {
      const int block = tile * kTileBlocks + t / kBlockTokens;
      const T* v = spread_ ? spread_ + t * kSpreadValues + (d - columns_.begin) * kStep : head(block).v_element(0, d);
      const int steps = std::min(tokens - t, kBlockTokens) / kStep;
      Columns<T, VECTORS> columns;
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) {
        columns.start[i] = v + i * kLanes * kStep;
        columns.ahead[i] = spread_ ? 0 : ahead(block);
      }
      contract<T, ROWS, VECTORS>(w + t, kAttentionTile, columns, step_stride, steps, acc);
      if constexpr (kStep == 2) {
        if (tokens - t < kBlockTokens && tokens % 2) {
          last_half_pair<ROWS, VECTORS>(w + t + 2 * steps, v + steps * step_stride, acc);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(sums + r * values_ + v * kLanes, acc[r][v]);
    }
  }

  // The slot after the last token may hold anything, even NaN, from earlier use of the block.
  template <int ROWS, int VECTORS>
  static void last_half_pair(const Q* p, const T* v, F (&acc)[ROWS][VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) {
      const auto pairs = drop_odd(Cached<T>::load_step(v + i * kLanes * kStep));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][i] = Cached<T>::dot(acc[r][i], pairs, p + r * kAttentionTile);
    }
  }

  template <int ROWS>
  void weigh_rows(int row, int tile, int tokens) {
    const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    score_rows<ROWS>(row, tile, blocks);
    for (int r = 0; r < ROWS; ++r) soften(r, row + r, tile, blocks * kBlockTokens);
  }

  // By the number of rows.
  struct Visits {
    using Visit = void (Piece::*)(int row, int tile, int tokens);
    Visit weigh[kTileRows + 1] = {}, sum[kTileRows + 1] = {};
    constexpr Visits() { add(std::make_integer_sequence<int, kTileRows>{}); }
    template <int... I>
    constexpr void add(std::integer_sequence<int, I...>) {
      ((weigh[I + 1] = &Piece::template weigh_rows<I + 1>, sum[I + 1] = &Piece::template sum_rows<I + 1>), ...);
    }
  };
  static const Visits kVisits;

  const AttentionArgs& args_;
  const Rows rows_;
  const int dim_, values_, stored_values_;
  const size_t block_stride_;
  const float scale_;  // of the dot products with K as it is loaded
  const bool adjusts_;
  Q* const q_;             // [rows, dim]
  float* const scores_;    // [kTileRows, kAttentionTile]
  Q* const weights_;       // [kTileRows, or all rows if V is spread, kAttentionTile]
  float* const k_scales_;  // [kAttentionTile], for int8
  float* const v_scales_;
  float* const scaled_;    // [kTileRows, kAttentionTile] weights times a group's scales of V; null without groups
  T* const spread_;        // [kAttentionTile, kSpreadValues] of V, in blocks as V is cached; null: the cache has V
  struct {
    int begin, end;
  } columns_{0, 0};        // of V, which are summed
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
  return sizeof(float) * (rows * heads.padded_dim() + (3 * kTileRows + 2) * kAttentionTile +
                          2 * heads.partial_floats(tokens) + spread) + 9 * 64;
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
