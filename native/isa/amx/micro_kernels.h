// Micro-kernels on tile registers. C[rows][16 columns] += A[rows][a run] B[a run][16 columns], where A is a run of a packed
// tile of rows, and B lies in the panel as it is. A sum is that of whole instructions, run after run, at any number of
// rows: AVX-512's own dot products add bfloat16 in another order, so one row goes through tiles as well.
#pragma once

#include <type_traits>

#include "ahead.h"
#include "group_products.h"
#include "kernels/blocks.h"
#include "kernels/gemm_tiles.h"
#include "kernels/table.h"
#include "tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kColumns = kTileLine / 4;  // of C
static_assert(kColumns == kLanes && 2 * kColumns == kPanel);

struct MultiplyPairs {
  template <int C, int A, int B>
  TW_INLINE void dot() {
    tdpbf16ps<C, A, B>();
  }
};

struct MultiplyBytes {
  template <int C, int A, int B>
  TW_INLINE void dot() {
    tdpbssd<C, A, B>();
  }
};

// One or two packed tiles of rows, by both halves of a panel. C are tiles 0 and 1, and 2 and 3 of the rows from the
// seventeenth on; A are 4 and 5, B are 6 and 7.
template <typename Multiply>
class TwoByTwo {
 public:
  static constexpr int kRows = 2 * kTileHeight;

  // Where a step's B begins in the left and in the right half, the bytes from one of its lines to the next, and from one
  // step to the next.
  struct Columns {
    const char *left, *right;
    size_t line, step;
  };

  void bring(const char* from, size_t bytes) { ahead_.bring(from, bytes); }

  // `x` are the runs of the first packed tile, `below` of the second, and `out` is [rows][kPanel] of four bytes.
  void multiply(const char* x, const char* below, int rows, Columns columns, int steps, void* out) {
    tiles_.shape(rows, shapes);
    ahead_.begin(steps);
    if (rows > kTileHeight) {
      run<true>(x, below, rows, columns, steps, static_cast<char*>(out));
    } else {
      run<false>(x, below, rows, columns, steps, static_cast<char*>(out));
    }
  }

  static double peak(int rounds) {
    Tiles tiles;
    tiles.shape(kRows, shapes);
    tilezero<4>(), tilezero<5>(), tilezero<6>(), tilezero<7>();
    tilezero<0>(), tilezero<1>(), tilezero<2>(), tilezero<3>();
    for (int i = 0; i < rounds * kPeakSteps; ++i) {
      Multiply::template dot<0, 4, 6>();
      Multiply::template dot<1, 4, 7>();
      Multiply::template dot<2, 5, 6>();
      Multiply::template dot<3, 5, 7>();
    }
    constexpr int kInputs = __is_same(Multiply, MultiplyPairs) ? 32 : 64;
    return 2.0 * rounds * kPeakSteps * kRows * kPanel * kInputs;
  }

 private:
  static TileShapes shapes(int rows) {
    const int above = rows < kTileHeight ? rows : kTileHeight, below = rows - above;
    TileShapes s;
    for (const int tile : {0, 1, 4}) s.set(tile, above, kTileLine);
    for (const int tile : {2, 3, 5}) s.set(tile, below, kTileLine);
    for (const int tile : {6, 7}) s.set(tile, kTileHeight, kTileLine);
    return s;
  }

