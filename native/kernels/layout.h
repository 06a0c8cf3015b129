// Where things lie in packed weights and packed rows. A strip is one vector of columns.
//
// Float weights, a panel: [K / step][kPanel][step], step 2 for bfloat16, else 1; zeros fill the last pair.
// Quantized weights, a panel: kPanel / kLanes strips, each padded to 64 bytes, K rounded up to whole groups of 32:
//   kInt8         bytes [K/4][kLanes][4] of value + 128, then float16 scales [K/32][kLanes]
//   kInt8Channel  the same bytes, then float32 scales [kLanes]
//   kInt4         bytes [K/8][kLanes][4], low halves inputs 8i..8i+3, high halves 8i+4..8i+7, then float16 scales
//                 [groups][kLanes], then zero points, uint8 [groups][kLanes]
//
// Rows, a tile of n: float weights [K / step][n][step], else a group of 32 inputs after the other:
//   float scales [n], corrections [n], int8 [8][n][4]; kInt8Channel: one such head, then int8 [K/4][n][4].
// The correction takes back what the offset of stored weights adds to a dot product: -offset times the sum of the
// row's integers, or with zero points that sum times the scale, in float.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

constexpr int kStrips = kPanel / kLanes;
constexpr int kQuad = 4;  // inputs that one integer dot product consumes
constexpr int kHeadBytes = 8;  // of a row's scale and correction
constexpr int kNibbleZero = 8;

TW_INLINE int round_up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
TW_INLINE int row_groups(int k) { return (k + kRowGroup - 1) / kRowGroup; }
TW_INLINE int weight_groups(const WeightFormat& format, int k) { return (k + format.group - 1) / format.group; }

TW_INLINE size_t strip_value_bytes(const WeightFormat& format, int k) {
  const size_t values = size_t(row_groups(k)) * kRowGroup * kLanes;
  return format.kind == WeightKind::kInt4 ? values / 2 : values;
}

TW_INLINE size_t strip_bytes(const WeightFormat& format, int k) {
  size_t scales = sizeof(float) * kLanes;
  if (format.kind == WeightKind::kInt8) scales = sizeof(f16) * row_groups(k) * kLanes;
  if (format.kind == WeightKind::kInt4) {
    scales = (sizeof(f16) + (format.zero_points ? 1 : 0)) * size_t(weight_groups(format, k)) * kLanes;
  }
  return (strip_value_bytes(format, k) + scales + 63) / 64 * 64;
}

template <typename T>
TW_INLINE int float_steps(int k) {
  return (k + Element<T>::kStep - 1) / Element<T>::kStep;
}

}  // namespace tidewheel::TW_ISA
