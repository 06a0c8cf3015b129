// How weights and GEMM inputs are packed for levels that multiply vector by vector. A level that does otherwise has a
// packing.h in its own folder.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

// A unit: the consecutive inputs of a column that lie side by side in a packed weight.
template <typename T>
constexpr int kFloatUnit = Element<T>::kStep;
constexpr int kIntegerUnit = 4;

// A run: the consecutive inputs of a row that one instruction takes, and that lie side by side in a packed tile. The
// inputs of rows and of weights are filled up with zeros to whole runs.
template <typename T>
constexpr int kFloatRun = Element<T>::kStep;
constexpr int kGroupRun = 4;    // kInt8 and kInt4; divides kRowGroup
constexpr int kChannelRun = 4;  // kInt8Channel
constexpr int kBlockRun = 4;    // of the kinds that keep a quantized file's bits
constexpr bool kExpandedForTiles = false;
// Up to this number of rows, those kinds are multiplied without expanding them in memory: there are registers for as
// many.
constexpr int kFewRows = kTileRows < 12 ? 1 : 8;

// Rows of a packed tile.
constexpr int packed_rows(WeightKind) { return kTileRows; }

// What is turned over in the stored bytes of int8 weights, which otherwise are the value + 128.
constexpr uint8_t kInt8Flip = 0;

// Packed rows that are to stay in the second-level cache while panels pass by.
constexpr size_t kRowBlockBytes = 192 << 10;

}  // namespace tidewheel::TW_ISA
