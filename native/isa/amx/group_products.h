// Integers with a scale for each group of inputs, on tile registers: two packed tiles of rows by both strips of a panel.
// The dot products of some parts go through memory into vectors, where scales are applied; meanwhile tiles multiply the
// next parts. An output adds the same numbers in the same order as in vectors.
#pragma once

#include <utility>

#include "ahead.h"
#include "kernels/blocks.h"
#include "kernels/table.h"
#include "tiles.h"

namespace tidewheel::TW_ISA {

TW_INLINE I load_dots(const int32_t* p) { return {_mm512_load_si512(p)}; }

// `Chunk` says where a strip's codes of one part lie, and has its scales: see ExpandedChunk. A part is a group of inputs, or
// one half of it where scales are for halves.
template <ChunkTraits T>
class GroupProducts {
  static constexpr int kParts = T.parts(), kPartBytes = kRowGroup / kParts;
  static constexpr int kStep = 2;  // parts that are scaled together, so that sums are read and written once for them
  using Group = BlockRows<1, kParts>;

 public:
  static constexpr int kRows = 2 * kTileHeight;

  // For packed tiles of this many rows.
  void shape(int height) { tiles_.shape(height, shapes); }

  // What comes of strip `s` with the next `add`.
  void bring(int s, const char* from, size_t bytes) { ahead_[s].bring(from, bytes); }

  // tile [rows][kPanel] += `rows` rows times the chunk: one packed tile, or two whole ones, which lie `tile_bytes` apart.
  // `x` is the first group of the chunk.
  template <typename Chunk>
  void add(const Chunk& chunk, const char* x, size_t tile_bytes, int groups, int rows, float* tile) {
    if (rows > kTileHeight) {
      add_rows<true, kTileHeight>(chunk, x, tile_bytes, groups, rows, tile);
    } else if (rows == kTileHeight) {  // known to the compiler, all sums stay in registers
      add_rows<false, kTileHeight>(chunk, x, tile_bytes, groups, rows, tile);
    } else {
      add_rows<false, 0>(chunk, x, tile_bytes, groups, rows, tile);
    }
  }

 private:
  // Dot products are tiles 0 to 3, by turns. A are 4 and 5, for the first and the second packed tile; B are 6 and 7, for
  // the left and the right strip.
  static TileShapes shapes(int height) {
    TileShapes s;
    for (const int tile : {0, 1, 2, 3}) s.set(tile, height, kTileLine);
    for (const int tile : {4, 5}) s.set(tile, height, kPartBytes);
    for (const int tile : {6, 7}) s.set(tile, kPartBytes / kQuad, kTileLine);
    return s;
  }

  // HEIGHT is that of a packed tile if it is known, else 0.
  template <bool BOTH, int HEIGHT, typename Chunk>
  void add_rows(const Chunk& chunk, const char* x, size_t tile_bytes, int groups, int rows, float* tile) {
    constexpr int kQuarters = BOTH ? 4 : 2, kSlots = kStep * kQuarters;
    const int height = HEIGHT ? HEIGHT : rows, parts = groups * kParts;
    const size_t group_bytes = sizeof(Group) * height;

    // A product: that of quarter SLOT % kQuarters and part SLOT / kQuarters of a step.
    const auto start = [&]<int SLOT>(int first) __attribute__((always_inline)) {
      constexpr int kQuarter = SLOT % kQuarters, kA = 4 + kQuarter / 2, kB = 6 + kQuarter % 2, kC = SLOT % 4;
      const int part = first + SLOT / kQuarters;
      if (part >= parts) return;
      tilezero<kC>();
      if constexpr (kQuarter < 2) tileloadd<kB>(chunk.codes(kQuarter, part), kTileLine);
      if constexpr (kQuarter % 2 == 0) {
        tileloadd<kA>(x + kQuarter / 2 * tile_bytes + part / kParts * group_bytes + (1 + kParts) * sizeof(float) * height +
                          part % kParts * kPartBytes, kRowGroup);
      }
      if constexpr (T.shifts) {
        tdpbsud<kC, kA, kB>();
      } else {
        tdpbssd<kC, kA, kB>();
      }
    };
    const auto keep = [&]<int SLOT>(int first) __attribute__((always_inline)) {
      if (first + SLOT / kQuarters < parts) tilestored<SLOT % 4>(dots_[first / kStep % 2][SLOT], kTileLine);
    };
    // Adds a quarter's dot products of one step.
    const auto scale = [&]<int QUARTER>(int first) __attribute__((always_inline)) {
      float* const out = tile + QUARTER / 2 * kTileHeight * kPanel + QUARTER % 2 * kLanes;
      F acc[kTileHeight];
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) acc[r] = load(out + r * kPanel);
      const int end = first + kStep < parts ? first + kStep : parts;
      for (int part = first; part < end; ++part) {
        // The rows' scales, then what shifts go with.
        const auto* scales = reinterpret_cast<const float*>(x + QUARTER / 2 * tile_bytes + part / kParts * group_bytes);
        const float* sums = scales + (1 + part % kParts) * height;
        const int32_t* dots = dots_[first / kStep % 2][(part - first) * kQuarters + QUARTER];
        const F w = chunk.scale(QUARTER % 2, part);
        [[maybe_unused]] F shift;
        if constexpr (T.shifts) shift = chunk.shift(QUARTER % 2, part);
#pragma GCC unroll 16
        for (int r = 0; r < height; ++r) {
          acc[r] = add_dots(acc[r], to_floats(load_dots(dots + r * kLanes)), w, scales[r]);
          if constexpr (T.shifts) acc[r] = fma(shift, set1(sums[r]), acc[r]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) store(out + r * kPanel, acc[r]);
    };

    // A step's products, with those of `scaled` scaled between them.
    const auto step = [&]<bool SCALES>(int first, int scaled) __attribute__((always_inline)) {
      if constexpr (SCALES) {
        for (Ahead& ahead : ahead_) ahead.step();
      }
      const auto slot = [&]<int SLOT>() __attribute__((always_inline)) {
        if constexpr (SLOT >= kLate) keep.template operator()<SLOT - kLate>(first);
        if constexpr (SLOT < kSlots) start.template operator()<SLOT>(first);
        if constexpr (SCALES && SLOT < kSlots && SLOT % kStep == kStep - 1) scale.template operator()<SLOT / kStep>(scaled);
      };
      [&]<int... SLOT>(std::integer_sequence<int, SLOT...>) __attribute__((always_inline)) {
        (slot.template operator()<SLOT>(), ...);
      }(std::make_integer_sequence<int, kSlots + kLate>{});
    };
    for (Ahead& ahead : ahead_) ahead.begin((parts + kStep - 1) / kStep);
    step.template operator()<false>(0, 0);
    for (int part = 0; part < parts; part += kStep) step.template operator()<true>(part + kStep, part);
  }

  static constexpr int kLate = 2;  // products until the first of them is stored

  alignas(64) int32_t dots_[2][kStep * 4][kTileHeight * kLanes];  // of the step at hand, and of the next
  Tiles tiles_;
  Ahead ahead_[kStrips];
};

// Whole packed tiles of rows, and then what is left, times a panel. Few rows are multiplied in vectors: tiles would wait for
// each part's dot products and codes to get through memory. A `Format` has
//   few_rows(format, x, panel, k, rows, tile) for at most kFewRows,
//   size(format): the bytes of a strip's chunk, and
//   Chunk, of which take(format, left, right, groups) is called for the chunks of both strips.
template <typename Format, ChunkTraits T>
class ByChunks {
 public:
  static constexpr int kRows = 8 * kTileHeight;

