// Intel's processors load at most as many vectors in a cycle as they multiply. Where twelve rows take one vector of columns,
// each dot product loads its input, and the loads take the time. Two vectors need one load for two products. So
// kInt8Channel has twelve rows by two vectors. Groups need registers for sums of floats, too: with many rows, they are
// multiplied six rows by two vectors, chunk by chunk, both strips of a panel together, and codes of less than a byte
// expanded in the first-level cache. kInt4 has so many vectors with few rows, too: of bytes, memory takes the time there.
// Each output adds the same numbers in the same order as with few rows.
#pragma once

#include "kernels/gemm_chunks.h"

namespace tidewheel::TW_ISA {

template <typename T>
using FloatRows = InRegisters<FloatTile<T>>;

// For few rows that read both strips of a panel at once: a line of this panel's first strip is needed, so the same lines
// of the next panel come from memory, and what follows in this one comes nearer (see prefetch_in_steps). Where the rows
// take two passes, the first one brings the next panel's first strip and the second one its second strip: all in the
// first pass was slower than each strip for itself.
template <int PASS, int PASSES>
TW_INLINE void prefetch_pair(const uint8_t* line, size_t strip_size) {
  if constexpr (PASS == 0) {
    prefetch_later(line + 2 * strip_size);
    prefetch(line + 1024);
    prefetch(line + strip_size + 1024);
  }
  if constexpr (PASS + 1 == PASSES) prefetch_later(line + 3 * strip_size);
}

// kInt8Channel: a row's inputs are loaded once for both strips.
struct Int8ChannelPairTile : Int8ChannelTile {
  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    const size_t strip_size = strip_bytes(format, k);
    const auto* scale = reinterpret_cast<const float*>(x);
    const auto* correction = reinterpret_cast<const int32_t*>(x) + ROWS;
    const auto* quad = reinterpret_cast<const int8_t*>(x) + ROWS * kHeadBytes;
    const auto* weight = reinterpret_cast<const uint8_t*>(panel);
    I dot[ROWS][kStrips];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) dot[r][0] = dot[r][1] = set1_int(correction[r]);
    for (int i = 0; i < channel_inputs(k); i += kQuad, quad += ROWS * kQuad, weight += kVectorBytes) {
      if constexpr (ROWS < kTileRows) {
        prefetch_pair<0, 1>(weight, strip_size);
      } else {
        prefetch_panel<ROWS>(weight);
        prefetch_panel<ROWS>(weight + strip_size);
      }
      const Quads left = load_quads(weight), right = load_quads(weight + strip_size);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        dot[r][0] = settled(dot_quads(dot[r][0], left, quad + r * kQuad));
        dot[r][1] = settled(dot_quads(dot[r][1], right, quad + r * kQuad));
      }
    }
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) {
      const F w = load(reinterpret_cast<const float*>(weight + s * strip_size));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) store(tile + r * kPanel + s * kLanes, mul(to_floats(dot[r][s]), mul(w, set1(scale[r]))));
    }
  }
};
using Int8ChannelRows = InRegisters<Int8ChannelPairTile>;

// A chunk of one strip, expanded to bytes and floats.
struct ExpandedStrip : Expanded {
  static constexpr bool kInPlace = false;
  static constexpr int kBlockGroups = kChunkGroups, kHeaderBytes = 0;
};

// A chunk of one strip of kInt8: its codes stay where they are, in blocks of two groups behind their scales.
struct ByteStrip {
  static constexpr bool kInPlace = true;
  static constexpr int kBlockGroups = 2, kHeaderBytes = kBlockGroups * kLanes * sizeof(f16);
  const uint8_t* codes;
  alignas(64) float scales[kChunkGroups][kLanes];
};

// A chunk of both strips of a panel, and its products with packed rows: see BlockRows.
template <typename Strip, ChunkTraits T>
class ChunkPair {
 public:
  static constexpr int kTiles = 16;

  ChunkPair() {}  // leaves the room for chunks as it is

  Strip& strip(int s) { return strips_[s]; }

  // Sets `tile` to the products of n packed rows, of which `x` is the first group in this chunk, or adds them.
  void multiply(const char* x, int n, int groups, bool begins, float* tile, Ahead ahead) const {
    const int first = n > kHeight ? (n + 1) / 2 : n, steps = first < n ? 2 * groups : groups;
    if (!Strip::kInPlace || ahead.lines <= kLinesAtOnce) {
      ahead.bring(0, ahead.lines);
      ahead.lines = 0;
    }
    ahead.lines = (ahead.lines + steps - 1) / steps;  // for each group
    (this->*kByRows[first - 1])(x, n, groups, begins, tile, ahead);
    if (first == n) return;
    ahead.strip += groups * ahead.lines * kLineBytes;
    (this->*kByRows[n - first - 1])(x + first * kQuad, n, groups, begins, tile + first * kPanel, ahead);
  }

 private:
  static constexpr int kHeight = kTileRows / 2, kParts = T.parts(), kQuads = kGroupQuads / kParts;
  // More lines would wait for each other: they are fetched group by group. Only codes in place have so many, with few rows.
  static constexpr int kLinesAtOnce = 20;
  static_assert(kStrips == 2);

