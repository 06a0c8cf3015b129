// How weights and GEMM inputs are packed for tile registers, of 16 rows of 64 bytes. Weights lie as for AVX-512, whose units
// of four bytes are what a tile's columns take; a row of inputs in a tile takes a run.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

template <typename T>
constexpr int kFloatUnit = Element<T>::kStep;
constexpr int kIntegerUnit = 4;

template <typename T>
constexpr int kFloatRun = Element<T>::kStep;
template <>
constexpr int kFloatRun<bf16> = 32;
constexpr int kGroupRun = 32;  // half a row: sums of other groups must not mix
constexpr int kChannelRun = 64;
constexpr int kBlockRun = 32;
constexpr bool kExpandedForTiles = true;
constexpr int kFewRows = 4;

constexpr int packed_rows(WeightKind kind) {
  return kind == WeightKind::kFloat32 || kind == WeightKind::kFloat16 || kind == WeightKind::kTable4 ? kTileRows : 16;
}

// Int8 weights are stored as two's complement: tiles multiply signed bytes by signed bytes, and nothing is to be corrected.
constexpr uint8_t kInt8Flip = 0x80;

// Half of a core's second-level cache, which has 2 MiB wherever there is AMX.
constexpr size_t kRowBlockBytes = 1 << 20;

}  // namespace tidewheel::TW_ISA
