// POWER10: the same vector vocabulary, and integer sums of four rows by four columns in an accumulator of its matrix
// instructions.
#pragma once

#include "isa/vsx/simd.h"

namespace tidewheel::TW_ISA {

constexpr int kAccumulatorRows = 4;
// With fewer rows, most of an accumulator would be computed in vain.
constexpr int kLeastAccumulatedRows = 3;

// COUNT words, of which at most four are loaded. What fills the others is never used.
template <int COUNT>
TW_INLINE Bytes16 load_words(const void* p) {
  if constexpr (COUNT >= 4) return load_as<Bytes16>(p);
  if constexpr (COUNT == 1) return (Bytes16)load_four(p);
  const auto first = load_eight<Longs>(p);
  if constexpr (COUNT == 2) return (Bytes16)first;
  return (Bytes16)vec_mergeh(first, (Longs)load_four(static_cast<const char*>(p) + 8));
}

// The integer sums of ROWS rows and kLanes columns.
template <int ROWS>
struct RowSums {
  static constexpr int kCount = (ROWS + kAccumulatorRows - 1) / kAccumulatorRows;
  __vector_quad v[kCount];
};
// Handles the rows from accumulator T on.
template <int ROWS, int T = 0>
TW_INLINE void dot_rows(RowSums<ROWS>& sums, Quads w, const int8_t (*x)[4]) {
  constexpr int kFirst = T * kAccumulatorRows;
  __builtin_mma_xvi8ger4pp(&sums.v[T], load_words<ROWS - kFirst>(x[kFirst]), w.v);
  if constexpr (T + 1 < RowSums<ROWS>::kCount) dot_rows<ROWS, T + 1>(sums, w, x);
}
// Calls `body` with sums that begin with 0, and adds them to `dot`.
template <int ROWS, typename Body>
  requires(ROWS >= kLeastAccumulatedRows)
TW_INLINE void accumulate_rows(I (&dot)[ROWS], Body&& body) {
  RowSums<ROWS> sums;
  Ints rows[sums.kCount][kAccumulatorRows];
#pragma GCC unroll 2
  for (int t = 0; t < sums.kCount; ++t) __builtin_mma_xxsetaccz(&sums.v[t]);
  body(sums);
#pragma GCC unroll 2
  for (int t = 0; t < sums.kCount; ++t) __builtin_mma_disassemble_acc(rows[t], &sums.v[t]);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) dot[r].v += rows[r / kAccumulatorRows][r % kAccumulatorRows];
}

}  // namespace tidewheel::TW_ISA
