// Intel's processors load as many vectors in a cycle as they multiply. Where twelve rows take one vector of columns,
// each dot product loads its input, and the loads take the time. Six rows by two vectors need one load for two
// products. With many rows, int8 and int4 are multiplied that way: chunk by chunk, both strips of a panel together,
// expanded to bytes in the first-level cache. Each output adds the same numbers in the same order as with few rows.
#pragma once

#include "kernels/gemm_blocks.h"
#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

template <typename T>
using FloatRows = InRegisters<FloatTile<T>>;
using Int8ChannelRows = InRegisters<Int8ChannelTile>;

template <bool NIBBLES, bool SHIFTS>
class GroupRows {
  static constexpr int kMinRows = 2 * kTileRows;  // for which a chunk is worth expanding
  static constexpr int kHeight = kTileRows / 2;
  static_assert(kStrips == 2);

 public:
  static constexpr int kRows = 8 * kTileRows;

  GroupRows() {}  // leaves the room for chunks as it is

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const size_t row_size = row_bytes(format, k);
    int r = 0;
    if (rows >= kMinRows) {
      r = rows / kTileRows * kTileRows;
      multiply_tiles(format, x, panel, k, r, tile);
    }
    for (; r < rows; r += kTileRows) {
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      few_rows_.multiply(format, x + r * row_size, panel, k, n, tile + r * kPanel);
    }
  }

 private:
  using Group = RowGroup<kTileRows>;

  void multiply_tiles(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), tiles = rows / kTileRows;
    const size_t chunk_size = layout.block_bytes() * kChunkInputs / (2 * format.group), part = chunk_size / tiles;
    const size_t strip_size = strip_bytes(format, k);
    const char* chunk = panel;
    for (int g = 0; g < groups; g += kChunkGroups, chunk += chunk_size) {
      const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
      const char* next = g + kChunkGroups < groups ? chunk + chunk_size : panel + kStrips * strip_size;
      for (int s = 0; s < kStrips; ++s) expand(layout, chunk + s * strip_size, count, expanded_[s]);
      for (int t = 0; t < tiles; ++t) {
        for (int s = 0; s < kStrips; ++s) prefetch_part(next + s * strip_size + t * part, part);
        const auto* group = reinterpret_cast<const Group*>(x) + t * groups + g;
        for (int r = 0; r < kTileRows; r += kHeight) {
          multiply_chunk(group, r, count, g == 0, tile + (t * kTileRows + r) * kPanel);
        }
      }
    }
  }

  TW_INLINE void prefetch_part(const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLineBytes) prefetch_later(from + i);
  }

  TW_INLINE void expand(const GroupLayout& layout, const char* chunk, int groups, Expanded& out) {
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

  // Rows `first` to `first + kHeight` of a packed tile, `group` its first in this chunk.
  void multiply_chunk(const Group* group, int first, int groups, bool begins, float* tile) const {
    F acc[kHeight][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) acc[r][s] = begins ? zero() : load(tile + r * kPanel + s * kLanes);
    }
    for (int g = 0; g < groups; ++g, ++group) {
      I dot[kHeight][kStrips];
#pragma GCC unroll 8
      for (int r = 0; r < kHeight; ++r) {
        dot[r][0] = dot[r][1] = set1_int(SHIFTS ? 0 : group->correction[first + r]);
      }
#pragma GCC unroll 8
      for (int q = 0; q < kGroupQuads; ++q) {
        const int place = (g * kGroupQuads + q) * kVectorBytes;
        const Quads left = load_quads(expanded_[0].codes + place), right = load_quads(expanded_[1].codes + place);
#pragma GCC unroll 8
        for (int r = 0; r < kHeight; ++r) {
          const int8_t* x = group->quads[q][first + r];
          dot[r][0] = dot_quads(dot[r][0], left, x);
          dot[r][1] = dot_quads(dot[r][1], right, x);
        }
      }
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) {
        const F w = load(expanded_[s].scales[g]);
        [[maybe_unused]] F shift;
        if constexpr (SHIFTS) shift = load(expanded_[s].shifts[g]);
#pragma GCC unroll 8
        for (int r = 0; r < kHeight; ++r) {
          acc[r][s] = add_dots(acc[r][s], to_floats(dot[r][s]), w, group->scale[first + r]);
          if constexpr (SHIFTS) {
            acc[r][s] = fma(shift, set1(reinterpret_cast<const float*>(group->correction)[first + r]), acc[r][s]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) store(tile + r * kPanel + s * kLanes, acc[r][s]);
    }
  }

  InRegisters<GroupTile<NIBBLES, SHIFTS>> few_rows_;
  Expanded expanded_[kStrips];
};

}  // namespace tidewheel::TW_ISA
