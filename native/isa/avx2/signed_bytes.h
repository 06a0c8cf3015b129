// Products of signed bytes without a sign for each: x or, where w is negative, -x - 1 is multiplied by |w|. What the 1
// takes off is the sum of the magnitudes of negative weights, which is the same for all rows of a column. So it is
// computed once for up to eight rows. The integers are those of dot_quads.
#pragma once

#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

// For fewer rows, dot_quads is faster.
constexpr int kFewestForMagnitudes = 5, kMostForMagnitudes = 8;

// Up to eight rows, of one packed tile or of two.
template <int FIRST, int SECOND>
struct ByteRows {
  static_assert(FIRST > 0 && FIRST + SECOND <= kMostForMagnitudes);
  const int8_t* first;
  const int8_t* second;

  // Row r's quad, counted from these.
  template <int ROW>
  const int8_t* at(int quad) const {
    if constexpr (ROW < FIRST) return first + (quad * FIRST + ROW) * kQuad;
    else return second + (quad * SECOND + ROW - FIRST) * kQuad;
  }
};

// Adds the dot products of a group, up to `negative`, to which it adds what is missing in those of each row. Moves
// `weight` past it.
template <int FIRST, int SECOND>
TW_INLINE void multiply_magnitudes(I (&dot)[FIRST + SECOND], I& negative, const uint8_t*& weight,
                                   ByteRows<FIRST, SECOND> x) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i missing = _mm256_setzero_si256();  // of pairs, in 16 bits
#pragma GCC unroll 8
  for (int s = 0; s < kRowGroup / kQuad; ++s, weight += kLanes * kQuad) {
    if (s * kLanes * kQuad % 64 == 0) prefetch_panel<FIRST + SECOND>(weight);
    const __m256i w = load_quads(weight).w;
    const __m256i below = settled({_mm256_cmpgt_epi8(_mm256_setzero_si256(), w)}).v, size = settled({_mm256_abs_epi8(w)}).v;
    missing = _mm256_add_epi16(missing, _mm256_maddubs_epi16(_mm256_and_si256(size, below), _mm256_set1_epi8(1)));
    missing = settled({missing}).v;
    [&]<int... R>(std::integer_sequence<int, R...>) __attribute__((always_inline)) {
      const auto add_row = [&](I& sum, const int8_t* four) __attribute__((always_inline)) {
        const __m256i flipped = _mm256_xor_si256(four_bytes(four), below);
        sum = settled({_mm256_add_epi32(sum.v, _mm256_madd_epi16(_mm256_maddubs_epi16(size, flipped), ones))});
      };
      (add_row(dot[R], x.template at<R>(s)), ...);
    }(std::make_integer_sequence<int, FIRST + SECOND>());
  }
  negative = add(negative, {_mm256_madd_epi16(missing, ones)});
}

// kInt8, into `tile` [rows][kPanel].
template <int FIRST, int SECOND>
void multiply_bytes_of_groups(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
  constexpr int kRows = FIRST + SECOND;
  const GroupLayout layout = GroupLayout::of(format, k);
  const int groups = row_groups(k);
  for (int strip = 0; strip < kStrips; ++strip) {
    const auto* first = reinterpret_cast<const RowGroup<FIRST>*>(x);
    const auto* second = reinterpret_cast<const RowGroup<SECOND ? SECOND : 1>*>(x + FIRST * row_bytes(format, k));
    const auto* weight = reinterpret_cast<const uint8_t*>(panel + strip * strip_bytes(format, k));
    F acc[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r] = zero();
    for (int g = 0; g < groups;) {
      const auto* scales = reinterpret_cast<const f16*>(weight);
      prefetch_panel<kRows>(weight);
      weight += layout.header_bytes;
      for (int half = 0; half < 2 && g < groups; ++half, ++g, ++first) {
        I dot[kRows], negative = set1_int(0);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) dot[r] = set1_int(0);
        multiply_magnitudes<FIRST, SECOND>(dot, negative, weight, {first->quads[0][0], second->quads[0][0]});
        const F w = load(scales + half * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const float scale = r < FIRST ? first->scale[r] : second->scale[r - FIRST];
          acc[r] = add_dots(acc[r], to_floats(add(dot[r], negative)), w, scale);
        }
        if constexpr (SECOND > 0) ++second;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(tile + r * kPanel + strip * kLanes, acc[r]);
  }
}

// kInt8Channel, into `tile` [rows][kPanel].
template <int FIRST, int SECOND>
void multiply_bytes_of_channels(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
  constexpr int kRows = FIRST + SECOND;
  const char* const other = x + FIRST * row_bytes(format, k);
  for (int strip = 0; strip < kStrips; ++strip) {
    const auto* weight = reinterpret_cast<const uint8_t*>(panel + strip * strip_bytes(format, k));
    ByteRows<FIRST, SECOND> rows{reinterpret_cast<const int8_t*>(x) + FIRST * kHeadBytes,
                                 reinterpret_cast<const int8_t*>(other) + SECOND * kHeadBytes};
    I dot[kRows], negative = set1_int(0);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) dot[r] = set1_int(0);
    for (int g = 0; g < row_groups(k); ++g) {
      multiply_magnitudes<FIRST, SECOND>(dot, negative, weight, rows);
      rows.first += FIRST * kRowGroup;
      rows.second += SECOND * kRowGroup;
    }
    const F w = load(reinterpret_cast<const float*>(weight));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto* scales = reinterpret_cast<const float*>(r < FIRST ? x : other - FIRST * sizeof(float));
      store(tile + r * kPanel + strip * kLanes, mul(to_floats(add(dot[r], negative)), mul(w, set1(scales[r]))));
    }
  }
}

// Calls `multiply` with the rows of one or two packed tiles as template arguments, where it can multiply that many rows at
// once. Returns whether it was called.
template <typename Multiply>
TW_INLINE bool with_byte_rows(int rows, Multiply&& multiply) {
  static_assert(kTileRows == 6);
  switch (rows) {
    case 5: multiply.template operator()<5, 0>(); return true;
    case 6: multiply.template operator()<6, 0>(); return true;
    case 7: multiply.template operator()<6, 1>(); return true;
    case 8: multiply.template operator()<6, 2>(); return true;
    default: return false;
  }
}

}  // namespace tidewheel::TW_ISA
