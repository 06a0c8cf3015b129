// Micro-kernels for many rows that go through a panel chunk by chunk. All strips of a chunk are expanded in the
// first-level cache, and multiplied by several tiles of rows. Each output adds the same numbers in the same order as with
// few rows.
#pragma once

#include "kernels/blocks.h"
#include "kernels/gemm_tiles.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {

// What is read after a chunk, of each strip: a part of it is brought while a tile of rows is multiplied. It comes to the
// second level of the cache: with the first one as its aim, few rows were slower.
struct Ahead {
  const char* strip;
  size_t strip_size;
  int lines;

  void bring(int begin, int end) const {
    for (int s = 0; s < kStrips; ++s) {
      for (int i = begin; i < end; ++i) prefetch_later(strip + s * strip_size + i * kLineBytes);
    }
  }
};

// `Weights` says how a format's chunks are expanded, and how few rows are multiplied. `Products` has room for a chunk
// of each strip, as the level multiplies it, multiplies it by up to kTileRows packed rows, and brings what is ahead. A
// chunk is expanded once for kTiles tiles of rows.
template <typename Weights, typename Products>
class ByChunks {
 public:
  static constexpr int kRows = Products::kTiles * kTileRows;

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if (rows <= Weights::kFew) return Weights::multiply_few(format, x, panel, k, rows, tile);
    const size_t strip_size = strip_bytes(format, k), chunk_size = Weights::chunk_size(format);
    const size_t row_size = row_bytes(format, k), part = chunk_size * kTileRows / rows;
    const int groups = row_groups(k);
    const char* chunk = panel;
    for (int g = 0; g < groups; g += kChunkGroups, chunk += chunk_size) {
      const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
      for (int s = 0; s < kStrips; ++s) Weights::expand(format, chunk + s * strip_size, count, products_.strip(s));
      const char* next = g + kChunkGroups < groups ? chunk + chunk_size : panel + kStrips * strip_size;
      for (int r = 0; r < rows; r += kTileRows, next += part) {
        const int n = rows - r < kTileRows ? rows - r : kTileRows;
        products_.multiply(x + r * row_size + size_t(g) * n * kGroupBytes, n, count, g == 0, tile + r * kPanel,
                           Ahead{next, strip_size, static_cast<int>((part + kLineBytes - 1) / kLineBytes)});
      }
    }
  }

 private:
  static constexpr size_t kGroupBytes = sizeof(BlockRows<1, Weights::kTraits.parts()>);

  Products products_;
};

// Puts quad q of a chunk into its place.
TW_INLINE void put_quad(Expanded& chunk, int q, Bytes quad) { store(chunk.codes + q * kVectorBytes, quad); }

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

// Up to FEW rows are multiplied as weights are stored, a tile of rows after the other.
template <bool NIBBLES, bool SHIFTS, int FEW = kTileRows>
struct GroupWeights {
  // Nibbles are codes like those of Q4_K.
  static constexpr ChunkTraits kTraits{false, SHIFTS, NIBBLES ? short_quads(kQ4KTraits) : 0};
  static constexpr int kFew = FEW;

  TW_INLINE size_t chunk_size(const WeightFormat& format) {
    return GroupLayout::of(format, kChunkInputs).block_bytes() * kChunkInputs / (2 * format.group);
  }

  template <typename Chunk>
  TW_INLINE void expand(const WeightFormat& format, const char* chunk, int groups, Chunk& out) {
    constexpr size_t kGroupBytes = kRowGroup * kLanes / (NIBBLES ? 2 : 1);
    const GroupLayout layout = GroupLayout::of(format, kChunkInputs);
    const int per_scale = layout.group / kRowGroup;
    for (int i = 0, s = 0; i < groups; ++s) {
      const char* scales = chunk + layout.scale_at(s);
      const char* values = chunk + layout.values_at(s);
      const F scale = load(reinterpret_cast<const f16*>(scales));
      const int end = i + per_scale < groups ? i + per_scale : groups;
      for (; i < end; ++i, values += kGroupBytes) {
        store(out.scales[i], scale);
        if constexpr (SHIFTS) store(out.shifts[i], load(reinterpret_cast<const f16*>(scales + layout.shift_bytes)));
#pragma GCC unroll 8
        for (int q = 0; q < kGroupQuads; q += NIBBLES ? 2 : 1) {
          const Bytes v = load_bytes(reinterpret_cast<const uint8_t*>(values) + (NIBBLES ? q / 2 : q) * kVectorBytes);
          put_quad(out, i * kGroupQuads + q, NIBBLES ? field<0, 4>(v) : v);
          if constexpr (NIBBLES) put_quad(out, i * kGroupQuads + q + 1, field<4, 4>(v));
        }
      }
    }
  }

  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const InRegisters<GroupTile<NIBBLES, SHIFTS>> in_registers;
    const size_t row_size = FEW > kTileRows ? row_bytes(format, k) : 0;
    for (int r = 0; r < rows; r += kTileRows) {
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      in_registers.multiply(format, x + r * row_size, panel, k, n, tile + r * kPanel);
    }
  }
};

}  // namespace tidewheel::TW_ISA
