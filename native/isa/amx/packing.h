// How weights and GEMM inputs are packed for tile registers, which have 16 rows of 64 bytes. Weights are packed as for
// AVX-512: its units of four bytes are what a tile's columns need. A tile's row takes one run of a row's inputs.
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
constexpr int kGroupRun = 32;  // half a tile row: sums of different groups must not mix
constexpr int kChannelRun = 64;
constexpr int kBlockRun = 32;
constexpr bool kExpandedForTiles = true;
constexpr int kFewRows = 8;

constexpr int packed_rows(WeightKind kind) {
  return kind == WeightKind::kFloat32 || kind == WeightKind::kFloat16 || kind == WeightKind::kTable4 ? kTileRows : 16;
}

// Int8 weights are stored as two's complement. Tiles multiply signed bytes by signed bytes, so no correction is needed.
constexpr uint8_t kInt8Flip = 0x80;

// Half of a core's L2 cache, which has 2 MiB on every processor with AMX.
constexpr size_t kRowBlockBytes = 1 << 20;

}  // namespace tidewheel::TW_ISA
