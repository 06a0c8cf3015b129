// The vector vocabulary on AVX-512 (F, BW, DQ, VL): 16 floats a register, 32 registers. With BF16 and VNNI (the
// avx512_bf16 level is compiled with them), pairs of bfloat16 and quads of int8 have their own dot product
// instructions.
#pragma once

#include <immintrin.h>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 16;
constexpr int kTileRows = 12;
constexpr int kTileVectors = 2;

struct F {
  __m512 v;
};

TW_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
TW_INLINE F zero() { return {_mm512_setzero_ps()}; }
TW_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
TW_INLINE F load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TW_INLINE F load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
TW_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
TW_INLINE void store(bf16* p, F a) {
#ifdef __AVX512BF16__
  // Subnormal numbers become 0. The dot product takes them for 0 as well.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i half = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(half));
#endif
}
TW_INLINE void store(f16* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TW_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
TW_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
TW_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
TW_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
// 1 / a, without a division: within about a unit of the last place.
TW_INLINE F reciprocal(F a) {
  const __m512 r = _mm512_rcp14_ps(a.v);
  return {_mm512_fmadd_ps(r, _mm512_fnmadd_ps(a.v, r, _mm512_set1_ps(1.0f)), r)};
}
TW_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
TW_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
TW_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
TW_INLINE F select_less(F a, F b, F x, F y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
TW_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TW_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
TW_INLINE F pow2(F n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
TW_INLINE F binade(F a) { return {_mm512_and_ps(a.v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)))}; }
TW_INLINE float hsum(F a) { return _mm512_reduce_add_ps(a.v); }
TW_INLINE float hmax(F a) { return _mm512_reduce_max_ps(a.v); }
// The same of ROWS vectors, 12 or 16: row r's in lane r, with the bits of hsum and hmax, which for NaN depend on the order
// of operands. Each step halves the rows' lanes and puts those of two rows into one vector. Lanes behind the last row may
// hold anything.
template <int ROWS, typename Op>
TW_INLINE F reduce_rows(const F* x, Op&& op) {
  static_assert(ROWS == 12 || ROWS == 16);
  __m512 quarter[4];  // of each: four rows' sums of four lanes
#pragma GCC unroll 4
  for (int i = 0; i < ROWS / 4; ++i) {
    __m512 half[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512 a = x[4 * i + 2 * j].v, b = x[4 * i + 2 * j + 1].v;
      half[j] = op(_mm512_shuffle_f32x4(a, b, 0xee), _mm512_shuffle_f32x4(a, b, 0x44));
    }
    quarter[i] = op(_mm512_shuffle_f32x4(half[0], half[1], 0xdd), _mm512_shuffle_f32x4(half[0], half[1], 0x88));
  }
  if constexpr (ROWS == 12) quarter[3] = quarter[2];
  const auto eighth = [&](__m512 a, __m512 b) __attribute__((always_inline)) {
    return op(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  };
  const __m512 a = eighth(quarter[0], quarter[1]), b = eighth(quarter[2], quarter[3]);
  const __m512 all = op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, all)};
}
template <int ROWS>
  requires(ROWS == 12 || ROWS == 16)
TW_INLINE F hsum_rows(const F* x) {
  return reduce_rows<ROWS>(x, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_add_ps(a, b); });
}
template <int ROWS>
  requires(ROWS == 12 || ROWS == 16)
TW_INLINE F hmax_rows(const F* x) {
  return reduce_rows<ROWS>(x, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
}
TW_INLINE F keep_if(F value, F x, F bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), value.v)};
}
TW_INLINE F choose(uint32_t bits, F x, F y) { return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), y.v, x.v)}; }
TW_INLINE uint32_t unordered(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
TW_INLINE int compress(float* p, F a, F low, F high) {
  const __mmask16 within = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a.v, low.v, _CMP_GE_OQ), a.v, high.v, _CMP_LE_OQ);
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(within, a.v));
  return __builtin_popcount(within);
}

TW_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
TW_INLINE void prefetch_later(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

TW_INLINE F dot_single(F acc, F b, const float* a) { return fma(b, set1(*a), acc); }

// A 256th of each e4m3 number, through binary16: the shift copies the sign into bit 14, and the mask clears it there.
TW_INLINE __m512 cached_e4m3(__m256i half) {
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(half, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80u))));
}

#ifdef __AVX512BF16__
using BF16Activation = bf16;
struct Pairs {
  __m512bh v;
};
TW_INLINE Pairs load_pairs(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// bfloat16 holds every e5m2 and every e4m3 number exactly.
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512 even = _mm512_cvtph_ps(_mm256_slli_epi16(pairs, 8));
  const __m512 odd = _mm512_cvtph_ps(_mm256_and_si256(pairs, _mm256_set1_epi16(static_cast<int16_t>(0xff00u))));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return {(__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(odd))};
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(cached_e4m3(_mm256_slli_epi16(pairs, 8))), 16);
  const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(cached_e4m3(pairs)));
  const __mmask32 nan = _mm256_cmpeq_epi8_mask(pairs, _mm256_set1_epi8(kE4m3Nan));
  return {(__m512bh)_mm512_mask_blend_epi16(nan, both, _mm512_set1_epi16(0x7fc0))};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kLanes)));
  return {_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low))};
}
TW_INLINE Pairs drop_odd(Pairs b) {
  return {(__m512bh)_mm512_and_si512((__m512i)b.v, _mm512_set1_epi32(0xffff))};
}
TW_INLINE F dot_pairs(F acc, Pairs b, const bf16* a) {
  int pair;
  std::memcpy(&pair, a, 4);
  return {_mm512_dpbf16_ps(acc.v, b.v, (__m512bh)_mm512_set1_epi32(pair))};
}
#else
using BF16Activation = float;
struct Pairs {
  F even, odd;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {{_mm512_cvtph_ps(_mm256_slli_epi16(pairs, 8))},
          {_mm512_cvtph_ps(_mm256_and_si256(pairs, _mm256_set1_epi16(static_cast<int16_t>(0xff00u))))}};
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const auto numbers = [](__m512 x) -> F {  // the code for NaN arrives as 1.875
    const __mmask16 nan = _mm512_cmp_ps_mask(x, _mm512_set1_ps(1.875f), _CMP_EQ_OQ);
    return {_mm512_mask_blend_ps(nan, x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)))};
  };
  return {numbers(cached_e4m3(_mm256_slli_epi16(pairs, 8))), numbers(cached_e4m3(pairs))};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24))},
          {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8))}};
}
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) { return fma(b.odd, set1(a[1]), fma(b.even, set1(a[0]), acc)); }
#endif

