// The vector vocabulary on 64-bit ARM: 4 floats a register, 32 registers. With the dot product extension, quads of int8
// have their own instruction. With bfloat16, pairs of bfloat16 do.
#pragma once

#include <arm_neon.h>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 4;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

struct F {
  float32x4_t v;
};

TW_INLINE F set1(float x) { return {vdupq_n_f32(x)}; }
TW_INLINE F zero() { return {vdupq_n_f32(0.0f)}; }
TW_INLINE F load(const float* p) { return {vld1q_f32(p)}; }
TW_INLINE F load(const bf16* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16))};
}
TW_INLINE F load(const f16* p) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))))};
}
TW_INLINE void store(float* p, F a) { vst1q_f32(p, a.v); }
TW_INLINE void store(bf16* p, F a) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_bf16(vcvt_bf16_f32(a.v)));
#else
  const uint32x4_t bits = vreinterpretq_u32_f32(a.v);
  const uint32x4_t tie = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(tie, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(reinterpret_cast<uint16_t*>(p), vshrn_n_u32(vbslq_u32(vceqq_f32(a.v, a.v), rounded, quiet), 16));
#endif
}
TW_INLINE void store(f16* p, F a) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(a.v)));
}
TW_INLINE F add(F a, F b) { return {vaddq_f32(a.v, b.v)}; }
TW_INLINE F sub(F a, F b) { return {vsubq_f32(a.v, b.v)}; }
TW_INLINE F mul(F a, F b) { return {vmulq_f32(a.v, b.v)}; }
TW_INLINE F div(F a, F b) { return {vdivq_f32(a.v, b.v)}; }
TW_INLINE F abs(F a) { return {vabsq_f32(a.v)}; }
// Compares and selects, because ARM's own maximum of a number and NaN does not return the second operand.
TW_INLINE F max(F a, F b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
TW_INLINE F min(F a, F b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
TW_INLINE F select_less(F a, F b, F x, F y) { return {vbslq_f32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
TW_INLINE F fma(F a, F b, F c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
TW_INLINE F round(F a) { return {vrndnq_f32(a.v)}; }
TW_INLINE F pow2(F n) {
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
}
TW_INLINE F binade(F a) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v), vdupq_n_u32(0x7f800000u)))};
}
TW_INLINE float hsum(F a) { return vaddvq_f32(a.v); }
TW_INLINE float hmax(F a) { return vmaxvq_f32(a.v); }
TW_INLINE F keep_if(F value, F x, F bound) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(value.v), vcgeq_f32(x.v, bound.v)))};
}

constexpr uint32_t kLaneBits[kLanes] = {1, 2, 4, 8};
TW_INLINE F choose(uint32_t bits, F x, F y) {
  return {vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(kLaneBits)), x.v, y.v)};
}
TW_INLINE uint32_t unordered(F a, F b) { return ~vminvq_u32(vandq_u32(vceqq_f32(a.v, a.v), vceqq_f32(b.v, b.v))); }

// For every set of lanes, the bytes of its lanes side by side, and the number of lanes.
struct Compressions {
  uint8_t bytes[16][16];
  int count[16];
};
constexpr Compressions kCompressions = [] {
  Compressions r{};
  for (int mask = 0; mask < 16; ++mask) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (int i = 0; i < 4; ++i) r.bytes[mask][4 * r.count[mask] + i] = static_cast<uint8_t>(4 * lane + i);
      ++r.count[mask];
    }
  }
  return r;
}();
TW_INLINE int compress(float* p, F a, F low, F high) {
  const uint32x4_t within = vandq_u32(vcgeq_f32(a.v, low.v), vcleq_f32(a.v, high.v));
  const uint32_t mask = vaddvq_u32(vandq_u32(within, vld1q_u32(kLaneBits)));
  vst1q_u8(reinterpret_cast<uint8_t*>(p), vqtbl1q_u8(vreinterpretq_u8_f32(a.v), vld1q_u8(kCompressions.bytes[mask])));
  return kCompressions.count[mask];
}

TW_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
TW_INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

// Four bytes in the first lane. Multiplications can take one lane as the factor for all lanes; copying it to all lanes
// would cost an instruction slot.
TW_INLINE float32x2_t first_lane(const void* p) {
  float four;
  std::memcpy(&four, p, 4);
  return float32x2_t{four, 0.0f};
}

