// Micro-kernels for weights that keep the bits of a quantized file: a chunk of a strip is expanded once for several tiles of
// rows, in the first-level cache.
#pragma once

#include "kernels/blocks.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {

template <ChunkTraits T>
class StripRows {
 public:
  static constexpr int kTiles = 8;
  static constexpr int kRows = kTiles * kTileRows;

  StripRows() {}  // leaves the room for a chunk as it is

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if (rows <= kFewRows) return multiply_few_rows<kFewRows, kBlockRun, kQuadZero>(format, x, panel, k, rows, tile);
    const size_t strip_size = strip_bytes(format, k), chunk_size = chunk_bytes(format, kChunkGroups);
    const size_t row_size = block_row_bytes(format, k), ahead_size = chunk_size * kTileRows / rows;
    const int groups = row_groups(k);
    for (int i = 0; i < rows * kPanel; i += kLanes) store(tile + i, zero());
    for (int strip = 0; strip < kStrips; ++strip) {
      const char* chunk = panel + strip * strip_size;
      for (int g = 0; g < groups; g += kChunkGroups, chunk += chunk_size) {
        const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
        expand_chunk(format, chunk, count, expanded_);
        const char* ahead = chunk + chunk_size;
        for (int r = 0; r < rows; r += kTileRows, ahead += ahead_size) {
          prefetch_lines(ahead, ahead_size);  // a part of the next chunk
          const int n = rows - r < kTileRows ? rows - r : kTileRows;
          by_rows(std::make_integer_sequence<int, kTileRows>{})[n - 1](
              expanded_, x + r * row_size + size_t(g) * n * kGroupBytes, count, tile + r * kPanel + strip * kLanes);
        }
      }
    }
  }

 private:
  static constexpr int kParts = T.parts();
  static constexpr size_t kGroupBytes = sizeof(BlockRows<1, kParts>);

  // Adds to `tile` [ROWS][kPanel] what a strip's chunk gives.
  template <int ROWS>
  static void multiply_chunk(const Expanded& expanded, const char* x, int groups, float* tile) {
    if constexpr (requires { multiply_expanded<T, ROWS>(expanded, x, groups, tile); }) {
      multiply_expanded<T, ROWS>(expanded, x, groups, tile);
    } else {
      multiply_vectors<ROWS>(expanded, x, groups, tile);
    }
  }

  template <int ROWS>
  TW_INLINE void multiply_vectors(const Expanded& expanded, const char* x, int groups, float* tile) {
    const auto* group = reinterpret_cast<const BlockRows<ROWS, kParts>*>(x);
    const uint8_t* codes = expanded.codes;
    F acc[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) acc[r] = load(tile + r * kPanel);
    for (int g = 0; g < groups; ++g, ++group, codes += kRowGroup * kLanes) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        I dot[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) dot[r] = set1_int(T.shifts ? 0 : group->correction[p][r]);
        const auto code = [&](int s) { return load_bytes(codes + s * kVectorBytes); };
        BlockRows<ROWS, kParts>::template multiply_part<T.short_quads>(dot, code, *group, p);
        const F w = load(expanded.scales[g * kParts + p]);
        [[maybe_unused]] F shift;
        if constexpr (T.shifts) shift = load(expanded.shifts[g * kParts + p]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          acc[r] = add_dots(acc[r], small_to_floats(dot[r]), w, group->scale[r]);
          if constexpr (T.shifts) acc[r] = fma(shift, set1(reinterpret_cast<const float*>(group->correction[p])[r]), acc[r]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(tile + r * kPanel, acc[r]);
  }

  using Multiply = void (*)(const Expanded&, const char*, int, float*);
  template <int... I>
  static const Multiply* by_rows(std::integer_sequence<int, I...>) {
    static constexpr Multiply kMultiply[] = {multiply_chunk<I + 1>...};
    return kMultiply;
  }

  Expanded expanded_;
};

}  // namespace tidewheel::TW_ISA
