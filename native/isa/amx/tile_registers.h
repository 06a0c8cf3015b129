// AMX instructions, under their own names. They are written in assembly because the compiler's intrinsics (gcc 12) do
// not say which memory they read: earlier stores could be moved behind them or removed. Tests replace this header by a
// model of the processor.
#pragma once

#include <cstddef>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

// `config` has 64 bytes: palette, start row, 14 zeros, the bytes per row of 16 tiles, the rows of 16 tiles.
TW_INLINE void ldtilecfg(const void* config) {
  asm volatile("ldtilecfg %0" : : "m"(*static_cast<const char(*)[64]>(config)));
}
// Puts the tiles back into their initial state, so that the system has no tile state to save.
TW_INLINE void tilerelease() { asm volatile("tilerelease"); }

template <int TILE>
TW_INLINE void tilezero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// Loads or stores a tile's rows, which are `stride` bytes apart.
template <int TILE>
TW_INLINE void tileloadd(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
TW_INLINE void tilestored(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}

// C += A B over pairs of bfloat16, or over quads of signed bytes.
template <int C, int A, int B>
TW_INLINE void tdpbf16ps() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
TW_INLINE void tdpbssd() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// The same for bytes, with those of A unsigned, or those of B.
template <int C, int A, int B>
TW_INLINE void tdpbusd() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
TW_INLINE void tdpbsud() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace tidewheel::TW_ISA