  template <bool BOTH>
  void run(const char* x, const char* below, int rows, Columns c, int steps, char* out) {
    tilezero<0>();
    tilezero<1>();
    if constexpr (BOTH) {
      tilezero<2>();
      tilezero<3>();
    }
    const int above = BOTH ? kTileHeight : rows;
    for (int s = 0; s < steps; ++s) {
      if constexpr (BOTH) {
        ahead_.step();
        prefetch_lines(x + kTileHeight * kTileLine, kTileHeight * kTileLine);
        prefetch_lines(below + (rows - kTileHeight) * kTileLine, kTileHeight * kTileLine);
      } else {  // few rows: the panel comes from memory
        for (int i = 0; i < kTileHeight; ++i) {
          prefetch_panel<1>(c.left + i * c.line);
          prefetch_panel<1>(c.right + i * c.line);
        }
      }
      tileloadd<6>(c.left, c.line);
      tileloadd<4>(x, kTileLine);
      Multiply::template dot<0, 4, 6>();
      tileloadd<7>(c.right, c.line);
      Multiply::template dot<1, 4, 7>();
      if constexpr (BOTH) {
        tileloadd<5>(below, kTileLine);
        Multiply::template dot<2, 5, 6>();
        Multiply::template dot<3, 5, 7>();
        below += (rows - kTileHeight) * kTileLine;
      }
      x += above * kTileLine;
      c.left += c.step;
      c.right += c.step;
    }
    constexpr size_t kLine = kPanel * 4;
    tilestored<0>(out, kLine);
    tilestored<1>(out + kTileLine, kLine);
    if constexpr (BOTH) {
      tilestored<2>(out + kTileHeight * kLine, kLine);
      tilestored<3>(out + kTileHeight * kLine + kTileLine, kLine);
    }
  }

  Tiles tiles_;
  Ahead ahead_;
};

template <typename T>
class FloatRows : public InRegisters<FloatTile<T>> {};

template <>
class FloatRows<bf16> {
  using Product = TwoByTwo<MultiplyPairs>;

 public:
  static constexpr int kRows = Product::kRows;

  void bring(const char* from, size_t bytes) { product_.bring(from, bytes); }

  void multiply(const WeightFormat&, const char* x, const char* panel, int k, int rows, float* tile) {
    constexpr size_t kPairs = kPanel * 2 * sizeof(bf16);  // bytes of two inputs of all columns
    const int steps = round_up_to(k, kFloatRun<bf16>) / kFloatRun<bf16>;
    product_.multiply(x, x + size_t(steps) * kTileHeight * kTileLine, rows,
                      {panel, panel + kPairs / 2, kPairs, kPairs * kTileHeight}, steps, tile);
  }

  static double peak(int rounds) { return Product::peak(rounds); }

 private:
  Product product_;
};

class Int8ChannelRows {
  using Product = TwoByTwo<MultiplyBytes>;

 public:
  static constexpr int kRows = Product::kRows;

  void bring(const char* from, size_t bytes) { product_.bring(from, bytes); }

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const size_t inputs = channel_inputs(k), strip = strip_bytes(format, k);
    const int above = rows < kTileHeight ? rows : kTileHeight;
    const char* below = x + kTileHeight * (kHeadBytes + inputs);
    alignas(64) int32_t dots[kRows][kPanel];
    product_.multiply(x + above * kHeadBytes, below + (rows - above) * kHeadBytes, rows,
                      {panel, panel + strip, kTileLine, kTileLine * kTileHeight},
                      static_cast<int>(inputs) / kChannelRun, dots);
    for (int r = 0; r < rows; ++r) {
      const auto* scales = reinterpret_cast<const float*>(r < kTileHeight ? x : below);
      for (int s = 0; s < kStrips; ++s) {
        const F w = load(reinterpret_cast<const float*>(panel + s * strip + inputs * kLanes));
        const F scale = mul(w, set1(scales[r % kTileHeight]));
        store(tile + r * kPanel + s * kLanes, mul(to_floats(load_dots(dots[r] + s * kLanes)), scale));
      }
    }
  }

  static double peak(int rounds) { return Product::peak(rounds); }

 private:
  Product product_;
};

// Weights that keep the bits of a quantized file.
template <ChunkTraits T>
struct BlockChunks {
  using Chunk = ExpandedChunk<BlockChunks, T>;

  static size_t size(const WeightFormat& format) { return chunk_bytes(format, kChunkGroups); }
  static void expand(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
    expand_chunk(format, chunk, groups, out);
  }
  static void few_rows(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    multiply_few_rows<kFewRows, kBlockRun, kQuadZero>(format, x, panel, k, rows, tile);
  }
};
template <ChunkTraits T>
using ExpandedRows = ByChunks<BlockChunks<T>, T>;

