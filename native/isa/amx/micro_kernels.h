// Micro-kernels on tile registers. C[rows][16 columns] += A[rows][a run] B[a run][16 columns], where A is a run of a packed
// tile of rows, and B lies in the panel as it is. A sum is that of whole instructions, run after run, at any number of
// rows: AVX-512's own dot products add bfloat16 in another order, so one row goes through tiles as well.
#pragma once

#include <tile_registers.h>  // from the include path: the tests put a model in its place

#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kTileHeight = 16, kTileLine = 64;  // rows, and bytes of a row
constexpr int kColumns = kTileLine / 4;          // of C
static_assert(kColumns == kLanes && 2 * kColumns == kPanel);

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int height, int line) {
    rows[tile] = static_cast<uint8_t>(height);
    bytes[tile] = static_cast<uint16_t>(height ? line : 0);
  }
};

// The tiles of the calling thread: shaped when the number of rows changes, and given back in the end, so that neither a
// change of threads nor a signal has 8 KiB to save between two GEMMs.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) tilerelease();
  }

  // `shapes(rows)` are their TileShapes.
  template <typename Shapes>
  void shape(int rows, Shapes&& shapes) {
    if (rows == rows_) return;
    const TileShapes config = shapes(rows);
    ldtilecfg(&config);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

TW_INLINE I load_dots(const int32_t* p) { return {_mm512_load_si512(p)}; }

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

  // `x` are the runs of the first packed tile, `below` of the second, and `out` is [rows][kPanel] of four bytes.
  void multiply(const char* x, const char* below, int rows, Columns columns, int steps, void* out) {
    tiles_.shape(rows, shapes);
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
  static void run(const char* x, const char* below, int rows, Columns c, int steps, char* out) {
    tilezero<0>();
    tilezero<1>();
    if constexpr (BOTH) {
      tilezero<2>();
      tilezero<3>();
    }
    const int above = BOTH ? kTileHeight : rows;
    for (int s = 0; s < steps; ++s) {
      if constexpr (!BOTH) {  // few rows: the panel comes from memory
        for (int i = 0; i < kTileHeight; ++i) {
          prefetch(c.left + i * c.line + kPrefetchBytes);
          prefetch(c.right + i * c.line + kPrefetchBytes);
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
};

template <typename T>
class FloatRows : public InRegisters<FloatTile<T>> {};

template <>
class FloatRows<bf16> {
  using Product = TwoByTwo<MultiplyPairs>;

 public:
  static constexpr int kRows = Product::kRows;

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

// A packed tile of rows by one strip after the other. A group's dot products go through memory into vectors, where scales
// are applied; meanwhile tiles multiply the next group, in registers of their own: C are 0 and 1, A 4 and 5, B 6 and 7.
template <bool NIBBLES, bool SHIFTS>
class GroupRows {
 public:
  static constexpr int kRows = kTileHeight;

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    tiles_.shape(rows, shapes);
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
    alignas(64) uint8_t bytes[2][kGroupBytes];  // of nibbles
  };

  static TileShapes shapes(int rows) {
    TileShapes s;
    for (const int tile : {0, 1}) s.set(tile, rows, kTileLine);
    for (const int tile : {4, 5}) s.set(tile, rows, kRowGroup);
    for (const int tile : {6, 7}) s.set(tile, kGroupLines, kTileLine);
    return s;
  }

  // As int8: minus 8 where there are no shifts, whose scales go with that.
  TW_INLINE void unpack(const char* nibbles, uint8_t* bytes) {
    const __m512i mask = _mm512_set1_epi8(15), zero_level = _mm512_set1_epi8(SHIFTS ? 0 : kNibbleZero);
#pragma GCC unroll 4
    for (int i = 0; i < kGroupBytes; i += 2 * kTileLine) {
      const __m512i both = _mm512_loadu_si512(nibbles + i / 2);
      const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      _mm512_store_si512(bytes + i, _mm512_sub_epi8(low, zero_level));
      _mm512_store_si512(bytes + i + kTileLine, _mm512_sub_epi8(high, zero_level));
    }
  }

  // The dot products of one group. `TURN` is 0 and 1 by turns.
  template <int TURN>
  TW_INLINE void multiply_group(const char* quads, const char* values, Scratch& scratch) {
    const void* b = values;
    if constexpr (NIBBLES) {
      unpack(values, scratch.bytes[TURN]);
      b = scratch.bytes[TURN];
    }
    tilezero<TURN>();
    tileloadd<6 + TURN>(b, kTileLine);
    tileloadd<4 + TURN>(quads, kRowGroup);
    tdpbssd<TURN, 4 + TURN, 6 + TURN>();
    tilestored<TURN>(scratch.dots[TURN], kTileLine);
  }

  // ROWS are `rows` where they are known, else 0.
  template <int ROWS>
  static void columns(const WeightFormat& format, const char* x, const char* strip, int k, int any_rows, float* out) {
    const int rows = ROWS ? ROWS : any_rows;
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    const int log_per_scale = per_scale / 2;  // of 1, 2 or 4
    const size_t row_group_bytes = size_t(rows) * (kHeadBytes + kRowGroup);
    constexpr int kValueBytes = NIBBLES ? kGroupBytes / 2 : kGroupBytes;
    Scratch scratch;
    const auto start = [&](int g) {
      const char* quads = x + g * row_group_bytes + rows * kHeadBytes;
      const char* values = strip + layout.values_at(g >> log_per_scale) + (g & (per_scale - 1)) * kValueBytes;
      if constexpr (!ROWS) {  // few rows: the panel comes from memory
        for (int i = 0; i < kValueBytes; i += kTileLine) prefetch(values + kPrefetchBytes + i);
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
      const char* scales = strip + layout.scale_at(g >> log_per_scale);
      const F w = load(reinterpret_cast<const f16*>(scales));
      [[maybe_unused]] F shift;
      if constexpr (SHIFTS) shift = load(reinterpret_cast<const f16*>(scales + layout.shift_bytes));
      const auto* head = reinterpret_cast<const float*>(x + g * row_group_bytes);  // scales, then what shifts go with
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const I dot = load_dots(scratch.dots[g % 2] + r * kLanes);
        acc[r] = fma(to_floats(dot), mul(w, set1(head[r])), acc[r]);
        if constexpr (SHIFTS) acc[r] = fma(shift, set1(head[rows + r]), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) store(out + r * kPanel, acc[r]);
  }

  Tiles tiles_;
};

}  // namespace tidewheel::TW_ISA