TW_INLINE F dot_single(F acc, F b, const float* a) { return {vfmaq_lane_f32(acc.v, b.v, first_lane(a), 0)}; }

// A 256th of each e4m3 number, through binary16: the shift copies the sign into bit 14, and the mask clears it there.
// The code for NaN arrives as 1.875.
TW_INLINE float32x4_t cached_e4m3(uint16x4_t half) {
  const uint16x4_t shifted = vreinterpret_u16_s16(vshr_n_s16(vreinterpret_s16_u16(half), 1));
  const float32x4_t x = vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(shifted, vdup_n_u16(0xbf80))));
  return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), vceqq_f32(x, vdupq_n_f32(1.875f))));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// The processor adds two products to each other, and their sum to the accumulator. Each addition rounds to odd and
// takes subnormal numbers for 0. This is the arithmetic of FPCR.EBF = 0, the setting that every process starts with.
using BF16Activation = bf16;
struct Pairs {
  bfloat16x8_t v;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  return {vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))};
}
// bfloat16 holds every e5m2 and every e4m3 number exactly.
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const uint16x4_t pairs = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  const float32x4_t even = vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(pairs, 8)));
  const float32x4_t odd = vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(pairs, vdup_n_u16(0xff00))));
  return {vreinterpretq_bf16_u16(vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd)))};
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const uint16x4_t pairs = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  const float32x4_t even = cached_e4m3(vshl_n_u16(pairs, 8)), odd = cached_e4m3(pairs);
  return {vreinterpretq_bf16_u16(vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd)))};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(wide));
  return {vreinterpretq_bf16_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)))};
}
TW_INLINE Pairs drop_odd(Pairs b) {
  const uint32x4_t even = vandq_u32(vreinterpretq_u32_bf16(b.v), vdupq_n_u32(0xffff));
  return {vreinterpretq_bf16_u32(even)};
}
TW_INLINE F dot_pairs(F acc, Pairs b, const bf16* a) {
  return {vbfdotq_lane_f32(acc.v, b.v, vreinterpret_bf16_f32(first_lane(a)), 0)};
}
#else
using BF16Activation = float;
struct Pairs {
  F even, odd;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  return {{vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16))},
          {vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)))}};
}
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const uint16x4_t pairs = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  return {{vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(pairs, 8)))},
          {vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(pairs, vdup_n_u16(0xff00))))}};
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const uint16x4_t pairs = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  return {{cached_e4m3(vshl_n_u16(pairs, 8))}, {cached_e4m3(pairs)}};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const int32x4_t pairs = vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)));
  return {{vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(pairs, 16), 16))}, {vcvtq_f32_s32(vshrq_n_s32(pairs, 16))}};
}
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) {
  const float32x2_t pair = vld1_f32(a);
  return {vfmaq_lane_f32(vfmaq_lane_f32(acc.v, b.even.v, pair, 0), b.odd.v, pair, 1)};
}
#endif

struct I {
  int32x4_t v;
};
TW_INLINE I set1_int(int x) { return {vdupq_n_s32(x)}; }
TW_INLINE I add(I a, I b) { return {vaddq_s32(a.v, b.v)}; }
TW_INLINE int hsum(I a) { return vaddvq_s32(a.v); }
TW_INLINE F to_floats(I a) { return {vcvtq_f32_s32(a.v)}; }
TW_INLINE F small_to_floats(I a) { return to_floats(a); }
TW_INLINE I round_to_int(F a) { return {vcvtnq_s32_f32(a.v)}; }
TW_INLINE void store(int8_t* p, I a) {
  const int16x4_t words = vqmovn_s32(a.v);
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  vst1_lane_s32(reinterpret_cast<int32_t*>(p), vreinterpret_s32_s8(bytes), 0);
}
TW_INLINE void store(uint8_t* p, I a) {
  const uint16x4_t words = vqmovun_s32(a.v);
  const uint8x8_t bytes = vqmovn_u16(vcombine_u16(words, words));
  vst1_lane_u32(reinterpret_cast<uint32_t*>(p), vreinterpret_u32_u8(bytes), 0);
}

// Four bytes; the others are 0.
TW_INLINE uint8x8_t load_four(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpret_u8_u32(uint32x2_t{four, 0});
}
struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const int32x4_t bytes = vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))));
  return {{vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(bytes, 28), 28))}, {vcvtq_f32_s32(vshrq_n_s32(bytes, 4))}};
}

