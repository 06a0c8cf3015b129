// The vector vocabulary on AVX2 with FMA and F16C: 8 floats a register, 16 registers. With VNNI (the avx2_vnni level is
// compiled with it), quads of int8 have their own dot product instruction.
#pragma once

#include <immintrin.h>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 8;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;

struct F {
  __m256 v;
};

TW_INLINE F set1(float x) { return {_mm256_set1_ps(x)}; }
TW_INLINE F zero() { return {_mm256_setzero_ps()}; }
TW_INLINE F load(const float* p) { return {_mm256_loadu_ps(p)}; }
TW_INLINE F load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
TW_INLINE F load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
TW_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a.v); }
TW_INLINE void store(bf16* p, F a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i tie = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(tie, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i half = _mm256_blendv_epi8(rounded, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
TW_INLINE void store(f16* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TW_INLINE F add(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
TW_INLINE F sub(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
TW_INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
TW_INLINE F div(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
TW_INLINE F abs(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
TW_INLINE F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
TW_INLINE F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
TW_INLINE F select_less(F a, F b, F x, F y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
TW_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
TW_INLINE F round(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
TW_INLINE F pow2(F n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
}
TW_INLINE F binade(F a) {
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)))};
}

TW_INLINE float hsum(F a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TW_INLINE float hmax(F a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
TW_INLINE F keep_if(F value, F x, F bound) { return {_mm256_and_ps(value.v, _mm256_cmp_ps(x.v, bound.v, _CMP_GE_OQ))}; }
TW_INLINE F choose(uint32_t bits, F x, F y) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
  return {_mm256_blendv_ps(y.v, x.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)))};
}
TW_INLINE uint32_t unordered(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)); }

// For every byte, the positions of its set bits.
struct SetBits {
  uint8_t lanes[256][8];
};
constexpr SetBits kSetBits = [] {
  SetBits r{};
  for (int mask = 0; mask < 256; ++mask) {
    for (int lane = 0, n = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) r.lanes[mask][n++] = static_cast<uint8_t>(lane);
    }
  }
  return r;
}();
TW_INLINE int compress(float* p, F a, F low, F high) {
  const __m256 within = _mm256_and_ps(_mm256_cmp_ps(a.v, low.v, _CMP_GE_OQ), _mm256_cmp_ps(a.v, high.v, _CMP_LE_OQ));
  const int mask = _mm256_movemask_ps(within);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.lanes[mask])));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(a.v, order));
  return __builtin_popcount(mask);
}

// a * b + c, in c's register. If a loop's sums need most of the registers, GCC 12 chooses other forms of the
// instruction and runs out of registers. Each step then waits for a sum that went through memory.
TW_INLINE F fma_in_place(F a, F b, F c) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(c.v) : "x"(a.v), "x"(b.v));
  return c;
}
TW_INLINE F dot_single(F acc, F b, const float* a) { return fma_in_place(b, set1(*a), acc); }
// The same and set1 where the compiler may not move them, for loops that need every register: otherwise it reads the next
// step's operands too early, and sums go through memory.
TW_INLINE F fma_in_order(F a, F b, F c) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(c.v) : "x"(a.v), "x"(b.v));
  return c;
}
TW_INLINE F set1_in_order(const float* x) {
  F a;
  asm volatile("vbroadcastss %1, %0" : "=x"(a.v) : "m"(*x));
  return a;
}
using BF16Activation = float;
struct Pairs {
  F even, odd;
};
constexpr uint32_t kUpperHalf = 0xffff0000u;
TW_INLINE Pairs load_pairs(const bf16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(kUpperHalf))))}};
}
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {{_mm256_cvtph_ps(_mm_slli_epi16(pairs, 8))},
          {_mm256_cvtph_ps(_mm_and_si128(pairs, _mm_set1_epi16(static_cast<int16_t>(0xff00u))))}};
}
// A 256th of each e4m3 number, through binary16: the shift copies the sign into bit 14, and the mask clears it there.
// The code for NaN arrives as 1.875.
TW_INLINE F cached_e4m3(__m128i half) {
  const __m256 x = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(half, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80u))));
  return {_mm256_or_ps(x, _mm256_cmp_ps(x, _mm256_set1_ps(1.875f), _CMP_EQ_OQ))};
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {cached_e4m3(_mm_slli_epi16(pairs, 8)), cached_e4m3(pairs)};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const __m256i pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {{_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24))},
          {_mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 8))}};
}
// The first or the second numbers of kLanes pairs.
template <bool SECOND, typename T>
  requires(requires(const T* p) { load_pairs(p); })
TW_INLINE F load_half(const T* p) {
  asm volatile("" : "+r"(p));  // otherwise the compiler would keep what it has read in a register for the other half
  if constexpr (SECOND && std::is_same_v<T, bf16>) {
    // The mask is read from memory: a register for it would be missing for a sum.
    alignas(32) static constexpr uint32_t kUpper[] = {kUpperHalf, kUpperHalf, kUpperHalf, kUpperHalf,
                                                      kUpperHalf, kUpperHalf, kUpperHalf, kUpperHalf};
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    asm("vpand %1, %0, %0" : "+x"(pairs) : "m"(kUpper));
    return {_mm256_castsi256_ps(pairs)};
  }
  const Pairs pairs = load_pairs(p);
  return SECOND ? pairs.odd : pairs.even;
}
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) { return dot_single(dot_single(acc, b.even, a), b.odd, a + 1); }

