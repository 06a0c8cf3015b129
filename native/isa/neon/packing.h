// How weights and GEMM inputs are packed on ARM. Levels with dot products store signed bytes for them. Levels with
// matrix products have longer units, of unsigned bytes.
#pragma once

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

template <typename T>
constexpr int kFloatUnit = Element<T>::kStep;
#ifdef __ARM_FEATURE_MATMUL_INT8
template <>
constexpr int kFloatUnit<bf16> = 4;
constexpr int kIntegerUnit = 8;
constexpr uint8_t kInt8Flip = 0;
#else
constexpr int kIntegerUnit = 4;
constexpr uint8_t kInt8Flip = 0x80;
#endif

template <typename T>
constexpr int kFloatRun = kFloatUnit<T>;
constexpr int kGroupRun = kIntegerUnit;
constexpr int kChannelRun = kIntegerUnit;
constexpr int kBlockRun = kIntegerUnit;  // kinds that keep a quantized file's bits
constexpr bool kExpandedForTiles = false;
constexpr int kFewRows = 1;     // up to this many rows, those kinds are multiplied without expanding them in memory

constexpr int packed_rows(WeightKind) { return kTileRows; }

constexpr size_t kRowBlockBytes = 192 << 10;

}  // namespace tidewheel::TW_ISA
