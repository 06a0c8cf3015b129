// Paged causal attention with grouped query heads: flash-style online softmax (https://arxiv.org/abs/2205.14135) over
// tiles that start at fixed absolute positions. K and V are always read back from the cache. A row's arithmetic does
// not depend on the other rows of its task: what lies beyond its own limit enters with weight exactly 0.
#include <cmath>
#include <limits>

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kTileBlocks = kAttentionTile / kBlockTokens;

template <typename T>
struct Layout {
  static constexpr int kStep = Element<T>::kStep;
  // Offset of (token slot, dimension d) inside one head's K and V of a block.
  static size_t k(int slot, int d) { return size_t(d / kStep) * kBlockTokens * kStep + slot * kStep + d % kStep; }
  static size_t v(int slot, int d, int dim) { return size_t(slot / kStep) * dim * kStep + d * kStep + slot % kStep; }
};

// A contraction of ROWS activations rows with VECTORS vectors of weights, `steps` steps, added to or stored in `out`.
template <typename T, int ROWS, int VECTORS>
TW_INLINE void contract(const typename Element<T>::Activation* x, size_t x_stride, const T* weight, size_t step_stride,
                        int steps, F (&acc)[ROWS][VECTORS]) {
  using E = Element<T>;
  for (int s = 0; s < steps; ++s) {
    typename E::Vector w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = E::load_weights(weight + s * step_stride + v * kLanes * E::kStep);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = E::dot(acc[r][v], w[v], x + r * x_stride + s * E::kStep);
    }
  }
}

template <typename T>
struct Task {
  using A = typename Element<T>::Activation;
  static constexpr int kStep = Element<T>::kStep;

  const AttentionArgs& args;
  const int dim, group, rows;
  A* q;            // [rows, dim]
  float* scores;   // [rows, kAttentionTile]
  A* weights;      // [rows, kAttentionTile]
  float* sums;     // [rows, dim]
  float* maximum;  // [rows]
  float* total;    // [rows]

  explicit Task(const AttentionArgs& a)
      : args(a), dim(a.heads.padded_dim()), group(a.heads.group()), rows(a.num_tokens * group) {
    char* p = static_cast<char*>(a.scratch);
    const auto take = [&p](size_t bytes) {
      char* start = p;
      p += (bytes + 63) / 64 * 64;
      return start;
    };
    q = reinterpret_cast<A*>(take(sizeof(A) * rows * dim));
    scores = reinterpret_cast<float*>(take(sizeof(float) * rows * kAttentionTile));
    weights = reinterpret_cast<A*>(take(sizeof(A) * rows * kAttentionTile));
    sums = reinterpret_cast<float*>(take(sizeof(float) * rows * dim));
    maximum = reinterpret_cast<float*>(take(sizeof(float) * rows));
    total = reinterpret_cast<float*>(take(sizeof(float) * rows));
  }

  const T* head_block(int block) const {
    const size_t offset = size_t(args.block_table[block]) * args.heads.block_elements() +
                          size_t(args.kv_head) * 2 * dim * kBlockTokens;
    return reinterpret_cast<const T*>(args.cache) + offset;
  }

  int position(int row) const { return args.first_position + row / group; }
  int limit(int row) const { return position(row) + 1; }
  int begin(int row) const { return args.window && limit(row) > args.window ? limit(row) - args.window : 0; }

  void gather_queries() {
    const A* source = static_cast<const A*>(args.q);
    for (int r = 0; r < rows; ++r) {
      const A* token = source + (r / group) * args.q_stride;
      std::memcpy(q + size_t(r) * dim, token + (args.kv_head * group + r % group) * dim, sizeof(A) * dim);
    }
  }