TW_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
TW_INLINE void prefetch_later(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct I {
  __m256i v;
};
TW_INLINE I set1_int(int x) { return {_mm256_set1_epi32(x)}; }
// Keeps a sum in one register. Needed after a loop of dot products: otherwise GCC 12 keeps each sum as two variables,
// of the types that the loop and the code after it use, and writes all sums to memory in each step. Needed within the
// loop too: otherwise it computes all products first, writes them to memory, and adds them up afterwards.
TW_INLINE I settled(I a) {
  asm("" : "+x"(a.v));
  return a;
}
TW_INLINE I add(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
TW_INLINE int hsum(I a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
TW_INLINE F to_floats(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
TW_INLINE F small_to_floats(I a) { return to_floats(a); }
TW_INLINE I round_to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
TW_INLINE void store(int8_t* p, I a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
TW_INLINE void store(uint8_t* p, I a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}

TW_INLINE __m256i four_bytes(const void* p) {
  int four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {{_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 28), 28))},
          {_mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4))}};
}

TW_INLINE F load(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
TW_INLINE F load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

// Through binary16, which holds a 256th of each number. Sign extension copies the sign into bit 14; the mask clears it.
TW_INLINE F load(const e4m3* p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80u)));
  return mul({_mm256_cvtph_ps(half)}, set1(256.0f));
}
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i used = _mm_set1_epi16(static_cast<int16_t>(0xbf80u));
  const __m128i first = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(pairs, 8), 1), used);
  const __m128i second = _mm_and_si128(_mm_srai_epi16(pairs, 1), used);
  const F even = mul({_mm256_cvtph_ps(first)}, set1(256.0f)), odd = mul({_mm256_cvtph_ps(second)}, set1(256.0f));
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(low, _mm256_castps_si256(odd.v), 0xaa));
}

TW_INLINE I load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  const __m256i index = _mm256_srli_epi32(codes.v, SHIFT);  // only its lowest three bits are used
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
  return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes.v, 28 - SHIFT)))};
}

struct Bytes {
  __m256i v;
};
TW_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
TW_INLINE void store(uint8_t* p, Bytes a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
template <int SHIFT, int BITS>
TW_INLINE Bytes field(Bytes a) {
  return {_mm256_and_si256(_mm256_srli_epi16(a.v, SHIFT), _mm256_set1_epi8((1 << BITS) - 1))};
}
template <int SHIFT>
TW_INLINE Bytes or_above(Bytes low, Bytes high) {
  return {_mm256_or_si256(low.v, _mm256_slli_epi16(high.v, SHIFT))};
}
TW_INLINE Bytes sub(Bytes a, uint8_t b) { return {_mm256_sub_epi8(a.v, _mm256_set1_epi8(static_cast<char>(b)))}; }
TW_INLINE Bytes lookup(const uint8_t* table, Bytes index) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), index.v)};
}

struct Quads {
  __m256i w;
};
TW_INLINE Quads as_quads(Bytes a) { return {a.v}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(both, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
constexpr bool kDotsBytes = true;
constexpr int kQuadZero = 128;
TW_INLINE Quads load_quads(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
TW_INLINE __m256i dot_bytes(__m256i acc, __m256i bytes, __m256i signed_bytes) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(acc, bytes, signed_bytes);
#else  // the same instruction in AVX-512's encoding, for tests on processors that have only that one
  return _mm256_dpbusd_epi32(acc, bytes, signed_bytes);
#endif
}
TW_INLINE I dot_quads(I acc, Quads q, const int8_t* x) { return {dot_bytes(acc.v, q.w, four_bytes(x))}; }
// The same with signed columns and unsigned x.
TW_INLINE I dot_quads(I acc, const uint8_t* x, Quads q) { return {dot_bytes(acc.v, four_bytes(x), q.w)}; }
using NibbleSum = I;
TW_INLINE I begin_nibbles(I dot) { return dot; }
TW_INLINE I end_nibbles(I, I sum) { return sum; }
#else
// Sums of two products must fit in 16 bits, so |w| <= 127 is the unsigned factor, and x takes w's sign.
constexpr bool kDotsBytes = false;
constexpr int kQuadZero = 0;
TW_INLINE Quads load_quads(const uint8_t* p) {
  return {_mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_set1_epi8(static_cast<char>(0x80)))};
}
TW_INLINE I dot_quads(I acc, Quads q, const int8_t* x) {
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(q.w), _mm256_sign_epi8(four_bytes(x), q.w));
  return settled({_mm256_add_epi32(acc.v, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))});
}

// Products with codes below 64: the four inputs of a column in two 16-bit sums. With codes below 16, eight such sums
// still fit in 16 bits.
struct ShortSum {
  __m256i v;
};
TW_INLINE ShortSum multiply_short(Quads w, const int8_t* x) { return {_mm256_maddubs_epi16(w.w, four_bytes(x))}; }
TW_INLINE ShortSum add(ShortSum a, ShortSum b) { return {settled({_mm256_add_epi16(a.v, b.v)}).v}; }
TW_INLINE I add_short(I acc, ShortSum sum) {
  return settled({_mm256_add_epi32(acc.v, _mm256_madd_epi16(sum.v, _mm256_set1_epi16(1)))});
}
using NibbleSum = ShortSum;
TW_INLINE NibbleSum begin_nibbles(I) { return {_mm256_setzero_si256()}; }
TW_INLINE NibbleSum dot_quads(NibbleSum acc, Quads w, const int8_t* x) { return add(acc, multiply_short(w, x)); }
TW_INLINE I end_nibbles(I dot, NibbleSum sum) { return add_short(dot, sum); }
#endif

}  // namespace tidewheel::TW_ISA
