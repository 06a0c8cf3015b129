// For levels with VNNI of Intel's processors.
#pragma once

#include "isa/avx512/simd.h"

namespace tidewheel::TW_ISA {

// Prefetches from memory into the L2 cache long before a line is needed, and from there into the L1 cache shortly
// before. On Intel's processors the L1 cache can have only a few misses outstanding, too few for the full memory
// bandwidth.
TW_INLINE void prefetch_in_steps(const void* line) {
  const char* p = static_cast<const char*>(line);
  prefetch_later(p + 8192);
  prefetch(p + 1024);
}

}  // namespace tidewheel::TW_ISA
