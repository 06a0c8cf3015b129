// The instructions of AMX, by their names. In assembly, because the compiler's intrinsics do not tell it which memory they
// read (gcc 12): what was to be stored before could come later, or never. The tests have a model of the processor in this
// header's place.
#pragma once

#include <cstddef>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

// 64 bytes: palette, start row, 14 zeros, 16 times the bytes of a row, 16 times rows.
TW_INLINE void ldtilecfg(const void* config) {
  asm volatile("ldtilecfg %0" : : "m"(*static_cast<const char(*)[64]>(config)));
}
// Tiles are as they were before the first configuration: nothing is left for the system to save.
TW_INLINE void tilerelease() { asm volatile("tilerelease"); }

template <int TILE>
TW_INLINE void tilezero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// A tile's rows from or to memory, `stride` bytes apart.
template <int TILE>
TW_INLINE void tileloadd(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
TW_INLINE void tilestored(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}

// C += A B over pairs of bfloat16, and over quads of signed bytes.
template <int C, int A, int B>
TW_INLINE void tdpbf16ps() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
TW_INLINE void tdpbssd() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// The same, with B's bytes unsigned.
template <int C, int A, int B>
TW_INLINE void tdpbsud() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace tidewheel::TW_ISA