// A few rows of kInt4 and kInt8, in vectors: tiles would wait for what vectors and memory have to bring. Both have the same
// integers, and so the same result.
template <bool NIBBLES, bool SHIFTS>
struct FewRows {
  static void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const Multiply kernel = by_rows(std::make_integer_sequence<int, kFewRows>{})[rows - 1];
    for (int s = 0; s < kStrips; ++s) kernel(format, x, panel + s * strip_bytes(format, k), k, tile + s * kLanes);
  }

 private:
  using Multiply = void (*)(const WeightFormat&, const char*, const char*, int, float*);
  template <int... I>
  static const Multiply* by_rows(std::integer_sequence<int, I...>) {
    static constexpr Multiply kMultiply[] = {multiply_strip<I + 1>...};
    return kMultiply;
  }

  template <int ROWS>
  static void multiply_strip(const WeightFormat& format, const char* x, const char* strip, int k, float* tile) {
    const auto* group = reinterpret_cast<const BlockRows<ROWS, 1>*>(x);
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    const auto* weight = reinterpret_cast<const uint8_t*>(strip);
    F acc[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) acc[r] = zero();
    for (int g = 0; g < groups;) {
      const auto* scales = reinterpret_cast<const f16*>(weight);
      prefetch_panel<ROWS>(weight);
      weight += layout.header_bytes;
      for (int half = 0; half < 2 && g < groups; ++half) {
        const F w = load(scales + half * kLanes);
        const int end = g + per_scale < groups ? g + per_scale : groups;
        for (; g < end; ++g, ++group) {
          I dot[ROWS];
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) dot[r] = set1_int(SHIFTS ? 0 : group->correction[0][r]);
#pragma GCC unroll 8
          for (int s = 0; s < kGroupQuads; s += NIBBLES ? 2 : 1, weight += kVectorBytes) {
            prefetch_panel<ROWS>(weight);
            const Bytes codes = load_bytes(weight);
            if constexpr (NIBBLES) {
              BlockRows<ROWS, 1>::multiply(dot, field<0, 4>(codes), *group, s);
              BlockRows<ROWS, 1>::multiply(dot, field<4, 4>(codes), *group, s + 1);
            } else {  // unsigned, as dot products take them
              BlockRows<ROWS, 1>::multiply(dot, sub(codes, kInt8Flip), *group, s);
            }
          }
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            acc[r] = add_dots(acc[r], to_floats(dot[r]), w, group->scale[r]);
            if constexpr (SHIFTS) {
              const F sum = set1(reinterpret_cast<const float*>(group->correction[0])[r]);
              acc[r] = fma(load(scales + (2 + half) * kLanes), sum, acc[r]);
            }
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) store(tile + r * kPanel, acc[r]);
  }
};

template <bool SHIFTS>
constexpr ChunkTraits kNibbleTraits = {.halves = false, .shifts = SHIFTS};

// kInt4.
template <bool SHIFTS>
struct NibbleChunks {
  using Chunk = ExpandedChunk<NibbleChunks, kNibbleTraits<SHIFTS>>;

  static size_t size(const WeightFormat& format) {
    return GroupLayout::of(format, 0).block_bytes() * kChunkInputs / (2 * format.group);
  }

  static void expand(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
    const GroupLayout layout = GroupLayout::of(format, 0);
    const int per_scale = format.group / kRowGroup;
    for (int g = 0; g < groups; ++g) {
      const char* scales = chunk + layout.scale_at(g / per_scale);
      store(out.scales[g], load(reinterpret_cast<const f16*>(scales)));
      if constexpr (SHIFTS) store(out.shifts[g], load(reinterpret_cast<const f16*>(scales + layout.shift_bytes)));
      const auto* nibbles = reinterpret_cast<const uint8_t*>(chunk + layout.values_at(g / per_scale)) +
                            g % per_scale * kRowGroup * kLanes / 2;
      uint8_t* bytes = out.codes + g * kRowGroup * kLanes;
#pragma GCC unroll 4
      for (int j = 0; j < kRowGroup * kLanes / 2; j += kVectorBytes) {
        const Bytes both = load_bytes(nibbles + j), low = field<0, 4>(both), high = field<4, 4>(both);
        store(bytes + 2 * j, SHIFTS ? low : sub(low, kNibbleZero));
        store(bytes + 2 * j + kVectorBytes, SHIFTS ? high : sub(high, kNibbleZero));
      }
    }
  }

