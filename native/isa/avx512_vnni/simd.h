// AVX-512 with VNNI, without BF16: the same vocabulary, whose dot product of int8 this level's compiler flags switch on.
#pragma once

#include "isa/avx512/simd.h"

namespace tidewheel::TW_ISA {

// From memory into the second-level cache long before a line is needed, and from there into the first-level one shortly
// before. On Intel's processors that one can wait for few lines at a time, too few for all that memory gives.
TW_INLINE void prefetch_in_steps(const void* line) {
  const char* p = static_cast<const char*>(line);
  prefetch_later(p + 8192);
  prefetch(p + 1024);
}

}  // namespace tidewheel::TW_ISA
