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

// Integer sums of ROWS rows and a strip of columns.
template <int ROWS>
struct MatrixDots {
  static constexpr int kRowPairs = (ROWS + 1) / 2;
  int32x4_t v[kRowPairs][2];

  // One step of inputs.
  [[gnu::always_inline]] void multiply(const uint8x16_t (&w)[2], const char* x) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
      const int8x16_t rows = vreinterpretq_s8_u8(load_row_pair<ROWS>(x, 2 * r));
      v[r][0] = vusmmlaq_s32(v[r][0], w[0], rows);
      v[r][1] = vusmmlaq_s32(v[r][1], w[1], rows);
    }
  }

  // One group; weights advance past it.
  template <bool NIBBLES>
  [[gnu::always_inline]] void multiply_group(const uint8_t*& weight, const char* x) {
    constexpr int kStepBytes = ROWS * kUnitBytes;
#pragma GCC unroll 4
    for (int s = 0; s < kRowGroup / kIntegerUnit; s += 2) {
      prefetch_panel<ROWS>(weight);
      const uint8x16_t first[] = {vld1q_u8(weight), vld1q_u8(weight + 16)};
      if constexpr (NIBBLES) {
        multiply({vandq_u8(first[0], vdupq_n_u8(15)), vandq_u8(first[1], vdupq_n_u8(15))}, x + s * kStepBytes);
        multiply({vshrq_n_u8(first[0], 4), vshrq_n_u8(first[1], 4)}, x + (s + 1) * kStepBytes);
        weight += 32;
      } else {
        multiply(first, x + s * kStepBytes);
        multiply({vld1q_u8(weight + 32), vld1q_u8(weight + 48)}, x + (s + 1) * kStepBytes);
        weight += 64;
      }
    }
  }

  // What every sum begins with, a number of each row; or 0.
  [[gnu::always_inline]] void start(const int32_t* corrections) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) {
      const int32x4_t first = corrections ? vreinterpretq_s32_f32(spread_rows<ROWS>(corrections, 2 * r)) : vdupq_n_s32(0);
      v[r][0] = v[r][1] = first;
    }
  }
};

// Outputs as the sums lie, to rows of a tile.
template <int ROWS>
TW_INLINE void store_sums(const float32x4_t (&sums)[(ROWS + 1) / 2][2], float* tile) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const float32x4_t *pair = sums[r / 2];
    vst1q_f32(tile + r * kPanel, r % 2 ? vuzp2q_f32(pair[0], pair[1]) : vuzp1q_f32(pair[0], pair[1]));
  }
}

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
    const auto* scale = reinterpret_cast<const float*>(x);
    const auto* corrections = reinterpret_cast<const int32_t*>(x) + ROWS;
    for (int strip = 0; strip < kStrips; ++strip) {
      const auto* weight = reinterpret_cast<const uint8_t*>(panel + strip * strip_bytes(format, k));
      const char* inputs = x + ROWS * kHeadBytes;
      MatrixDots<ROWS> dots;
      dots.start(corrections);
      for (int g = 0; g < row_groups(k); ++g) {
        dots.template multiply_group<false>(weight, inputs);
        inputs += ROWS * kRowGroup;
      }
      const ColumnPairs w = ColumnPairs::of(load(reinterpret_cast<const float*>(weight)));
      float32x4_t sums[dots.kRowPairs][2];
#pragma GCC unroll 8
      for (int r = 0; r < dots.kRowPairs; ++r) {
        const float32x4_t row = spread_rows<ROWS>(scale, 2 * r);
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) sums[r][c] = vmulq_f32(vcvtq_f32_s32(dots.v[r][c]), vmulq_f32(w.v[c], row));
      }
      store_sums<ROWS>(sums, tile + strip * kLanes);
    }
  }
};

template <bool NIBBLES, bool SHIFTS>
struct GroupMatrixTile {
  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    for (int strip = 0; strip < kStrips; ++strip) {
      columns<ROWS>(format, reinterpret_cast<const RowGroup<ROWS>*>(x), panel + strip * strip_bytes(format, k), k,
                    tile + strip * kLanes);
    }
  }

  template <int ROWS>
  TW_INLINE void columns(const WeightFormat& format, const RowGroup<ROWS>* group, const char* strip, int k, float* tile) {
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    constexpr int kRowPairs = (ROWS + 1) / 2;
    float32x4_t acc[kRowPairs][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRowPairs; ++r) acc[r][0] = acc[r][1] = vdupq_n_f32(0.0f);
    const auto* weight = reinterpret_cast<const uint8_t*>(strip);
    for (int g = 0; g < groups;) {
      // A block's scales, then its two groups.
      const auto* scales = reinterpret_cast<const f16*>(weight);
      prefetch_panel<ROWS>(weight);
      weight += layout.header_bytes;
      for (int half = 0; half < 2 && g < groups; ++half) {
        const ColumnPairs w = ColumnPairs::of(load(scales + half * kLanes));
        [[maybe_unused]] ColumnPairs shift;
        if constexpr (SHIFTS) shift = ColumnPairs::of(load(scales + (2 + half) * kLanes));
        const int end = g + per_scale < groups ? g + per_scale : groups;
        for (; g < end; ++g, ++group) {
          MatrixDots<ROWS> dots;
          dots.start(SHIFTS ? nullptr : group->correction);
          dots.template multiply_group<NIBBLES>(weight, reinterpret_cast<const char*>(group->quads));
#pragma GCC unroll 8
          for (int r = 0; r < kRowPairs; ++r) {
            const float32x4_t row = spread_rows<ROWS>(group->scale, 2 * r);
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) {
              acc[r][c] = vfmaq_f32(acc[r][c], vcvtq_f32_s32(dots.v[r][c]), vmulq_f32(w.v[c], row));
              if constexpr (SHIFTS) acc[r][c] = vfmaq_f32(acc[r][c], shift.v[c], spread_rows<ROWS>(group->correction, 2 * r));
            }
          }
        }
      }
    }
    store_sums<ROWS>(acc, tile);
  }
};

template <typename T>
using FloatRows = InRegisters<std::conditional_t<std::is_same_v<T, bf16>, BFloat16MatrixTile, FloatTile<T>>>;
using Int8ChannelRows = InRegisters<Int8ChannelMatrixTile>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = InRegisters<GroupMatrixTile<NIBBLES, SHIFTS>>;

}  // namespace tidewheel::TW_ISA
