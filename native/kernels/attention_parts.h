// What attention's products have in common for all types of cached K and V.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "kernels/cache.h"
#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/spread_values.h"

namespace tidewheel::TW_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr int kTileBlocks = kAttentionTile / kBlockTokens;
constexpr int kBlockVectors = kBlockTokens / kLanes;
constexpr int kPrefetchBlocks = 8;

// Added to a float below 2^22, it rounds that to an integer, which the lowest bits of the sum hold.
constexpr float kToInteger = 0x1.8p23f;

// x * 2^n, where `shifted` is n + kToInteger. The result must be a normal number; 1 * 2^-127 gives 0.
TW_INLINE F times_pow2(F x, F shifted) {
  using Bits [[gnu::vector_size(sizeof(F))]] = uint32_t;
  Bits bits, exponent;
  std::memcpy(&bits, &x, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^x for x up to about 0; 0 from -127 down, minus infinity included, and for NaN. With DEGREE 5 the error is 2 ulp, with
// 4 it is 3e-6 of the result. Among the polynomials of their degree that give 1 at 0, these have the smallest relative
// error over [-1/2, 1/2].
template <int DEGREE = 5>
TW_INLINE F exp2(F x) {
  static_assert(DEGREE == 4 || DEGREE == 5);
  x = max(x, set1(-127.0f));
  const F shifted = add(x, set1(kToInteger)), r = sub(x, sub(shifted, set1(kToInteger)));
  F p;
  if constexpr (DEGREE == 5) {
    p = set1(1.3264727e-3f);
    p = fma(p, r, set1(9.6715130e-3f));
    p = fma(p, r, set1(5.5507336e-2f));
    p = fma(p, r, set1(2.4022242e-1f));
    p = fma(p, r, set1(6.9314700e-1f));
  } else {
    p = set1(9.5828535e-3f);
    p = fma(p, r, set1(5.5906428e-2f));
    p = fma(p, r, set1(2.4024099e-1f));
    p = fma(p, r, set1(6.9312419e-1f));
  }
  return times_pow2(fma(p, r, set1(1.0f)), shifted);
}

TW_INLINE float exp2(float x) {
  float lanes[kLanes];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

// The sum or the maximum of the lanes of each of `rows` vectors, of MOST that `x` has: the first one's in the first lane.
// `reduced` has whole vectors of lanes. More than a few rows share their steps where the level offers that, with the bits
// of hsum and hmax.
template <int MOST>
TW_INLINE void hsum_each(F* x, int rows, float* reduced) {
  if constexpr (requires { hsum_rows<MOST>(x); }) {
    if (rows > 4) {
      for (int r = rows; r < MOST; ++r) x[r] = zero();
      return store(reduced, hsum_rows<MOST>(x));
    }
  }
  for (int r = 0; r < rows; ++r) reduced[r] = hsum(x[r]);
}
template <int MOST>
TW_INLINE void hmax_each(F* x, int rows, float* reduced) {
  if constexpr (requires { hmax_rows<MOST>(x); }) {
    if (rows > 4) {
      for (int r = rows; r < MOST; ++r) x[r] = zero();
      return store(reduced, hmax_rows<MOST>(x));
    }
  }
  for (int r = 0; r < rows; ++r) reduced[r] = hmax(x[r]);
}

// Copies `count` numbers, which are most often MOST.
template <int MOST>
TW_INLINE void copy_some(const float* from, int count, float* to) {
  if (count == MOST) {
    std::memcpy(to, from, MOST * sizeof(float));
  } else {
    for (int i = 0; i < count; ++i) to[i] = from[i];
  }
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

// Bounds for min(): plus infinity keeps a lane's number; minus infinity replaces it, even if it is NaN.
TW_INLINE F visible_from(int lane) { return load(kEdges.bounds + 16 - std::clamp(lane, 0, 16)); }
TW_INLINE F visible_until(int lane) { return load(kEdges.bounds + 32 - std::clamp(lane, 0, 16)); }

// The result over a part of the context. For each row: the sums of V weighted by 2^(score - maximum), and the total of
// the weights.
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

// The query rows of a task: all heads of a group for the first token, then for the next one, and so on. If the tokens
// are of several sequences, the rows see only the part of the KV split that these sequences have in common.
struct Rows {
  const AttentionArgs& args;
  const int dim, values, group, count;

  explicit Rows(const AttentionArgs& a)
      : args(a), dim(a.heads.padded_dim()), values(a.heads.padded_values()), group(a.heads.group()), count(a.num_tokens * group) {}

  int head(int row) const { return args.kv_head * group + row % group; }
  // The index of the row's token in q.
  int token(int row) const { return args.tokens ? args.tokens[row / group] : row / group; }
  int position(int row) const { return args.tokens ? args.positions[token(row)] : args.first_position + row / group; }
  // The row sees [begin, limit).
  int limit(int row) const { return args.visible_until ? args.visible_until[row / group] : position(row) + 1; }
  int begin(int row) const { return args.window ? std::max(position(row) + 1 - args.window, 0) : 0; }
  // The end of what the last row sees here.
  int end() const { return args.tokens ? args.prefix_end : args.end(); }
  // The result over a KV split that was computed with a common prefix.
  Partial in_prefix(int split) const {
    const PrefixResult& prefix = args.prefix;
    const size_t size = args.heads.partial_floats(prefix.num_tokens);
    float* const data = const_cast<float*>(prefix.partials) + (split - prefix.split_begin) * size;
    return Partial(data, prefix.num_tokens * group, values).from(prefix.token * group, values);
  }
  // [dim]
  template <typename Q>
  const Q* query(int row) const {
    return static_cast<const Q*>(args.q) + token(row) * args.q_stride + size_t(head(row)) * dim;
  }
  // All queries, side by side: [rows, dim].
  template <typename Q>
  Q* queries(Scratch& scratch) const {
    Q* const all = scratch.take<Q>(size_t(count) * dim);
    for (int r = 0; r < count; ++r) std::memcpy(all + size_t(r) * dim, query<Q>(r), sizeof(Q) * dim);
    return all;
  }
};

// The number of accumulator vectors for each of `rows` rows. Together they need no more registers than the GEMM's tile.
// 4 are enough to hide the latency of an instruction, and a power of 2 leaves no remainder of a head.
constexpr int vectors_for(int rows) {
  return std::min(static_cast<int>(std::bit_floor(unsigned(kTileRows * kTileVectors / rows))), 4);
}

// Calls body(0), body(1), ... with compile-time constants.
template <int COUNT, typename Body>
TW_INLINE void repeat(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, COUNT>{});
}

// How a task's products read the cache, and where they put scores and sums. Each class of products for a type of K and
// V derives from this class, and has:
// - begin_tile(tile, tokens), called before anything else is done with a tile;
// - rows_at_once(left): the number of rows for which weights are computed and V is added at a time;
// - score_vectors<ROWS, VECTORS>(row, first), which writes the dot products of rows with K of the tile's tokens, from
//   vector `first` on; or score_blocks(rows, row, blocks), which does so for the tile's first blocks at once;
// - adjusted(products, row, t): the scores before `scale`, and kAdjusts: false if the scores are the products;
// - begin_row(index, row), called before a row's weights (`index` is its index among the rows whose weights are computed
//   at a time), put_weights(state, t, weights), which takes some of them (`state` is what begin_row returned),
//   end_row(state, index), called after all of them, and end_weights(rows, row, width), after those of all these rows;
// - sum_rows<ROWS>(row, tokens), or with score_blocks sum_rows(rows, row, tokens), which rescales the sums and adds
//   weighted V;
// - ForFewRows and kFewRows, if another class computes the same bits faster for tasks of at most so many rows;
// - kSpreads: whether it supports V that is a part of K. Then each_columns(tokens, sum) calls `sum` for all of V.
class Products {
 public:
  static constexpr int kRows = kTileRows;  // the maximum for rows_at_once
  // Whole tiles, then the remainder: all of it if it is at most 8 rows, otherwise its larger half. Tasks with other
  // numbers of rows are rare, and code for them would take long to compile.
  static constexpr int rows_at_once(int left) { return left >= kRows ? kRows : left <= 8 ? left : (left + 1) / 2; }

  Products(const AttentionArgs& args, const Rows& rows, Scratch& scratch, int height = kRows)
      : args_(args), rows_(rows), dim_(rows.dim), values_(rows.values), stored_values_(args.heads.stored_values()),
        scores_(scratch.take<float>(height * kAttentionTile)), rescale_(scratch.take<float>(rows.count)),
        num_blocks_((rows.end() + kBlockTokens - 1) / kBlockTokens) {}

  // The task ends with the KV split before this token.
  void end_at(int token) { num_blocks_ = std::min(num_blocks_, token / kBlockTokens); }

  // The scores of the row with that index.
  float* scores(int index) const { return scores_ + index * kAttentionTile; }
  // [rows]: the factors for the sums of earlier tiles, applied before this tile's V is added.
  float* rescale() const { return rescale_; }
  void begin_split(const Partial& result) { sums_ = result.sums; }
  // Finds the blocks of the tile's tokens, once for all rows.
  void begin_tile(int tile, int tokens) {
    for (int i = 0; i * kBlockTokens < tokens; ++i) {
      const int block = tile * kTileBlocks + i;
      blocks_[i] = {args_.cache_head + args_.block_table[block] * args_.block_stride, ahead_of(block)};
    }
  }
  // Whether the weights of all rows are kept until V has been taken out of K.
  bool spreads() const { return !stored_values_; }

 protected:
  // This head's K and V in the tile's block `block`, counted from 0.
  const char* cached(int block) const { return blocks_[block].data; }
  // The distance in bytes from there to a block that is needed a little later, by this task or the next one.
  ptrdiff_t ahead(int block) const { return blocks_[block].ahead; }

  const AttentionArgs& args_;
  const Rows& rows_;
  const int dim_, values_, stored_values_;
  float* const scores_;    // [kRows, kAttentionTile]
  float* const rescale_;   // [rows]
  float* sums_ = nullptr;  // [rows, values]

 private:
  int num_blocks_;  // the end of what the task reads

  // Blocks are scattered in memory, so hardware prefetchers cannot predict the next one. Only the block tables know it.
  ptrdiff_t ahead_of(int block) const {
    const NextBlocks& next = args_.next;
    const int wanted = block + std::min(num_blocks_, kPrefetchBlocks), beyond = wanted - num_blocks_;
    int there = args_.block_table[std::min(wanted, num_blocks_ - 1)];
    ptrdiff_t offset = 0;
    if (beyond >= 0 && next.count) {
      there = next.block_table[std::min(beyond, next.count - 1)];
      offset = next.offset;
    }
    return (ptrdiff_t{there} - args_.block_table[block]) * static_cast<ptrdiff_t>(args_.block_stride) + offset;
  }

  struct {
    const char* data;
    ptrdiff_t ahead;
  } blocks_[kTileBlocks];
};

}  // namespace tidewheel::TW_ISA
