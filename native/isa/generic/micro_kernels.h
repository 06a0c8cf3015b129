// The micro-kernels of levels that multiply vector by vector. A level that does otherwise has a micro_kernels.h in its
// own folder.
#pragma once

#include "kernels/gemm_blocks.h"
#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

template <typename T>
using FloatRows = InRegisters<FloatTile<T>>;
using Int8ChannelRows = InRegisters<Int8ChannelTile>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = InRegisters<GroupTile<NIBBLES, SHIFTS>>;
template <ChunkTraits T>
using ExpandedRows = StripRows<T>;

}  // namespace tidewheel::TW_ISA