  template <int ROWS>
  void score_rows(int row, int tile, int blocks) {
    constexpr int kVectors = kBlockTokens / kLanes;
    for (int b = 0; b < blocks; ++b) {
      const T* k = head_block(tile * kTileBlocks + b);
      F acc[ROWS][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
      }
      contract<T, ROWS, kVectors>(q + size_t(row) * dim, dim, k, kBlockTokens * kStep, dim / kStep, acc);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          store(scores + (row + r) * kAttentionTile + b * kBlockTokens + v * kLanes, acc[r][v]);
        }
      }
    }
  }

  // Scores to weights; rescales what the earlier tiles gave.
  void soften(int row, int tile, int blocks) {
    const int start = tile * kAttentionTile, width = blocks * kBlockTokens;
    float* s = scores + row * kAttentionTile;
    const int first = begin(row) - start, last = limit(row) - start;  // of the tile's tokens, [first, last) count
    for (int t = 0; t < width && t < first; ++t) s[t] = kMinusInfinity;
    for (int t = last > 0 ? last : 0; t < width; ++t) s[t] = kMinusInfinity;
    F peak = set1(kMinusInfinity);
    for (int t = 0; t < width; t += kLanes) {
      const F scaled = mul(load(s + t), set1(args.scale));
      store(s + t, scaled);
      peak = max(peak, scaled);
    }
    const float tile_maximum = hmax(peak);
    A* w = weights + row * kAttentionTile;
    if (tile_maximum == kMinusInfinity) {
      for (int t = 0; t < width; t += kLanes) store_activations<T>(w + t, zero());
      return;
    }
    const float new_maximum = tile_maximum > maximum[row] ? tile_maximum : maximum[row];
    F sum = zero();
    for (int t = 0; t < width; t += kLanes) {
      const F p = exp(sub(load(s + t), set1(new_maximum)));
      store(s + t, p);
    }
    for (int t = 0; t < width && t < first; ++t) s[t] = 0.0f;
    for (int t = last > 0 ? last : 0; t < width; ++t) s[t] = 0.0f;
    for (int t = 0; t < width; t += kLanes) {
      const F p = load(s + t);
      sum = add(sum, p);
      store_activations<T>(w + t, p);
    }
    if (new_maximum != maximum[row]) {
      float rescale[kLanes];
      store(rescale, exp(sub(set1(maximum[row]), set1(new_maximum))));
      const float factor = maximum[row] == kMinusInfinity ? 0.0f : rescale[0];
      total[row] *= factor;
      for (int d = 0; d < dim; d += kLanes) store(sums + row * dim + d, mul(load(sums + row * dim + d), set1(factor)));
      maximum[row] = new_maximum;
    }
    total[row] += hsum(sum);
  }

  template <int ROWS>
  void sum_rows(int row, int tile, int blocks, int tokens) {
    constexpr int kVectors = kTileVectors;
    int d = 0;
    for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) sum_columns<ROWS, kVectors>(row, tile, blocks, tokens, d);
    for (; d < dim; d += kLanes) sum_columns<ROWS, 1>(row, tile, blocks, tokens, d);
  }

  template <int ROWS, int VECTORS>
  void sum_columns(int row, int tile, int blocks, int tokens, int d) {
    F acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = load(sums + (row + r) * dim + d + v * kLanes);
    }
    for (int b = 0; b < blocks; ++b) {
      const T* v = head_block(tile * kTileBlocks + b) + size_t(kBlockTokens) * dim + d * kStep;
      const A* p = weights + row * kAttentionTile + b * kBlockTokens;
      const int left = tokens - b * kBlockTokens;
      const int steps = (left < kBlockTokens ? left : kBlockTokens) / kStep;
      contract<T, ROWS, VECTORS>(p, kAttentionTile, v, size_t(dim) * kStep, steps, acc);
      if constexpr (kStep == 2) {
        if (left < kBlockTokens && left % 2) {
          last_half_pair<ROWS, VECTORS>(p + 2 * steps, v + steps * size_t(dim) * kStep, acc);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(sums + (row + r) * dim + d + v * kLanes, acc[r][v]);
    }
  }

  // The slot after the last token may hold anything, NaN included, from the block's earlier life.
  template <int ROWS, int VECTORS>
  static void last_half_pair(const A* p, const T* v, F (&acc)[ROWS][VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) {
      const auto pairs = drop_odd(Element<T>::load_weights(v + i * kLanes * kStep));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][i] = Element<T>::dot(acc[r][i], pairs, p + r * kAttentionTile);
    }
  }

  template <int ROWS>
  void visit(int row, int tile, int blocks, int tokens) {
    score_rows<ROWS>(row, tile, blocks);
    for (int r = 0; r < ROWS; ++r) soften(row + r, tile, blocks);
    sum_rows<ROWS>(row, tile, blocks, tokens);
  }

  template <int... I>
  void visit_rows(int count, int row, int tile, int blocks, int tokens, std::integer_sequence<int, I...>) {
    using Visit = void (Task::*)(int, int, int, int);
    static constexpr Visit kVisits[] = {&Task::template visit<I + 1>...};
    (this->*kVisits[count - 1])(row, tile, blocks, tokens);
  }

  void run() {
    gather_queries();
    for (int i = 0; i < rows * dim; ++i) sums[i] = 0.0f;
    for (int r = 0; r < rows; ++r) {
      maximum[r] = kMinusInfinity;
      total[r] = 0.0f;
    }
    const int end = limit(rows - 1);
    for (int tile = begin(0) / kAttentionTile; tile * kAttentionTile < end; ++tile) {
      for (int row = 0; row < rows; row += kTileRows) {
        const int count = rows - row < kTileRows ? rows - row : kTileRows;
        // What these rows reach: slots beyond it may hold anything, and nothing read from them is used.
        int tokens = limit(row + count - 1) - tile * kAttentionTile;
        if (tokens <= 0) continue;
        if (tokens > kAttentionTile) tokens = kAttentionTile;
        const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
        visit_rows(count, row, tile, blocks, tokens, std::make_integer_sequence<int, kTileRows>{});
      }
    }
    switch (args.out_type) {
      case DType::kFloat32: return finish<float>();
      case DType::kBFloat16: return finish<bf16>();
      case DType::kFloat16: return finish<f16>();
    }
  }

  template <typename Out>
  void finish() {
    using O = typename Element<Out>::Activation;
    for (int r = 0; r < rows; ++r) {
      const F inverse = set1(1.0f / total[r]);
      const size_t head = args.kv_head * group + r % group;
      O* out = static_cast<O*>(args.out) + (r / group) * args.out_stride + head * args.heads.head_dim;
      float* s = sums + r * dim;
      for (int d = 0; d < dim; d += kLanes) store(s + d, mul(load(s + d), inverse));
      int d = 0;
      for (; d + kLanes <= args.heads.head_dim; d += kLanes) store_activations<Out>(out + d, load(s + d));
      for (; d < args.heads.head_dim; ++d) store_activation<Out>(out + d, s[d]);
    }
  }
};

