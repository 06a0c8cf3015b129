// GEMM by the matrix products of ARMv8.6. A register of inputs holds eight bytes of two rows, or of two columns: 4 bfloat16
// or 8 integers of each. One of sums holds the four outputs where two rows and two columns meet. An instruction goes
// through the inputs of each output in order, so that it does not show in the result which rows were paired.
#pragma once

#include <type_traits>

#include "kernels/gemm_blocks.h"
#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kUnitBytes = 8;

// Rows r and r + 1 of a tile of ROWS. What stands in for the row behind the last is computed and dropped.
template <int ROWS>
TW_INLINE uint8x16_t load_row_pair(const char* rows, int r) {
  const auto* pair = reinterpret_cast<const uint8_t*>(rows) + r * kUnitBytes;
  return r + 1 < ROWS ? vld1q_u8(pair) : vcombine_u8(vld1_u8(pair), vdup_n_u8(0));
}

// A number of each row, and for every row: a, b, a, b.
template <int ROWS>
TW_INLINE float32x4_t spread_rows(const void* numbers, int r) {
  const auto* pair = static_cast<const float*>(numbers) + r;
  return r + 1 < ROWS ? vreinterpretq_f32_u64(vld1q_dup_u64(reinterpret_cast<const uint64_t*>(pair))) : vdupq_n_f32(*pair);
}

// A number of each column: a, a, b, b and c, c, d, d.
struct ColumnPairs {
  float32x4_t v[2];
  TW_INLINE ColumnPairs of(F columns) { return {vzip1q_f32(columns.v, columns.v), vzip2q_f32(columns.v, columns.v)}; }
};

struct BFloat16MatrixTile {
  static double peak(int rounds) {
    alignas(64) const bf16 weights[8] = {}, inputs[8] = {};
    const bf16 *w = weights, *x = inputs;
    float32x4_t acc[kPeakSums];
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) acc[c] = vdupq_n_f32(static_cast<float>(c));  // else all sums are one
    for (int i = 0; i < rounds * kPeakSteps; ++i) {
      const bfloat16x8_t columns = load_pairs(w).v, rows = load_pairs(x).v;
#pragma GCC unroll 32
      for (int c = 0; c < kPeakSums; ++c) acc[c] = vbfmmlaq_f32(acc[c], rows, columns);
      asm volatile("" : "+r"(w), "+r"(x) : : "memory");
    }
    F sum = zero();
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) sum = add(sum, {acc[c]});
    return 2.0 * rounds * kPeakSteps * kPeakSums * 2 * 2 * kFloatUnit<bf16> + kPeakTrace * hsum(sum);
  }

  template <int ROWS>
  static void rows(const WeightFormat&, const char* x, const char* panel, int k, float* tile) {
    constexpr int kColumns = kTileVectors * kLanes;
    const int steps = round_up_to(k, kFloatRun<bf16>) / kFloatUnit<bf16>;
    for (int column = 0; column < kPanel; column += kColumns) {
      columns<ROWS, kColumns>(x, panel + column * kUnitBytes, steps, tile + column);
    }
  }

  template <int ROWS, int COLUMNS>
  TW_INLINE void columns(const char* x, const char* weight, int steps, float* tile) {
    constexpr int kRowPairs = (ROWS + 1) / 2, kColumnPairs = COLUMNS / 2;
    float32x4_t acc[kRowPairs][kColumnPairs];
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumnPairs; ++c) acc[r][c] = vdupq_n_f32(0.0f);
    }
    for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 2
      for (int i = 0; i < COLUMNS * kUnitBytes; i += 64) prefetch_panel<ROWS>(weight + i);
      bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 8
      for (int r = 0; r < kRowPairs; ++r) rows[r] = vreinterpretq_bf16_u8(load_row_pair<ROWS>(x, 2 * r));
#pragma GCC unroll 8
      for (int c = 0; c < kColumnPairs; ++c) {
        const bfloat16x8_t w = load_pairs(reinterpret_cast<const bf16*>(weight) + c * 8).v;
#pragma GCC unroll 8
        for (int r = 0; r < kRowPairs; ++r) acc[r][c] = vbfmmlaq_f32(acc[r][c], rows[r], w);
      }
      weight += kPanel * kUnitBytes;
      x += ROWS * kUnitBytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumnPairs; ++c) {
        const float32x2_t pair = r % 2 ? vget_high_f32(acc[r / 2][c]) : vget_low_f32(acc[r / 2][c]);
        vst1_f32(tile + r * kPanel + 2 * c, pair);
      }
    }
  }
};

