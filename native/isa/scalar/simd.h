// The vector vocabulary in plain C++: eight floats that any compiler can put into whatever registers there are.
#pragma once

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
TW_INLINE F max(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
TW_INLINE F min(F a, F b) { F r; TW_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
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

// kLanes pairs of bfloat16, or of what bfloat16 holds exactly, even elements and odd elements apart; activations stay float, rounded to bfloat16.
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
// The pairs with their odd elements taken as 0.
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) { return fma(b.odd, set1(a[1]), fma(b.even, set1(a[0]), acc)); }

TW_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
// Into the second-level cache: for what is wanted only after more than the first level holds.
TW_INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

// acc[i] += sum over four of u8 * s8.
struct I {
  int v[kLanes];
};
TW_INLINE I zero_int() { I r; TW_EACH r.v[i] = 0; return r; }
TW_INLINE I dot_i8(I acc, const uint8_t* u, const int8_t* s) {
  TW_EACH {
    for (int j = 0; j < 4; ++j) acc.v[i] += int{u[4 * i + j]} * int{s[4 * i + j]};
  }
  return acc;
}
TW_INLINE int first(I a) { return a.v[0]; }

#undef TW_EACH

}  // namespace tidewheel::TW_ISA