template <typename T>
void prepare_typed(const PrepareArgs& args) {
  using A = typename Element<T>::Activation;
  const Heads& heads = args.heads;
  const int dim = heads.head_dim, padded = heads.padded_dim();
  const auto normalize = [&](float* x, const float* weight) {
    float squares = 0.0f;
    for (int d = 0; d < dim; ++d) squares += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + args.norm_eps);
    for (int d = 0; d < dim; ++d) x[d] = x[d] * scale * weight[d];
  };
  const auto rotate = [&](float* x) {
    const int half = args.rotary_pairs;
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * args.cos[i] - b * args.sin[i];
      x[i + half] = b * args.cos[i] + a * args.sin[i];
    }
  };
  for (int h = 0; h < heads.num_heads + heads.num_kv_heads; ++h) {
    float* x = args.qkv + h * dim;
    const float* norm_weight = h < heads.num_heads ? args.q_norm : args.k_norm;
    if (norm_weight) normalize(x, norm_weight);
    if (args.cos) rotate(x);
  }
  A* q = static_cast<A*>(args.q);
  for (int h = 0; h < heads.num_heads; ++h) {
    for (int d = 0; d < dim; ++d) store_activation<T>(q + h * padded + d, args.qkv[h * dim + d]);
    for (int d = dim; d < padded; ++d) store_activation<T>(q + h * padded + d, 0.0f);
  }
  for (int h = 0; h < heads.num_kv_heads; ++h) {
    const float* k = args.qkv + (heads.num_heads + h) * dim;
    const float* v = k + heads.num_kv_heads * dim;
    T* k_block = static_cast<T*>(args.block) + size_t(h) * 2 * padded * kBlockTokens;
    T* v_block = k_block + size_t(padded) * kBlockTokens;
    for (int d = 0; d < dim; ++d) {
      k_block[Layout<T>::k(args.slot, d)] = from_float<T>(k[d]);
      v_block[Layout<T>::v(args.slot, d, padded)] = from_float<T>(v[d]);
    }
  }
}

}  // namespace

size_t attention_scratch_bytes(const Heads& heads) {
  const size_t rows = heads.group() > kAttentionRows ? heads.group() : kAttentionRows;
  const size_t dim = heads.padded_dim();
  return rows * (4 * dim + 4 * kAttentionTile + 4 * kAttentionTile + 4 * dim + 8) + 6 * 64;
}

void attention(DType type, const AttentionArgs& args) {
  switch (type) {
    case DType::kFloat32: return Task<float>(args).run();
    case DType::kBFloat16: return Task<bf16>(args).run();
    case DType::kFloat16: return Task<f16>(args).run();
  }
}

void prepare(DType type, const PrepareArgs& args) {
  switch (type) {
    case DType::kFloat32: return prepare_typed<float>(args);
    case DType::kBFloat16: return prepare_typed<bf16>(args);
    case DType::kFloat16: return prepare_typed<f16>(args);
  }
}

}  // namespace tidewheel::TW_ISA
