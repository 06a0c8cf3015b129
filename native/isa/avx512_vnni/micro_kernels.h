// Intel's processors load as many vectors in a cycle as they multiply. Where twelve rows take one vector of columns,
// each dot product loads its input, and the loads take the time. Six rows by two vectors need one load for two
// products. With many rows, integers are multiplied that way: chunk by chunk, both strips of a panel together, expanded
// to bytes in the first-level cache. Each output adds the same numbers in the same order as with few rows.
#pragma once

#include "kernels/blocks.h"
#include "kernels/gemm_tiles.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {

template <typename T>
using FloatRows = InRegisters<FloatTile<T>>;
using Int8ChannelRows = InRegisters<Int8ChannelTile>;

// A chunk of both strips of a panel, expanded, and its products with packed rows: see BlockRows.
template <ChunkTraits T>
class ChunkPair {
 public:
  ChunkPair() {}  // leaves the room for chunks as it is

  Expanded& strip(int s) { return strips_[s]; }

  // Sets `tile` to the products of n packed rows, of which `x` is the first group in this chunk, or adds them.
  void multiply(const char* x, int n, int groups, bool begins, float* tile) const {
    const int first = n > kHeight ? (n + 1) / 2 : n;
    (this->*kByRows[first - 1])(x, n, groups, begins, tile);
    if (first < n) (this->*kByRows[n - first - 1])(x + first * kQuad, n, groups, begins, tile + first * kPanel);
  }

 private:
  static constexpr int kHeight = kTileRows / 2, kParts = T.parts(), kQuads = kGroupQuads / kParts;
  static_assert(kStrips == 2);

  // ROWS rows of a packed tile of n. All that a group has lies in lines of 4 bytes a row.
  template <int ROWS>
  void rows(const char* x, int n, int groups, bool begins, float* tile) const {
    const ptrdiff_t line = n * kQuad, group_size = line * (1 + kParts + kGroupQuads);
    F acc[ROWS][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) acc[r][s] = begins ? zero() : load(tile + r * kPanel + s * kLanes);
    }
    const auto* codes = reinterpret_cast<const uint8_t*>(strips_);
    const auto* scale = reinterpret_cast<const float*>(codes + offsetof(Expanded, scales));
    for (int g = 0; g < groups; ++g, x += group_size) {
      const char* quad = x + (1 + kParts) * line;
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p, scale += kLanes) {
        const auto* correction = reinterpret_cast<const int32_t*>(x + (1 + p) * line);
        I dot[ROWS][kStrips];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) dot[r][0] = dot[r][1] = set1_int(T.shifts ? 0 : correction[r]);
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; ++q) {
          const Quads left = load_quads(codes), right = load_quads(codes + sizeof(Expanded));
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const auto* four = reinterpret_cast<const int8_t*>(quad) + r * kQuad;
            dot[r][0] = dot_quads(dot[r][0], left, four);
            dot[r][1] = dot_quads(dot[r][1], right, four);
          }
          codes += kVectorBytes;
          quad += line;
          asm("" : "+r"(quad));  // otherwise GCC keeps the place of each input in memory, and reads it before the input
        }
#pragma GCC unroll 2
        for (int s = 0; s < kStrips; ++s) {
          const F w = load(scale + s * kStripFloats);
          [[maybe_unused]] F shift;
          if constexpr (T.shifts) shift = load(scale + kShiftFloats + s * kStripFloats);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            acc[r][s] = add_dots(acc[r][s], to_floats(dot[r][s]), w, reinterpret_cast<const float*>(x)[r]);
            if constexpr (T.shifts) {
              acc[r][s] = fma(shift, set1(reinterpret_cast<const float*>(correction)[r]), acc[r][s]);
            }
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) store(tile + r * kPanel + s * kLanes, acc[r][s]);
    }
  }

  // From a scale to the shift beside it, and to what the other strip has in its place.
  static constexpr size_t kShiftFloats = (offsetof(Expanded, shifts) - offsetof(Expanded, scales)) / sizeof(float);
  static constexpr size_t kStripFloats = sizeof(Expanded) / sizeof(float);
  static_assert(offsetof(Expanded, codes) == 0);

  using Multiply = void (ChunkPair::*)(const char*, int, int, bool, float*) const;
  static constexpr Multiply kByRows[] = {&ChunkPair::template rows<1>, &ChunkPair::template rows<2>,
                                         &ChunkPair::template rows<3>, &ChunkPair::template rows<4>,
                                         &ChunkPair::template rows<5>, &ChunkPair::template rows<6>};

  Expanded strips_[kStrips];
};