TW_INLINE F load(const uint8_t* p) { return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))))}; }
TW_INLINE F load(const int8_t* p) {
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p))))))};
}

// e4m3 numbers, through binary16, which holds a 256th of each: the arguments have its sign and lower bits in place.
TW_INLINE float32x4_t widened(int16x4_t signs_and_bits) {
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(signs_and_bits), vdup_n_u16(0xbf80));
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 256.0f);
}
TW_INLINE F load(const e4m3* p) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_four(p)));
  return {widened(vshl_n_s16(vget_low_s16(wide), 7))};
}
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const int16x4_t pairs = vreinterpret_s16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(from)));
  const float32x4_t even = widened(vshr_n_s16(vshl_n_s16(pairs, 8), 1)), odd = widened(vshr_n_s16(pairs, 1));
  vst1q_u16(reinterpret_cast<uint16_t*>(to), vtrn2q_u16(vreinterpretq_u16_f32(even), vreinterpretq_u16_f32(odd)));
}

TW_INLINE I load(const uint32_t* p) { return {vreinterpretq_s32_u32(vld1q_u32(p))}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  uint32x4_t index = vreinterpretq_u32_s32(codes.v);
  if constexpr (SHIFT > 0) index = vshrq_n_u32(index, SHIFT);
  index = vandq_u32(index, vdupq_n_u32(15));
  // The positions of each number's four bytes in the table.
  const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), index, 0x04040404);
  const auto* p = reinterpret_cast<const uint8_t*>(table);
  const uint8x16x4_t all = {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
  return {vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_u32(bytes)))};
}

