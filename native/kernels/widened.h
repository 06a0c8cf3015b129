// Weights that keep the bits of small floats. They are widened piece by piece, and then multiplied like floats.
//
// A panel has scales, then codes. The scales are float32 [groups][kPanel]. If they are quantized too, they are bytes
// [groups][kPanel], float32 largest [groups / scale_run][kPanel] and offset [kPanel], rounded up to kScaleBytes. The
// codes are
//   kE4m3    in the layout of bfloat16, with a byte each: [K / unit][kPanel][unit], K padded with zeros to whole runs;
//   kTable4  4-byte numbers [K / 8][kPanel], the first of eight inputs in the lowest bits.
// So pieces of inputs are consecutive in memory.
#pragma once

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

// The maximum of inputs that are widened at a time. A panel's widened inputs stay in the L1 cache.
constexpr int kPieceInputs = 128;
constexpr int kTableInputs = 8;  // in one 4-byte number
constexpr size_t kScaleBytes = 64;

TW_INLINE bool is_widened(WeightKind kind) { return kind == WeightKind::kE4m3 || kind == WeightKind::kTable4; }

TW_INLINE int piece_inputs(const WeightFormat& format) { return format.group < kPieceInputs ? format.group : kPieceInputs; }

TW_INLINE size_t widened_scale_bytes(const WeightFormat& format, int k) {
  const size_t groups = (k + format.group - 1) / format.group;
  if (!format.scale_table) return groups * kPanel * sizeof(float);
  const size_t bytes = (groups + (groups / format.scale_run + 1) * sizeof(float)) * kPanel;
  return (bytes + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

// A panel's quantized scales.
struct QuantizedScales {
  const float* table;
  int run;
  uint8_t* codes;  // [groups][kPanel]
  float* largest;  // [groups / run][kPanel]
  float* offset;   // [kPanel]

  TW_INLINE QuantizedScales of(const WeightFormat& format, char* panel, int k) {
    const int groups = (k + format.group - 1) / format.group;
    auto* codes = reinterpret_cast<uint8_t*>(panel);
    auto* largest = reinterpret_cast<float*>(panel + groups * kPanel);
    return {format.scale_table, format.scale_run, codes, largest, largest + groups / format.scale_run * kPanel};
  }
  float at(int group, int lane) const {
    return table[codes[group * kPanel + lane]] * largest[group / run * kPanel + lane] + offset[lane];
  }
};

TW_INLINE int e4m3_inputs(int k) { return round_up_to(k, kFloatRun<bf16>); }

TW_INLINE size_t widened_panel_bytes(const WeightFormat& format, int k) {
  const size_t codes = format.kind == WeightKind::kE4m3 ? size_t(e4m3_inputs(k)) : size_t(round_up_to(k, kTableInputs) / 2);
  return widened_scale_bytes(format, k) + codes * kPanel;
}

}  // namespace tidewheel::TW_ISA
