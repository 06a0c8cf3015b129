// Weights and inputs in 16 bits, so that one multiplication takes two inputs of a column.
#pragma once

#include "kernels/blocks.h"

namespace tidewheel::TW_ISA {

// Up to this number of rows, a panel is read as it is stored: widening it would take too long.
constexpr int kFewInRegisters = 2 * kTileRows;

// A chunk of a strip in 16 bits: codes [inputs / 2][kLanes][2]. Otherwise as Expanded.
struct alignas(64) WideChunk {
  int16_t codes[kChunkInputs * kLanes];
  float scales[2 * kChunkGroups][kLanes];
  float shifts[2 * kChunkGroups][kLanes];
};

TW_INLINE void put_signed_quad(WideChunk& chunk, int q, __m256i bytes) {
  // Of each column, the first two inputs to the lower half and the other two to the upper half.
  const __m256i halves = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                          0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i pairs = _mm256_shuffle_epi8(bytes, halves), signs = _mm256_cmpgt_epi8(_mm256_setzero_si256(), pairs);
  auto* to = reinterpret_cast<__m256i*>(chunk.codes + q * kQuad * kLanes);
  _mm256_store_si256(to, _mm256_unpacklo_epi8(pairs, signs));
  _mm256_store_si256(to + 1, _mm256_unpackhi_epi8(pairs, signs));
}
// Stored weights are 128 too high.
TW_INLINE void put_quad(WideChunk& chunk, int q, Bytes stored) { put_signed_quad(chunk, q, sub(stored, 128).v); }

// `count` inputs in the same order, a multiple of 16.
TW_INLINE void widen_bytes(const char* from, int count, int16_t* to) {
  for (int i = 0; i < count; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), _mm256_cvtepi8_epi16(bytes));
  }
}

}  // namespace tidewheel::TW_ISA
