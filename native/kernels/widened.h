// Weights that keep the bits of small floats, and are widened piece by piece to be multiplied as floats are.
//
// A panel: scales, float32 [groups][kPanel], then codes,
//   kE4m3    as bfloat16 lies, a byte each: [K / unit][kPanel][unit], K rounded up to whole runs with zeros;
//   kTable4  4-byte numbers [K / 8][kPanel], the first of eight inputs in the lowest bits.
// So pieces of inputs lie one behind the other.
#pragma once

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

// Inputs that are widened at a time, at most: a panel's stay in the first-level cache.
constexpr int kPieceInputs = 128;
constexpr int kTableInputs = 8;  // in a 4-byte number

TW_INLINE bool is_widened(WeightKind kind) { return kind == WeightKind::kE4m3 || kind == WeightKind::kTable4; }

TW_INLINE int piece_inputs(const WeightFormat& format) { return format.group < kPieceInputs ? format.group : kPieceInputs; }

TW_INLINE size_t widened_scale_bytes(const WeightFormat& format, int k) {
  return size_t((k + format.group - 1) / format.group) * kPanel * sizeof(float);
}

TW_INLINE int e4m3_inputs(int k) { return round_up_to(k, kFloatRun<bf16>); }

TW_INLINE size_t widened_panel_bytes(const WeightFormat& format, int k) {
  const size_t codes = format.kind == WeightKind::kE4m3 ? size_t(e4m3_inputs(k)) : size_t(round_up_to(k, kTableInputs) / 2);
  return widened_scale_bytes(format, k) + codes * kPanel;
}

}  // namespace tidewheel::TW_ISA
