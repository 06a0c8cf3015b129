// Micro-kernels for small-float weights. A piece of a panel is widened in the L1 cache once for several tiles of rows,
// and its sums are scaled. A row's arithmetic is the same alone and among other rows.
#pragma once

#include "kernels/table.h"
#include "kernels/widened.h"

namespace tidewheel::TW_ISA {

// The prefetch distance. With few rows, codes from memory must arrive before they are needed.
constexpr int kCodesAheadBytes = 8192;

// `Product` multiplies floats of type T: see InRegisters.
template <typename T, typename Product>
class WidenedRows {
  static constexpr bool kBytes = __is_same(T, bf16);

 public:
  static constexpr int kTile = packed_rows(kBytes ? WeightKind::kE4m3 : WeightKind::kTable4);
  static constexpr int kRows = 8 * kTile;

  WidenedRows() {}  // does not clear the memory for a piece

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const size_t row_size = row_bytes(format, k);
    const char* codes = panel + widened_scale_bytes(format, k);
    for (int i = 0; i < rows * kPanel; i += kLanes) store(tile + i, zero());
    const int piece = piece_inputs(format);
    for (int begin = 0; begin < k; begin += piece) {
      const int count = k - begin < piece ? k - begin : piece;
      codes = widen_piece(format, codes, count);
      const float* scale = scales_of(format, panel, k, begin / format.group);
      for (int r = 0; r < rows; r += kTile) {
        const int n = rows - r < kTile ? rows - r : kTile;
        const size_t place = size_t(begin) * n * sizeof(typename Element<T>::Activation);
        product_.multiply(format, x + r * row_size + place, reinterpret_cast<const char*>(numbers_), count, n, sums_);
        float* out = tile + r * kPanel;
        for (int c = 0; c < kPanel; c += kLanes) {
          const F s = load(scale + c);
          for (int i = c; i < n * kPanel; i += kPanel) store(out + i, fma(load(sums_ + i), s, load(out + i)));
        }
      }
    }
  }

 private:
  // The scales of a group's kPanel columns.
  const float* scales_of(const WeightFormat& format, const char* panel, int k, int group) {
    if (kBytes || !format.scale_table) return reinterpret_cast<const float*>(panel) + group * kPanel;
    const QuantizedScales scales = QuantizedScales::of(format, const_cast<char*>(panel), k);
    for (int c = 0; c < kPanel; ++c) scales_[c] = scales.at(group, c);
    return scales_;
  }

  // Returns the codes after the piece.
  const char* widen_piece(const WeightFormat& format, const char* codes, int count) {
    if constexpr (kBytes) {
      const auto* from = reinterpret_cast<const e4m3*>(codes);
      const int size = e4m3_inputs(count) * kPanel;
      for (int i = 0; i < size; i += 64) {
        prefetch(from + i + kCodesAheadBytes);
#pragma GCC unroll 8
        for (int j = i; j < i + 64; j += 2 * kLanes) widen(from + j, numbers_ + j);
      }
      return codes + size;
    } else {
      const auto* from = reinterpret_cast<const uint32_t*>(codes);
      float* to = numbers_;
      for (int i = 0; i < count; i += kTableInputs, from += kPanel, to += kTableInputs * kPanel) {
        for (int c = 0; c < kPanel * static_cast<int>(sizeof *from); c += 64) {
          prefetch(reinterpret_cast<const char*>(from) + c + kCodesAheadBytes);
        }
        for (int c = 0; c < kPanel; c += kLanes) {
          const I eight = load(from + c);
          store(to + c, lookup<0>(format.table, eight));
          store(to + kPanel + c, lookup<4>(format.table, eight));
          store(to + 2 * kPanel + c, lookup<8>(format.table, eight));
          store(to + 3 * kPanel + c, lookup<12>(format.table, eight));
          store(to + 4 * kPanel + c, lookup<16>(format.table, eight));
          store(to + 5 * kPanel + c, lookup<20>(format.table, eight));
          store(to + 6 * kPanel + c, lookup<24>(format.table, eight));
          store(to + 7 * kPanel + c, lookup<28>(format.table, eight));
        }
      }
      return reinterpret_cast<const char*>(from);
    }
  }

  alignas(64) T numbers_[kPieceInputs * kPanel];
  alignas(64) float sums_[kTile * kPanel];
  alignas(64) float scales_[kPanel];
  Product product_;
};

}  // namespace tidewheel::TW_ISA