  ByChunks() {}  // leaves the room for a chunk as it is

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const int whole = rows / kTileHeight * kTileHeight, rest = rows - whole;
    if (whole) run(format, x, panel, k, whole, tile);
    x += whole * row_bytes(format, k);
    tile += whole * kPanel;
    if (rest > kFewRows) {
      run(format, x, panel, k, rest, tile);
    } else if (rest) {
      Format::few_rows(format, x, panel, k, rest, tile);
    }
  }

 private:
  using Products = GroupProducts<T>;

  void run(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    constexpr size_t kGroupBytes = sizeof(BlockRows<1, T.parts()>);
    const int height = rows < kTileHeight ? rows : kTileHeight, groups = row_groups(k);
    const size_t row_size = row_bytes(format, k), strip_size = strip_bytes(format, k), chunk_size = Format::size(format);
    const size_t brought = chunk_size / ((rows + Products::kRows - 1) / Products::kRows);  // of the next chunk, with each product
    for (int i = 0; i < rows * kPanel; i += kLanes) store(tile + i, zero());
    products_.shape(height);
    for (int g = 0; g < groups; g += kChunkGroups, panel += chunk_size) {
      const int count = groups - g < kChunkGroups ? groups - g : kChunkGroups;
      const char* next = g + kChunkGroups < groups ? panel + chunk_size : panel - g / kChunkGroups * chunk_size + kStrips * strip_size;
      chunk_.take(format, panel, panel + strip_size, count);
      for (int r = 0; r < rows; r += Products::kRows, next += brought) {
        for (int s = 0; s < kStrips; ++s) products_.bring(s, next + s * strip_size, brought);
        const int n = rows - r < Products::kRows ? rows - r : Products::kRows;
        products_.add(chunk_, x + r * row_size + g * kGroupBytes * height, kTileHeight * row_size, count, n, tile + r * kPanel);
      }
    }
  }

  typename Format::Chunk chunk_;
  Products products_;
};

// A chunk whose codes are expanded to bytes in the first-level cache. `Format` has expand(format, a strip's chunk, groups).
template <typename Format, ChunkTraits T>
class ExpandedChunk {
 public:
  void take(const WeightFormat& format, const char* left, const char* right, int groups) {
    Format::expand(format, left, groups, strips_[0]);
    Format::expand(format, right, groups, strips_[1]);
  }
  const void* codes(int s, int part) const { return strips_[s].codes + part * (kRowGroup / T.parts()) * kLanes; }
  F scale(int s, int part) const { return load(strips_[s].scales[part]); }
  F shift(int s, int part) const { return load(strips_[s].shifts[part]); }

 private:
  Expanded strips_[kStrips];
};

}  // namespace tidewheel::TW_ISA