// An integer of 22 bits plus kMagicBits is the float kMagic plus that integer. Sums that begin with kMagicBits become
// floats by a subtraction, of which a Neoverse core does two to four in a cycle. A conversion takes it one or two.
constexpr float kMagic = 0x1.8p23f;
constexpr int32_t kMagicBits = 0x4b400000;
TW_INLINE float32x4_t without_magic(int32x4_t sums) {
  return vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(kMagic));
}

// Strips that a tile of ROWS rows multiplies at a time. With all rows, its inputs are loaded once for two strips. With
// fewer, weights come from memory, and one strip after the other is read in order.
template <int ROWS>
constexpr int kStripsAtOnce = ROWS < kTileRows ? 1 : 2;

// Integer sums of ROWS rows and some strips of columns.
template <int ROWS, int STRIPS>
struct MatrixDots {
  static constexpr int kRowPairs = (ROWS + 1) / 2;
  int32x4_t v[kRowPairs][STRIPS][2];

  // All sums begin with a number of each row, if there is one, plus `base`.
  [[gnu::always_inline]] void start(const int32_t* corrections, int32_t base) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
      int32x4_t first = vdupq_n_s32(base);
      if (corrections) first = vaddq_s32(first, vreinterpretq_s32_f32(spread_rows<ROWS>(corrections, 2 * r)));
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) v[r][s][0] = v[r][s][1] = first;
    }
  }

  // Adds the products of one step of inputs. `load(s, w)` loads a strip's columns.
  template <typename Load>
  [[gnu::always_inline]] void multiply(const char* x, Load&& load) {
    int8x16_t rows[kRowPairs];
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) rows[r] = vreinterpretq_s8_u8(load_row_pair<ROWS>(x, 2 * r));
#pragma GCC unroll 2
    for (int s = 0; s < STRIPS; ++s) {
      uint8x16_t w[2];
      load(s, w);
#pragma GCC unroll 8
      for (int r = 0; r < kRowPairs; ++r) {
        v[r][s][0] = vusmmlaq_s32(v[r][s][0], w[0], rows[r]);
        v[r][s][1] = vusmmlaq_s32(v[r][s][1], w[1], rows[r]);
      }
    }
  }

  // The same for one group. `weight` advances past it in every strip.
  template <bool NIBBLES>
  [[gnu::always_inline]] void multiply_group(const uint8_t* (&weight)[STRIPS], const char* x) {
    constexpr int kStepBytes = ROWS * kUnitBytes, kPairBytes = NIBBLES ? 32 : 64;
#pragma GCC unroll 4
    for (int step = 0; step < kRowGroup / kIntegerUnit; step += 2) {
      uint8x16_t both[STRIPS][2];
      multiply(x + step * kStepBytes, [&](int s, uint8x16_t (&w)[2]) __attribute__((always_inline)) {
        prefetch_panel<ROWS>(weight[s]);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          both[s][c] = vld1q_u8(weight[s] + 16 * c);
          w[c] = NIBBLES ? vandq_u8(both[s][c], vdupq_n_u8(15)) : both[s][c];
        }
      });
      multiply(x + (step + 1) * kStepBytes, [&](int s, uint8x16_t (&w)[2]) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) w[c] = NIBBLES ? vshrq_n_u8(both[s][c], 4) : vld1q_u8(weight[s] + 32 + 16 * c);
        weight[s] += kPairBytes;
      });
    }
  }
};

// Outputs of ROWS rows and some strips, in the order of integer sums.
template <int ROWS, int STRIPS>
struct MatrixSums {
  static constexpr int kRowPairs = (ROWS + 1) / 2;
  float32x4_t v[kRowPairs][STRIPS][2];

