// The vector vocabulary in plain C++: vectors of eight floats, for which any compiler can use the registers that there
// are.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 8;
constexpr int kTileRows = 4;     // GEMM micro-tile: rows ...
constexpr int kTileVectors = 1;  // ... by vectors of columns

struct F {
  float v[kLanes];
};

#define TW_EACH for (int i = 0; i < kLanes; ++i)

TW_INLINE F set1(float x) { F r; TW_EACH r.v[i] = x; return r; }
TW_INLINE F zero() { return set1(0.0f); }
TW_INLINE F load(const float* p) { F r; TW_EACH r.v[i] = p[i]; return r; }
TW_INLINE F load(const bf16* p) { F r; TW_EACH r.v[i] = to_float(p[i]); return r; }
TW_INLINE F load(const f16* p) { F r; TW_EACH r.v[i] = to_float(p[i]); return r; }
TW_INLINE void store(float* p, F a) { TW_EACH p[i] = a.v[i]; }
TW_INLINE void store(bf16* p, F a) { TW_EACH p[i] = to_bf16(a.v[i]); }
TW_INLINE void store(f16* p, F a) { TW_EACH p[i] = to_f16(a.v[i]); }
TW_INLINE F add(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
TW_INLINE F sub(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
TW_INLINE F mul(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
TW_INLINE F div(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
TW_INLINE F abs(F a) { F r; TW_EACH r.v[i] = std::fabs(a.v[i]); return r; }
TW_INLINE F max(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
TW_INLINE F min(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
// a < b ? x : y
TW_INLINE F select_less(F a, F b, F x, F y) { F r; TW_EACH r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]; return r; }
TW_INLINE F fma(F a, F b, F c) { F r; TW_EACH r.v[i] = a.v[i] * b.v[i] + c.v[i]; return r; }

TW_INLINE F round(F a) {
  const F magic = set1(12582912.0f);  // 1.5 * 2^23
  return sub(add(a, magic), magic);
}

// 2^n for integral n in [-126, 127].
TW_INLINE F pow2(F n) {
  F r;
  TW_EACH r.v[i] = bits_float(static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23);
  return r;
}

// The power of two in the exponent of |x|; infinity for infinity and NaN.
TW_INLINE F binade(F a) {
  F r;
  TW_EACH r.v[i] = bits_float(float_bits(a.v[i]) & 0x7f800000u);
  return r;
}

TW_INLINE float hsum(F a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}

TW_INLINE float hmax(F a) {
  float m = a.v[0];
  TW_EACH m = m > a.v[i] ? m : a.v[i];
  return m;
}

// `value` where x >= bound, else 0.
TW_INLINE F keep_if(F value, F x, F bound) {
  F r;  // with masks, because a compiler would turn a condition into a branch
  TW_EACH r.v[i] = bits_float(float_bits(value.v[i]) & (0u - uint32_t{x.v[i] >= bound.v[i]}));
  return r;
}
// Lane i is x's where bit i is set, else y's.
TW_INLINE F choose(uint32_t bits, F x, F y) {
  F r;
  TW_EACH {
    const uint32_t chosen = 0u - (bits >> i & 1u);
    r.v[i] = bits_float((float_bits(x.v[i]) & chosen) | (float_bits(y.v[i]) & ~chosen));
  }
  return r;
}
// Nonzero if a lane of a or b is NaN.
TW_INLINE uint32_t unordered(F a, F b) {
  uint32_t r = 0;
  TW_EACH r |= (a.v[i] != a.v[i]) | (b.v[i] != b.v[i]);
  return r;
}
// Writes the lanes within [low, high] side by side, then anything up to kLanes numbers in all. Returns the number of
// these lanes.
TW_INLINE int compress(float* p, F a, F low, F high) {
  int n = 0;
  TW_EACH {
    p[n] = a.v[i];
    n += (a.v[i] >= low.v[i]) & (a.v[i] <= high.v[i]);
  }
  return n;
}

// acc += b * a[0].
TW_INLINE F dot_single(F acc, F b, const float* a) { return fma(b, set1(*a), acc); }

// kLanes pairs of bfloat16, or of numbers that bfloat16 holds exactly, with even and odd elements apart. Activations
// stay float, rounded to bfloat16.
using BF16Activation = float;
struct Pairs {
  F even, odd;
};
template <typename T>  // bf16, e5m2 or int8_t
TW_INLINE Pairs load_pairs(const T* p) {
  Pairs r;
  TW_EACH {
    r.even.v[i] = to_float(p[2 * i]);
    r.odd.v[i] = to_float(p[2 * i + 1]);
  }
  return r;
}
// A 256th of a number in an e4m3 cache.
TW_INLINE float cached_to_float(e4m3 x) {
  return x.bits == kE4m3Nan ? bits_float(0x7fc00000u) : to_float(x) * 0x1p-8f;
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  Pairs r;
  TW_EACH {
    r.even.v[i] = cached_to_float(p[2 * i]);
    r.odd.v[i] = cached_to_float(p[2 * i + 1]);
  }
  return r;
}
// The pairs with their odd elements taken as 0.
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) { return fma(b.odd, set1(a[1]), fma(b.even, set1(a[0]), acc)); }

TW_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
// Prefetches into the L2 cache, for data that is needed only after more than the L1 cache holds.
TW_INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

struct I {
  int v[kLanes];
};
TW_INLINE I set1_int(int x) { I r; TW_EACH r.v[i] = x; return r; }
TW_INLINE I add(I a, I b) { I r; TW_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
TW_INLINE int hsum(I a) { int sum = 0; TW_EACH sum += a.v[i]; return sum; }
TW_INLINE F to_floats(I a) { F r; TW_EACH r.v[i] = static_cast<float>(a.v[i]); return r; }
// Only for numbers that fit in 22 bits.
TW_INLINE F small_to_floats(I a) { return to_floats(a); }
// Rounds numbers that fit in 22 bits to nearest, ties to even. NaN gives some number.
TW_INLINE I round_to_int(F a) {
  const F rounded = round(min(max(a, set1(-4194303.0f)), set1(4194303.0f)));
  I r;
  TW_EACH r.v[i] = static_cast<int>(rounded.v[i]);
  return r;
}
// Only for numbers that fit in 8 bits.
TW_INLINE void store(int8_t* p, I a) { TW_EACH p[i] = static_cast<int8_t>(a.v[i]); }

// kLanes columns of four bytes. A byte that `load_quads` reads stands for its value minus 128. Dot products compute
// with that value plus kQuadZero. Nibbles are computed with as they are, 0 to 15.
constexpr bool kDotsBytes = false;  // see attention_bytes.h
constexpr int kQuadZero = 128;
struct Quads {
  uint8_t v[4 * kLanes];
};
TW_INLINE Quads load_quads(const uint8_t* p) {
  Quads r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    low.v[i] = p[i] & 15;
    high.v[i] = p[i] >> 4;
  }
}
// acc[i] += the sum over column i's four of w * x, exact.
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* x) {
  uint32_t fours[kLanes];
  std::memcpy(fours, w.v, sizeof fours);
  for (int j = 0; j < 4; ++j) {  // this order lets all lanes do the same at once
    const int shift = std::endian::native == std::endian::little ? 8 * j : 24 - 8 * j, xj = x[j];
    TW_EACH acc.v[i] += static_cast<int>(fours[i] >> shift & 255) * xj;
  }
  return acc;
}

// kLanes bytes with two numbers of 4 bits each: the lower numbers and the upper ones.
struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  NibbleFloats r;
  TW_EACH {
    r.low.v[i] = static_cast<float>(((p[i] & 15) ^ 8) - 8);
    r.high.v[i] = static_cast<float>((p[i] >> 4 ^ 8) - 8);
  }
  return r;
}

// kLanes integers.
TW_INLINE F load(const uint8_t* p) { F r; TW_EACH r.v[i] = static_cast<float>(p[i]); return r; }
TW_INLINE F load(const int8_t* p) { F r; TW_EACH r.v[i] = static_cast<float>(p[i]); return r; }

TW_INLINE F load(const e4m3* p) { F r; TW_EACH r.v[i] = to_float(p[i]); return r; }
// Converts 2 * kLanes numbers, which bfloat16 holds exactly.
TW_INLINE void widen(const e4m3* from, bf16* to) {
  for (int i = 0; i < 2 * kLanes; ++i) to[i] = {static_cast<uint16_t>(float_bits(to_float(from[i])) >> 16)};
}

TW_INLINE I load(const uint32_t* p) { I r; TW_EACH r.v[i] = static_cast<int>(p[i]); return r; }
// For each lane, the table's number at the index in its four bits from bit SHIFT on.
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  F r;
  TW_EACH r.v[i] = table[static_cast<uint32_t>(codes.v[i]) >> SHIFT & 15];
  return r;
}

// Four bytes for each of kLanes columns, from which codes of a few bits are extracted.
struct Bytes {
  uint8_t v[4 * kLanes];
};
#define TW_EACH_BYTE for (int i = 0; i < 4 * kLanes; ++i)
TW_INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, sizeof r.v); return r; }
TW_INLINE void store(uint8_t* p, Bytes a) { std::memcpy(p, a.v, sizeof a.v); }
// BITS bits of every byte, from bit SHIFT on.
template <int SHIFT, int BITS>
TW_INLINE Bytes field(Bytes a) {
  Bytes r;
  TW_EACH_BYTE r.v[i] = static_cast<uint8_t>(a.v[i] >> SHIFT & ((1 << BITS) - 1));
  return r;
}
// low | high << SHIFT. The caller makes sure that no bit leaves its byte.
template <int SHIFT>
TW_INLINE Bytes or_above(Bytes low, Bytes high) {
  Bytes r;
  TW_EACH_BYTE r.v[i] = static_cast<uint8_t>(low.v[i] | high.v[i] << SHIFT);
  return r;
}
TW_INLINE Bytes sub(Bytes a, uint8_t b) {
  Bytes r;
  TW_EACH_BYTE r.v[i] = static_cast<uint8_t>(a.v[i] - b);
  return r;
}
// table[index], for a table of 16 bytes.
TW_INLINE Bytes lookup(const uint8_t* table, Bytes index) {
  Bytes r;
  TW_EACH_BYTE r.v[i] = table[index.v[i]];
  return r;
}
#undef TW_EACH_BYTE
// Bytes as factors, unchanged: unsigned if kQuadZero is 128, otherwise signed.
TW_INLINE Quads as_quads(Bytes a) {
  Quads r;
  std::memcpy(r.v, a.v, sizeof r.v);
  return r;
}

// The type that sums the dot products of a group's nibbles. These sums are small; end_nibbles adds them to the sum so
// far.
using NibbleSum = I;
TW_INLINE I begin_nibbles(I dot) { return dot; }
TW_INLINE I end_nibbles(I, I sum) { return sum; }

#undef TW_EACH

}  // namespace tidewheel::TW_ISA