struct Bytes {
  uint8x16_t v;
};
TW_INLINE Bytes load_bytes(const uint8_t* p) { return {vld1q_u8(p)}; }
TW_INLINE void store(uint8_t* p, Bytes a) { vst1q_u8(p, a.v); }
template <int SHIFT, int BITS>
TW_INLINE Bytes field(Bytes a) {
  if constexpr (SHIFT > 0) a.v = vshrq_n_u8(a.v, SHIFT);
  if constexpr (SHIFT + BITS < 8) a.v = vandq_u8(a.v, vdupq_n_u8((1 << BITS) - 1));
  return a;
}
template <int SHIFT>
TW_INLINE Bytes or_above(Bytes low, Bytes high) {
  return {vorrq_u8(low.v, vshlq_n_u8(high.v, SHIFT))};
}
TW_INLINE Bytes sub(Bytes a, uint8_t b) { return {vsubq_u8(a.v, vdupq_n_u8(b))}; }
TW_INLINE Bytes lookup(const uint8_t* table, Bytes index) { return {vqtbl1q_u8(vld1q_u8(table), index.v)}; }

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int kQuadZero = 128;
struct Quads {
  uint8x16_t v;
};
TW_INLINE Quads load_quads(const uint8_t* p) { return {vld1q_u8(p)}; }
TW_INLINE Quads as_quads(Bytes a) { return {a.v}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const uint8x16_t both = vld1q_u8(p);
  low = {vandq_u8(both, vdupq_n_u8(15))};
  high = {vshrq_n_u8(both, 4)};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* x) {
  return {vusdotq_lane_s32(acc.v, w.v, vreinterpret_s8_f32(first_lane(x)), 0)};
}
// The same with signed columns and unsigned x.
TW_INLINE I dot_quads(I acc, const uint8_t* x, Quads w) {
  return {vsudotq_lane_s32(acc.v, vreinterpretq_s8_u8(w.v), vreinterpret_u8_f32(first_lane(x)), 0)};
}
// Two vectors of quads, the second of the inputs after the first's, as a matrix product takes them: eight inputs of two
// columns, then of the other two.
TW_INLINE void pair_quads(Bytes& first, Bytes& second) {
  const uint32x4_t a = vreinterpretq_u32_u8(first.v), b = vreinterpretq_u32_u8(second.v);
  first = {vreinterpretq_u8_u32(vzip1q_u32(a, b))};
  second = {vreinterpretq_u8_u32(vzip2q_u32(a, b))};
}
#else
// Both sides of these dot products are signed. packing.h stores weights as signed bytes too.
constexpr int kQuadZero = 0;
struct Quads {
  int8x16_t v;
};
TW_INLINE Quads load_quads(const uint8_t* p) { return {vreinterpretq_s8_u8(vld1q_u8(p))}; }
TW_INLINE Quads as_quads(Bytes a) { return {vreinterpretq_s8_u8(a.v)}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const uint8x16_t both = vld1q_u8(p);
  low = {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)))};
  high = {vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
}
#ifdef __ARM_FEATURE_DOTPROD
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* x) {
  return {vdotq_lane_s32(acc.v, w.v, vreinterpret_s8_f32(first_lane(x)), 0)};
}
// With signed columns and unsigned x. Columns plus 128 are unsigned, too. What the 128 add is the same for all columns,
// so the compiler computes it once for a row.
TW_INLINE I dot_quads(I acc, const uint8_t* x, Quads w) {
  const uint8x8_t four = vreinterpret_u8_f32(first_lane(x));
  const uint8x16_t offset = vdupq_n_u8(128), columns = veorq_u8(vreinterpretq_u8_s8(w.v), offset);
  const uint32x4_t rest = vsubq_u32(vreinterpretq_u32_s32(acc.v), vdotq_lane_u32(vdupq_n_u32(0), offset, four, 0));
  return {vreinterpretq_s32_u32(vdotq_lane_u32(rest, columns, four, 0))};
}
// Handles the rows from R on. One load brings the quads of four rows, or of two, and each dot product takes its own
// lane.
template <int ROWS, int R = 0>
TW_INLINE void dot_rows(I (&acc)[ROWS], Quads w, const int8_t (*x)[4]) {
  if constexpr (R + 4 <= ROWS) {
    const int8x16_t four = vld1q_s8(x[R]);
    acc[R].v = vdotq_laneq_s32(acc[R].v, w.v, four, 0);
    acc[R + 1].v = vdotq_laneq_s32(acc[R + 1].v, w.v, four, 1);
    acc[R + 2].v = vdotq_laneq_s32(acc[R + 2].v, w.v, four, 2);
    acc[R + 3].v = vdotq_laneq_s32(acc[R + 3].v, w.v, four, 3);
    dot_rows<ROWS, R + 4>(acc, w, x);
  } else if constexpr (R + 2 <= ROWS) {
    const int8x8_t two = vld1_s8(x[R]);
    acc[R].v = vdotq_lane_s32(acc[R].v, w.v, two, 0);
    acc[R + 1].v = vdotq_lane_s32(acc[R + 1].v, w.v, two, 1);
    dot_rows<ROWS, R + 2>(acc, w, x);
  } else if constexpr (R < ROWS) {
    acc[R] = dot_quads(acc[R], w, x[R]);
  }
}
#else
TW_INLINE int8x16_t four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
// Sums of two products fit in 16 bits, because neither factor is above 127.
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* p) {
  const int8x16_t x = four_bytes(p);
  const int16x8_t low = vmull_s8(vget_low_s8(w.v), vget_low_s8(x)), high = vmull_high_s8(w.v, x);
  return {vpadalq_s16(acc.v, vpaddq_s16(low, high))};
}
#endif
#endif

#ifdef __ARM_FEATURE_DOTPROD
constexpr bool kDotsBytes = true;
TW_INLINE I settled(I a) { return a; }
using NibbleSum = I;
TW_INLINE I begin_nibbles(I dot) { return dot; }
TW_INLINE I end_nibbles(I, I sum) { return sum; }
#else
constexpr bool kDotsBytes = false;  // see attention_bytes.h
// Products of nibbles are so small that a group's sums fit in 16 bits: `low` for the first two columns, `high` for the
// others.
struct NibbleSum {
  int16x8_t low, high;
};
TW_INLINE NibbleSum begin_nibbles(I) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
TW_INLINE NibbleSum dot_quads(NibbleSum sum, Quads w, const int8_t* p) {
  const int8x16_t x = four_bytes(p);
  return {vmlal_s8(sum.low, vget_low_s8(w.v), vget_low_s8(x)), vmlal_high_s8(sum.high, w.v, x)};
}
TW_INLINE I end_nibbles(I dot, NibbleSum sum) { return {vpadalq_s16(dot.v, vpaddq_s16(sum.low, sum.high))}; }
#endif

}  // namespace tidewheel::TW_ISA