  [[gnu::always_inline]] void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) v[r][s][0] = v[r][s][1] = vdupq_n_f32(0.0f);
    }
  }

  // Rows of a tile.
  [[gnu::always_inline]] void load_rows(const float* tile) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) {
        const float* const at = tile + 2 * r * kPanel + s * kLanes;
        const float32x4_t first = vld1q_f32(at), second = 2 * r + 1 < ROWS ? vld1q_f32(at + kPanel) : first;
        v[r][s][0] = vzip1q_f32(first, second), v[r][s][1] = vzip2q_f32(first, second);
      }
    }
  }
  [[gnu::always_inline]] void store_rows(float* tile) const {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) {
        const float32x4_t* const pair = v[r / 2][s];
        vst1q_f32(tile + r * kPanel + s * kLanes, r % 2 ? vuzp2q_f32(pair[0], pair[1]) : vuzp1q_f32(pair[0], pair[1]));
      }
    }
  }

  // Adds integer sums, which began with kMagicBits, times the scales of columns and rows; with SHIFTS also the columns'
  // shifts times a number of each row.
  template <bool SHIFTS>
  [[gnu::always_inline]] void add(const MatrixDots<ROWS, STRIPS>& dots, const F (&scales)[STRIPS], const F (&shifts)[STRIPS],
                                  const float* row_scales, const void* row_sums) {
    ColumnPairs w[STRIPS], shift[STRIPS];
#pragma GCC unroll 2
    for (int s = 0; s < STRIPS; ++s) {
      w[s] = ColumnPairs::of(scales[s]);
      if constexpr (SHIFTS) shift[s] = ColumnPairs::of(shifts[s]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
      const float32x4_t scale = spread_rows<ROWS>(row_scales, 2 * r);
      [[maybe_unused]] float32x4_t sum;
      if constexpr (SHIFTS) sum = spread_rows<ROWS>(row_sums, 2 * r);
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) {
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          v[r][s][c] = vfmaq_f32(v[r][s][c], without_magic(dots.v[r][s][c]), vmulq_f32(w[s].v[c], scale));
          if constexpr (SHIFTS) v[r][s][c] = vfmaq_f32(v[r][s][c], shift[s].v[c], sum);
        }
      }
    }
  }
};

struct Int8ChannelMatrixTile {
  static double peak(int rounds) {
    alignas(64) const uint8_t weights[16] = {};
    alignas(64) const int8_t inputs[16] = {1, 1, 1, 1};
    const uint8_t* w = weights;
    const int8_t* x = inputs;
    int32x4_t acc[kPeakSums];
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) acc[c] = vdupq_n_s32(c);
    for (int i = 0; i < rounds * kPeakSteps; ++i) {
      const uint8x16_t columns = vld1q_u8(w);
      const int8x16_t rows = vld1q_s8(x);
#pragma GCC unroll 32
      for (int c = 0; c < kPeakSums; ++c) acc[c] = vusmmlaq_s32(acc[c], columns, rows);
      asm volatile("" : "+r"(w), "+r"(x) : : "memory");
    }
    int sum = 0;
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) sum += hsum(I{acc[c]});
    return 2.0 * rounds * kPeakSteps * kPeakSums * 2 * 2 * kIntegerUnit + kPeakTrace * sum;
  }

  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    constexpr int kAtOnce = kStripsAtOnce<ROWS>;
    const size_t strip_size = strip_bytes(format, k);
    for (int strip = 0; strip < kStrips; strip += kAtOnce) {
      columns<ROWS, kAtOnce>(x, panel + strip * strip_size, strip_size, row_groups(k), tile + strip * kLanes);
    }
  }

  template <int ROWS, int STRIPS>
  TW_INLINE void columns(const char* x, const char* strip, size_t strip_size, int groups, float* tile) {
    const auto* scale = reinterpret_cast<const float*>(x);
    const uint8_t* weight[STRIPS];
#pragma GCC unroll 2
    for (int s = 0; s < STRIPS; ++s) weight[s] = reinterpret_cast<const uint8_t*>(strip + s * strip_size);
    MatrixDots<ROWS, STRIPS> dots;
    dots.start(reinterpret_cast<const int32_t*>(x) + ROWS, 0);
    x += ROWS * kHeadBytes;
    for (int g = 0; g < groups; ++g, x += ROWS * kRowGroup) dots.template multiply_group<false>(weight, x);
    MatrixSums<ROWS, STRIPS> sums;
#pragma GCC unroll 2
    for (int s = 0; s < STRIPS; ++s) {
      const ColumnPairs w = ColumnPairs::of(load(reinterpret_cast<const float*>(weight[s])));
#pragma GCC unroll 8
      for (int r = 0; r < dots.kRowPairs; ++r) {
        const float32x4_t row = spread_rows<ROWS>(scale, 2 * r);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) sums.v[r][s][c] = vmulq_f32(vcvtq_f32_s32(dots.v[r][s][c]), vmulq_f32(w.v[c], row));
      }
    }
    sums.store_rows(tile);
  }
};

