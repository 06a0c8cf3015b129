// Where things lie in packed weights and packed rows. A strip is one vector of columns.
//
// Float weights, a panel: [K / unit][kPanel][unit], K rounded up to whole runs with zeros.
// Quantized weights, a panel: kPanel / kLanes strips, K rounded up to whole groups and runs. Bytes hold value + 128, or
// as kInt8Flip changes that,
//   units: bytes [inputs / unit][kLanes][unit]; nibbles: [inputs / 2 unit][kLanes][unit], low halves the first unit.
//   kInt8Channel  units of all inputs, then float32 scales [kLanes]
//   kInt8, kInt4  blocks of two groups, so that a strip is read in order and in whole vectors: float16 scales
//                 [2][kLanes], with zero points float16 shifts [2][kLanes], then two groups of units or nibbles.
//                 w = scale * q + shift, where without zero points the shift is -8 * scale.
//
// Rows, a tile of n: float weights [K / run][n][run], else a group of 32 inputs after the other:
//   float scales [n], corrections [n], int8 [32 / run][n][run]; kInt8Channel: one such head, then int8 [K / run][n][run].
// The correction takes back what the offset of stored weights adds to a dot product: -offset times the sum of the row's
// integers. With zero points it is that sum times the scale, in float, for the shift to be multiplied with.
#pragma once

#include "packing.h"

namespace tidewheel::TW_ISA {

constexpr int kStrips = kPanel / kLanes;
constexpr int kQuad = 4;  // inputs that one integer dot product consumes
constexpr int kHeadBytes = 8;  // of a row's scale and correction
constexpr int kNibbleZero = 8;
constexpr int kLineBytes = 64;  // of a cache

TW_INLINE int round_up_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
TW_INLINE int row_groups(int k) { return (k + kRowGroup - 1) / kRowGroup; }
TW_INLINE int channel_inputs(int k) { return round_up_to(k, kChannelRun > kRowGroup ? kChannelRun : kRowGroup); }

// Where input i of row r of n lies, in inputs.
TW_INLINE size_t place_in_tile(unsigned i, int r, int n, unsigned run) {
  return size_t(i / run * run) * n + r * run + i % run;
}

// Groups of a strip, and where they lie.
struct GroupLayout {
  int group, groups;
  size_t shift_bytes;  // from a group's scales to its shifts, 0 if it has none
  size_t header_bytes, value_bytes;

  TW_INLINE GroupLayout of(const WeightFormat& format, int k) {
    constexpr size_t kHalves = sizeof(f16) * kLanes * 2;
    const size_t values = size_t(format.group) * kLanes;
    return {format.group, (k + format.group - 1) / format.group, format.zero_points ? kHalves : 0,
            format.zero_points ? 2 * kHalves : kHalves, format.kind == WeightKind::kInt4 ? values / 2 : values};
  }
  size_t block_bytes() const { return header_bytes + 2 * value_bytes; }
  size_t scale_at(int g) const { return g / 2 * block_bytes() + g % 2 * sizeof(f16) * kLanes; }
  size_t values_at(int g) const { return g / 2 * block_bytes() + header_bytes + g % 2 * value_bytes; }
};

// Of formats that keep a quantized file's bits: see blocks.h.
size_t block_strip_bytes(const WeightFormat& format, int k);

TW_INLINE size_t strip_bytes(const WeightFormat& format, int k) {
  if (format.kind >= WeightKind::kQ5_0) return block_strip_bytes(format, k);
  if (format.kind == WeightKind::kInt8Channel) {
    return (size_t(channel_inputs(k)) + sizeof(float)) * kLanes;
  }
  const GroupLayout layout = GroupLayout::of(format, k);
  return (layout.groups + 1) / 2 * layout.block_bytes();
}

template <typename T>
TW_INLINE int float_steps(int k) {
  return round_up_to(k, kFloatRun<T>) / Element<T>::kStep;
}

}  // namespace tidewheel::TW_ISA