// `Weights` says how a format's chunks are expanded, and how few rows are multiplied.
template <typename Weights>
class ByChunkPairs {
 public:
  static constexpr int kRows = 8 * kTileRows;

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if (rows <= Weights::kFew) return Weights::multiply_few(format, x, panel, k, rows, tile);
    const size_t strip_size = strip_bytes(format, k), chunk_size = Weights::chunk_size(format);
    const size_t row_size = row_bytes(format, k), part = chunk_size * kTileRows / rows;
    const int groups = row_groups(k);
    const char* chunk = panel;
    for (int g = 0; g < groups; g += kChunkGroups, chunk += chunk_size) {
      const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
      for (int s = 0; s < kStrips; ++s) Weights::expand(format, chunk + s * strip_size, count, pair_.strip(s));
      const char* next = g + kChunkGroups < groups ? chunk + chunk_size : panel + kStrips * strip_size;
      for (int r = 0; r < rows; r += kTileRows, next += part) {
        for (int s = 0; s < kStrips; ++s) prefetch_part(next + s * strip_size, part);
        const int n = rows - r < kTileRows ? rows - r : kTileRows;
        pair_.multiply(x + r * row_size + size_t(g) * n * kGroupBytes, n, count, g == 0, tile + r * kPanel);
      }
    }
  }

 private:
  static constexpr size_t kGroupBytes = sizeof(BlockRows<1, Weights::kTraits.parts()>);

  // To the second level: with the first one as its aim, few rows were slower.
  TW_INLINE void prefetch_part(const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLineBytes) prefetch_later(from + i);
  }

  ChunkPair<Weights::kTraits> pair_;
};

template <ChunkTraits T>
struct BlockWeights {
  static constexpr ChunkTraits kTraits = T;
  static constexpr int kFew = kFewRows;

  TW_INLINE size_t chunk_size(const WeightFormat& format) { return chunk_bytes(format, kChunkGroups); }
  TW_INLINE void expand(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
    expand_chunk(format, chunk, groups, out);
  }
  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    multiply_few_rows<kFewRows, kBlockRun, kQuadZero>(format, x, panel, k, rows, tile);
  }
};

template <bool NIBBLES, bool SHIFTS>
struct GroupWeights {
  static constexpr ChunkTraits kTraits{false, SHIFTS};
  static constexpr int kFew = kTileRows;

  TW_INLINE size_t chunk_size(const WeightFormat& format) {
    return GroupLayout::of(format, kChunkInputs).block_bytes() * kChunkInputs / (2 * format.group);
  }

  TW_INLINE void expand(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
    const GroupLayout layout = GroupLayout::of(format, kChunkInputs);
    const int per_scale = layout.group / kRowGroup;
    for (int i = 0; i < groups; ++i) {
      const char* scales = chunk + layout.scale_at(i / per_scale);
      store(out.scales[i], load(reinterpret_cast<const f16*>(scales)));
      if constexpr (SHIFTS) store(out.shifts[i], load(reinterpret_cast<const f16*>(scales + layout.shift_bytes)));
      const size_t size = layout.value_bytes / per_scale;
      const char* values = chunk + layout.values_at(i / per_scale) + i % per_scale * size;
      uint8_t* codes = out.codes + i * kRowGroup * kLanes;
#pragma GCC unroll 8
      for (int s = 0; s < kGroupQuads; s += NIBBLES ? 2 : 1, values += kVectorBytes) {
        const Bytes v = load_bytes(reinterpret_cast<const uint8_t*>(values));
        store(codes + s * kVectorBytes, NIBBLES ? field<0, 4>(v) : v);
        if constexpr (NIBBLES) store(codes + (s + 1) * kVectorBytes, field<4, 4>(v));
      }
    }
  }

  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    InRegisters<GroupTile<NIBBLES, SHIFTS>>().multiply(format, x, panel, k, rows, tile);
  }
};

template <ChunkTraits T>
using ExpandedRows = ByChunkPairs<BlockWeights<T>>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = ByChunkPairs<GroupWeights<NIBBLES, SHIFTS>>;

}  // namespace tidewheel::TW_ISA