  // ROWS rows of a packed tile of n. All that a group has lies in lines of 4 bytes a row.
  template <int ROWS>
  void rows(const char* x, int n, int groups, bool begins, float* tile, const Ahead& ahead) const {
    const ptrdiff_t line = n * kQuad, group_size = line * (1 + kParts + kGroupQuads);
    F acc[ROWS][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) acc[r][s] = begins ? zero() : load(tile + r * kPanel + s * kLanes);
    }
    const uint8_t* codes = strips_[0].codes;
    const ptrdiff_t other = strips_[1].codes - codes;
    const float* scale = strips_[0].scales[0];
    for (int g = 0; g < groups; ++g, x += group_size) {
      if (g % Strip::kBlockGroups == 0) codes += Strip::kHeaderBytes;
      if constexpr (Strip::kInPlace) ahead.bring(g * ahead.lines, (g + 1) * ahead.lines);
      const char* quad = x + (1 + kParts) * line;
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p, scale += kLanes) {
        const auto* correction = reinterpret_cast<const int32_t*>(x + (1 + p) * line);
        I dot[ROWS][kStrips];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) dot[r][0] = dot[r][1] = set1_int(T.shifts ? 0 : correction[r]);
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; ++q) {
          const Quads left = load_quads(codes), right = load_quads(codes + other);
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
  static constexpr size_t kStripFloats = sizeof(Strip) / sizeof(float);

  using Multiply = void (ChunkPair::*)(const char*, int, int, bool, float*, const Ahead&) const;
  static constexpr Multiply kByRows[] = {&ChunkPair::template rows<1>, &ChunkPair::template rows<2>,
                                         &ChunkPair::template rows<3>, &ChunkPair::template rows<4>,
                                         &ChunkPair::template rows<5>, &ChunkPair::template rows<6>};

  Strip strips_[kStrips];
};

// Up to kTileRows rows of kInt4, as weights are stored.
template <bool SHIFTS>
struct NibblePairTile {
  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    constexpr int kHeight = kTileRows / 2, kFirst = ROWS > kHeight ? (ROWS + 1) / 2 : ROWS;
    some_rows<ROWS, 0, kFirst>(format, x, panel, k, tile);
    if constexpr (kFirst < ROWS) some_rows<ROWS, kFirst, ROWS - kFirst>(format, x, panel, k, tile + kFirst * kPanel);
  }

 private:
  // Rows FIRST to FIRST + ROWS - 1 of a packed tile of N.
  template <int N, int FIRST, int ROWS>
  static void some_rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    const size_t strip_size = strip_bytes(format, k);
    const auto* group = reinterpret_cast<const RowGroup<N>*>(x);
    const auto* weight = reinterpret_cast<const uint8_t*>(panel);
    const auto bring = [&]() __attribute__((always_inline)) {
      prefetch_pair<FIRST ? 1 : 0, ROWS < N ? 2 : 1>(weight, strip_size);
    };
    F acc[ROWS][kStrips];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = zero();
    for (int g = 0; g < groups;) {
      // A block's scales, then its two groups.
      const f16* const scales[kStrips] = {reinterpret_cast<const f16*>(weight),
                                          reinterpret_cast<const f16*>(weight + strip_size)};
      bring();
      weight += layout.header_bytes;
      for (int half = 0; half < 2 && g < groups; ++half) {
        const int end = g + per_scale < groups ? g + per_scale : groups;
        for (; g < end; ++g, ++group) {
          I dot[ROWS][kStrips];
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) dot[r][0] = dot[r][1] = set1_int(SHIFTS ? 0 : group->correction[FIRST + r]);
          const int8_t* quad = group->quads[0][FIRST];
#pragma GCC unroll 4
          for (int q = 0; q < kGroupQuads; q += 2, weight += kVectorBytes) {
            bring();
            Quads left[2], right[2];
            load_nibbles(weight, left[0], left[1]);
            load_nibbles(weight + strip_size, right[0], right[1]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i, quad += N * kQuad) {
#pragma GCC unroll 8
              for (int r = 0; r < ROWS; ++r) {
                dot[r][0] = dot_quads(dot[r][0], left[i], quad + r * kQuad);
                dot[r][1] = dot_quads(dot[r][1], right[i], quad + r * kQuad);
              }
            }
          }
#pragma GCC unroll 2
          for (int s = 0; s < kStrips; ++s) {
            const F w = load(scales[s] + half * kLanes);
            [[maybe_unused]] F shift;
            if constexpr (SHIFTS) shift = load(scales[s] + (2 + half) * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
              acc[r][s] = add_dots(acc[r][s], to_floats(dot[r][s]), w, group->scale[FIRST + r]);
              if constexpr (SHIFTS) {
                acc[r][s] = fma(shift, set1(reinterpret_cast<const float*>(group->correction)[FIRST + r]), acc[r][s]);
              }
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
};

template <bool SHIFTS>
struct NibbleWeights : GroupWeights<true, SHIFTS> {
  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    InRegisters<NibblePairTile<SHIFTS>>().multiply(format, x, panel, k, rows, tile);
  }
};

struct ByteWeights : GroupWeights<false, false> {
  TW_INLINE void expand(const WeightFormat& format, const char* chunk, int groups, ByteStrip& out) {
    const GroupLayout layout = GroupLayout::of(format, kChunkInputs);
    out.codes = reinterpret_cast<const uint8_t*>(chunk);
    for (int g = 0; g < groups; ++g) store(out.scales[g], load(reinterpret_cast<const f16*>(chunk + layout.scale_at(g))));
  }
};

template <typename Weights, typename Strip>
using PairedRows = ByChunks<Weights, ChunkPair<Strip, Weights::kTraits>>;
template <ChunkTraits T>
using ExpandedRows = PairedRows<BlockWeights<T>, ExpandedStrip>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = std::conditional_t<NIBBLES, PairedRows<NibbleWeights<SHIFTS>, ExpandedStrip>,
                                     PairedRows<ByteWeights, ByteStrip>>;

}  // namespace tidewheel::TW_ISA
