// How weights and GEMM inputs are packed for levels that multiply vector by vector. Other levels have a packing.h in
// their own folder.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

// A unit: consecutive inputs of a column that are stored side by side in a packed weight.
template <typename T>
constexpr int kFloatUnit = Element<T>::kStep;
constexpr int kIntegerUnit = 4;

// A run: consecutive inputs of a row that one instruction takes. They are stored side by side in a packed tile. Inputs
// of rows and of weights are padded with zeros to whole runs.
template <typename T>
constexpr int kFloatRun = Element<T>::kStep;
constexpr int kGroupRun = 4;    // kInt8 and kInt4; divides kRowGroup
constexpr int kChannelRun = 4;  // kInt8Channel
constexpr int kBlockRun = 4;    // kinds that keep a quantized file's bits
constexpr bool kExpandedForTiles = false;
// Up to this number of rows, those kinds are multiplied without expanding them in memory. There are registers for this
// many rows.
constexpr int kFewRows = kTileRows < 12 ? 1 : 8;

// Rows of a packed tile.
constexpr int packed_rows(WeightKind) { return kTileRows; }

// Bits that are inverted in stored int8 weights. Without inversion, the stored byte is the value + 128.
constexpr uint8_t kInt8Flip = 0;

// Size of the packed rows that stay in the L2 cache while panels pass through it.
constexpr size_t kRowBlockBytes = 192 << 10;

}  // namespace tidewheel::TW_ISA