  static void few_rows(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    FewRows<true, SHIFTS>::multiply(format, x, panel, k, rows, tile);
  }
};

// A packed tile of rows by one strip after the other. A group's dot products go through memory into vectors, where scales
// are applied; meanwhile tiles multiply the next group, in registers of their own: C are 0 and 1, A 4 and 5, B 6 and 7.
class Int8GroupRows {
 public:
  static constexpr int kRows = kTileHeight;

  void bring(const char* from, size_t bytes) { ahead_.bring(from, bytes); }

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if (rows <= kFewRows) return FewRows<false, false>::multiply(format, x, panel, k, rows, tile);
    tiles_.shape(rows, shapes);
    ahead_.begin(kStrips * row_groups(k));
    for (int s = 0; s < kStrips; ++s) {
      const char* strip = panel + s * strip_bytes(format, k);
      float* out = tile + s * kLanes;
      if (rows == kTileHeight) {  // known to the compiler, all sums stay in registers
        columns<kTileHeight>(format, x, strip, k, rows, out);
      } else {
        columns<0>(format, x, strip, k, rows, out);
      }
    }
  }

 private:
  static constexpr int kGroupLines = kRowGroup / kQuad;
  static constexpr int kGroupBytes = kRowGroup * kLanes;  // of a strip's int8

  struct Scratch {
    alignas(64) int32_t dots[2][kTileHeight * kLanes];
  };

  static TileShapes shapes(int rows) {
    TileShapes s;
    for (const int tile : {0, 1}) s.set(tile, rows, kTileLine);
    for (const int tile : {4, 5}) s.set(tile, rows, kRowGroup);
    for (const int tile : {6, 7}) s.set(tile, kGroupLines, kTileLine);
    return s;
  }

  // The dot products of one group. `TURN` is 0 and 1 by turns.
  template <int TURN>
  TW_INLINE void multiply_group(const char* quads, const char* values, Scratch& scratch) {
    tilezero<TURN>();
    tileloadd<6 + TURN>(values, kTileLine);
    tileloadd<4 + TURN>(quads, kRowGroup);
    tdpbssd<TURN, 4 + TURN, 6 + TURN>();
    tilestored<TURN>(scratch.dots[TURN], kTileLine);
  }

  // ROWS are `rows` where they are known, else 0.
  template <int ROWS>
  void columns(const WeightFormat& format, const char* x, const char* strip, int k, int any_rows, float* out) {
    const int rows = ROWS ? ROWS : any_rows;
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k);
    const size_t row_group_bytes = size_t(rows) * (kHeadBytes + kRowGroup);
    Scratch scratch;
    const auto start = [&](int g) {
      const char* quads = x + g * row_group_bytes + rows * kHeadBytes;
      const char* values = strip + layout.values_at(g);
      if constexpr (ROWS) {
        ahead_.step();
      } else {  // few rows: the panel comes from memory
        for (int i = 0; i < kGroupBytes; i += kTileLine) prefetch_panel<ROWS>(values + i);
      }
      if (g % 2) {
        multiply_group<1>(quads, values, scratch);
      } else {
        multiply_group<0>(quads, values, scratch);
      }
    };
    F acc[kTileHeight];
#pragma GCC unroll 16
    for (int r = 0; r < kTileHeight; ++r) acc[r] = zero();
    start(0);
    for (int g = 0; g < groups; ++g) {
      if (g + 1 < groups) start(g + 1);
      const F w = load(reinterpret_cast<const f16*>(strip + layout.scale_at(g)));
      const auto* head = reinterpret_cast<const float*>(x + g * row_group_bytes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const I dot = load_dots(scratch.dots[g % 2] + r * kLanes);
        acc[r] = fma(to_floats(dot), mul(w, set1(head[r])), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) store(out + r * kPanel, acc[r]);
  }

  Tiles tiles_;
  Ahead ahead_;
};

template <bool SHIFTS>
using NibbleRows = ByChunks<NibbleChunks<SHIFTS>, kNibbleTraits<SHIFTS>>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = std::conditional_t<NIBBLES, NibbleRows<SHIFTS>, Int8GroupRows>;

}  // namespace tidewheel::TW_ISA