template <bool NIBBLES, bool SHIFTS>
struct GroupMatrixTile {
  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    constexpr int kAtOnce = kStripsAtOnce<ROWS>;
    for (int strip = 0; strip < kStrips; strip += kAtOnce) {
      columns<ROWS, kAtOnce>(format, reinterpret_cast<const RowGroup<ROWS>*>(x), panel + strip * strip_bytes(format, k), k,
                             tile + strip * kLanes);
    }
  }

  template <int ROWS, int STRIPS>
  TW_INLINE void columns(const WeightFormat& format, const RowGroup<ROWS>* group, const char* strip, int k, float* tile) {
    const GroupLayout layout = GroupLayout::of(format, k);
    const size_t strip_size = strip_bytes(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    MatrixSums<ROWS, STRIPS> sums;
    sums.clear();
    for (int g = 0; g < groups; strip += layout.block_bytes()) {
      // A block's scales, then its two groups.
      const uint8_t* weight[STRIPS];
#pragma GCC unroll 2
      for (int s = 0; s < STRIPS; ++s) {
        prefetch_panel<ROWS>(strip + s * strip_size);
        weight[s] = reinterpret_cast<const uint8_t*>(strip + s * strip_size + layout.header_bytes);
      }
      for (int half = 0; half < 2 && g < groups; ++half) {
        F scales[STRIPS], shifts[STRIPS];
#pragma GCC unroll 2
        for (int s = 0; s < STRIPS; ++s) {
          const auto* of_block = reinterpret_cast<const f16*>(strip + s * strip_size);
          scales[s] = load(of_block + half * kLanes);
          if constexpr (SHIFTS) shifts[s] = load(of_block + (2 + half) * kLanes);
        }
        const int end = g + per_scale < groups ? g + per_scale : groups;
        for (; g < end; ++g, ++group) {
          MatrixDots<ROWS, STRIPS> dots;
          dots.start(SHIFTS ? nullptr : group->correction, kMagicBits);
          dots.template multiply_group<NIBBLES>(weight, reinterpret_cast<const char*>(group->quads));
          sums.template add<SHIFTS>(dots, scales, shifts, group->scale, group->correction);
        }
      }
    }
    sums.store_rows(tile);
  }
};

// Adds to `tile` what a chunk of a strip gives, expanded with its quads in pairs: see StripRows.
template <ChunkTraits T, int ROWS>
TW_INLINE void multiply_expanded(const Expanded& expanded, const char* x, int groups, float* tile) {
  constexpr int kParts = T.parts();
  const auto* group = reinterpret_cast<const BlockRows<ROWS, kParts>*>(x);
  const uint8_t* codes = expanded.codes;
  MatrixSums<ROWS, 1> sums;
  sums.load_rows(tile);
  for (int g = 0; g < groups; ++g, ++group) {
#pragma GCC unroll 2
    for (int p = 0; p < kParts; ++p) {
      MatrixDots<ROWS, 1> dots;
      dots.start(T.shifts ? nullptr : group->correction[p], kMagicBits);
      constexpr int kUnits = kRowGroup / kExpandedUnit / kParts;
#pragma GCC unroll 4
      for (int u = p * kUnits; u < (p + 1) * kUnits; ++u) {
        dots.multiply(reinterpret_cast<const char*>(group->quads[u]), [&](int, uint8x16_t (&w)[2]) __attribute__((always_inline)) {
          w[0] = vld1q_u8(codes), w[1] = vld1q_u8(codes + kVectorBytes);
        });
        codes += 2 * kVectorBytes;
      }
      const F scales[] = {load(expanded.scales[g * kParts + p])};
      F shifts[1];
      if constexpr (T.shifts) shifts[0] = load(expanded.shifts[g * kParts + p]);
      sums.template add<T.shifts>(dots, scales, shifts, group->scale, group->correction[p]);
    }
  }
  sums.store_rows(tile);
}

template <typename T>
using FloatRows = InRegisters<std::conditional_t<std::is_same_v<T, bf16>, BFloat16MatrixTile, FloatTile<T>>>;
using Int8ChannelRows = InRegisters<Int8ChannelMatrixTile>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = InRegisters<GroupMatrixTile<NIBBLES, SHIFTS>>;
template <ChunkTraits T>
using ExpandedRows = StripRows<T>;

}  // namespace tidewheel::TW_ISA