struct I {
  __m512i v;
};
TW_INLINE I set1_int(int x) { return {_mm512_set1_epi32(x)}; }
// Keeps a sum in one register: see isa/avx2/simd.h.
TW_INLINE I settled(I a) {
  asm("" : "+v"(a.v));
  return a;
}
TW_INLINE I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
TW_INLINE int hsum(I a) { return _mm512_reduce_add_epi32(a.v); }
// The sums of ROWS vectors, as hsum_rows gives those of floats.
template <int ROWS>
  requires(ROWS == 12 || ROWS == 16)
TW_INLINE void store_hsums(int32_t* to, const I* x) {
  F rows[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) rows[r] = {_mm512_castsi512_ps(x[r].v)};
  const F sums = reduce_rows<ROWS>(rows, [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  });
  _mm512_storeu_si512(to, _mm512_castps_si512(sums.v));
}
TW_INLINE F to_floats(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
TW_INLINE F small_to_floats(I a) { return to_floats(a); }
TW_INLINE I round_to_int(F a) { return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
TW_INLINE void store(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v)); }
TW_INLINE void store(uint8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(a.v)); }

TW_INLINE __m512i four_bytes(const void* p) {
  int four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 28), 28))},
          {_mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 4))}};
}

TW_INLINE F load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
TW_INLINE F load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// Through binary16, which holds a 256th of each number. Sign extension copies the sign into bit 14; the mask clears it.
TW_INLINE F load(const e4m3* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80u)));
  return mul({_mm512_cvtph_ps(half)}, set1(256.0f));
}
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i used = _mm256_set1_epi16(static_cast<int16_t>(0xbf80u));
  const __m256i first = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), used);
  const __m256i second = _mm256_and_si256(_mm256_srai_epi16(pairs, 1), used);
  const F even = mul({_mm512_cvtph_ps(first)}, set1(256.0f)), odd = mul({_mm512_cvtph_ps(second)}, set1(256.0f));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
  _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(odd.v)));
}

TW_INLINE I load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(codes.v, SHIFT), _mm512_loadu_ps(table))};
}

struct Bytes {
  __m512i v;
};
TW_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TW_INLINE void store(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
template <int SHIFT, int BITS>
TW_INLINE Bytes field(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, SHIFT), _mm512_set1_epi8((1 << BITS) - 1))};
}
template <int SHIFT>
TW_INLINE Bytes or_above(Bytes low, Bytes high) {
  return {_mm512_or_si512(low.v, _mm512_slli_epi16(high.v, SHIFT))};
}
TW_INLINE Bytes sub(Bytes a, uint8_t b) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(static_cast<char>(b)))}; }
TW_INLINE Bytes lookup(const uint8_t* table, Bytes index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), index.v)};
}

#ifdef __AVX512VNNI__
constexpr bool kDotsBytes = true;
constexpr int kQuadZero = 128;
struct Quads {
  __m512i v;
};
TW_INLINE Quads load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TW_INLINE Quads as_quads(Bytes a) { return {a.v}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(both, mask)};
  high = {_mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* x) { return {_mm512_dpbusd_epi32(acc.v, w.v, four_bytes(x))}; }
// The same with signed columns and unsigned x.
TW_INLINE I dot_quads(I acc, const uint8_t* x, Quads w) { return {_mm512_dpbusd_epi32(acc.v, four_bytes(x), w.v)}; }
#else
// Sums of two products must fit in 16 bits, so |w| <= 127 is the unsigned factor, and x takes w's sign.
constexpr bool kDotsBytes = false;
constexpr int kQuadZero = 0;
struct Quads {
  __m512i magnitude;
  __mmask64 negative;
};
TW_INLINE Quads load_quads(const uint8_t* p) {
  const __m512i w = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
TW_INLINE Quads as_quads(Bytes a) { return {_mm512_abs_epi8(a.v), _mm512_movepi8_mask(a.v)}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(both, mask), 0};
  high = {_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), 0};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* p) {
  const __m512i x = four_bytes(p), signed_x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
  const __m512i products = _mm512_maddubs_epi16(w.magnitude, signed_x);
  return settled({_mm512_add_epi32(acc.v, _mm512_madd_epi16(products, _mm512_set1_epi16(1)))});
}
#endif
using NibbleSum = I;
TW_INLINE I begin_nibbles(I dot) { return dot; }
TW_INLINE I end_nibbles(I, I sum) { return sum; }

}  // namespace tidewheel::TW_ISA
