// AMX in addition to AVX-512 with BF16 and VNNI: the same vector vocabulary. GEMM and attention use tiles besides.
#pragma once

#include "isa/avx512_bf16/simd.h"

namespace tidewheel::TW_ISA {

// Prefetches from memory into the L2 cache long before a line is needed, and from there into the L1 cache shortly
// before: see isa/avx512_vnni/simd.h.
TW_INLINE void prefetch_in_steps(const void* line) {
  const char* p = static_cast<const char*>(line);
  prefetch_later(p + 8192);
  prefetch(p + 1024);
}

}  // namespace tidewheel::TW_ISA
