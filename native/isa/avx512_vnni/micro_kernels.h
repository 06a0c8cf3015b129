// Intel's processors load as many vectors in a cycle as they multiply. Where twelve rows take one vector of columns,
// each dot product loads its input, and the loads take the time. Six rows by two vectors need one load for two
// products. With many rows, integers are multiplied that way: chunk by chunk, both strips of a panel together, expanded
// to bytes in the first-level cache. Each output adds the same numbers in the same order as with few rows.
#pragma once

#include "kernels/gemm_chunks.h"

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

template <ChunkTraits T>
using ExpandedRows = ByChunks<BlockWeights<T>, ChunkPair<T>>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = ByChunks<GroupWeights<NIBBLES, SHIFTS>, ChunkPair<GroupWeights<NIBBLES, SHIFTS>::kTraits>>;

}  // namespace tidewheel::TW_ISA
