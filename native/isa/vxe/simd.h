// The vector vocabulary on IBM Z with vector enhancements facility 1 (z14): 4 floats a register, 32 registers,
// big-endian. With facility 2 (z15: the vxe2 level is compiled with it), one instruction converts integers to floats.
#pragma once

#include <vecintrin.h>

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 4;
constexpr int kTileRows = 8;
constexpr int kTileVectors = 2;

using Floats = __vector float;
using Words = __vector unsigned int;
using Ints = __vector signed int;
using Halves = __vector unsigned short;
using Shorts = __vector signed short;
using Bytes16 = __vector unsigned char;
using SignedBytes = __vector signed char;

struct F {
  Floats v;
};

template <typename Vector>
TW_INLINE Vector load_as(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// The same 8 bytes in both halves.
template <typename Vector>
TW_INLINE Vector load_eight(const void* p) {
  unsigned long long eight;
  std::memcpy(&eight, p, sizeof eight);
  return (Vector)vec_splats(eight);
}
TW_INLINE void store_eight(void* p, Halves a) {
  const unsigned long long eight = ((__vector unsigned long long)a)[0];
  std::memcpy(p, &eight, sizeof eight);
}
TW_INLINE Words words(uint32_t x) { return vec_splats(x); }

TW_INLINE F set1(float x) { return {vec_splats(x)}; }
TW_INLINE F zero() { return {vec_splats(0.0f)}; }
TW_INLINE F load(const float* p) { return {load_as<Floats>(p)}; }
TW_INLINE F load(const bf16* p) { return {(Floats)vec_mergeh(load_eight<Halves>(p), vec_splats(uint16_t{0}))}; }
// `bits` has binary16's sign in bit 31 and its other 15 bits in bits 27 to 13. The exponent is too small by 112, and by
// more for infinity and NaN.
TW_INLINE F widened(Words bits) {
  const Words top = words(0x0f800000), special = (Words)vec_cmpeq(bits & top, top);
  const Floats scaled = (Floats)bits * vec_splats(0x1p112f);
  return {(Floats)((Words)scaled | (special & words(0x7f800000)))};
}
TW_INLINE F load(const f16* p) {
  const Words wide = (Words)vec_unpackh(load_eight<Shorts>(p));  // with the sign in all upper bits
  return widened((wide << 13) & words(0x8fffe000));
}
TW_INLINE void store(float* p, F a) { std::memcpy(p, &a.v, sizeof a.v); }
TW_INLINE void store(bf16* p, F a) {
  const Words bits = (Words)a.v;
  const Words rounded = (bits + (bits >> 16 & words(1)) + words(0x7fff)) >> 16;
  const Words half = vec_sel(bits >> 16 | words(0x40), rounded, (Words)vec_cmpeq(a.v, a.v));
  store_eight(p, vec_pack(half, half));
}
TW_INLINE void store(f16* p, F a) {  // as to_f16 does it
  const Words bits = (Words)a.v, rest = bits & words(0x7fffffff);
  const Words normal = (rest + words(0xfff) + (rest >> 13 & words(1)) - words(0x38000000)) >> 13;
  const Words subnormal = (Words)((Floats)rest + vec_splats(0.5f)) - words(0x3f000000);
  Words half = vec_sel(normal, subnormal, (Words)vec_cmpgt(words(0x38800000), rest));
  half = vec_sel(half, words(0x7c00), (Words)vec_cmpgt(rest, words(0x477fefff)));
  half = vec_sel(half, words(0x7e00), (Words)vec_cmpgt(rest, words(0x7f800000)));
  half |= bits >> 16 & words(0x8000);
  store_eight(p, vec_pack(half, half));
}
TW_INLINE F add(F a, F b) { return {a.v + b.v}; }
TW_INLINE F sub(F a, F b) { return {a.v - b.v}; }
TW_INLINE F mul(F a, F b) { return {a.v * b.v}; }
TW_INLINE F div(F a, F b) { return {a.v / b.v}; }
TW_INLINE F abs(F a) { return {vec_abs(a.v)}; }
// Mode 2 is C's a > b ? a : b, which gives b if either is NaN.
TW_INLINE F max(F a, F b) { return {__builtin_s390_vfmaxsb(a.v, b.v, 2)}; }
TW_INLINE F min(F a, F b) { return {__builtin_s390_vfminsb(a.v, b.v, 2)}; }
TW_INLINE F select_less(F a, F b, F x, F y) { return {vec_sel(y.v, x.v, vec_cmplt(a.v, b.v))}; }
TW_INLINE F fma(F a, F b, F c) { return {vec_madd(a.v, b.v, c.v)}; }
TW_INLINE F round(F a) { return {vec_rint(a.v)}; }

// Added to a float of at most 22 integer bits, this leaves the integer in the low bits.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t kMagicBits = 0x4b400000;

// The shift removes the bits of the magic number.
TW_INLINE F pow2(F n) { return {(Floats)(((Words)(n.v + vec_splats(kMagic)) + words(127)) << 23)}; }
TW_INLINE F binade(F a) { return {(Floats)((Words)a.v & words(0x7f800000))}; }

TW_INLINE float hsum(F a) {
  const Floats two = a.v + vec_sld(a.v, a.v, 8);
  return two[0] + two[1];
}
TW_INLINE float hmax(F a) {
  const F two = max(a, {vec_sld(a.v, a.v, 8)});
  return max(two, {vec_sld(two.v, two.v, 4)}).v[0];
}
TW_INLINE F keep_if(F value, F x, F bound) {
  return {(Floats)((Words)value.v & (Words)vec_cmpge(x.v, bound.v))};
}
TW_INLINE F choose(uint32_t bits, F x, F y) {
  const Words lanes = {1, 2, 4, 8};
  return {vec_sel(y.v, x.v, vec_cmpeq(words(bits) & lanes, lanes))};
}
TW_INLINE uint32_t unordered(F a, F b) {
  const Words both = (Words)vec_cmpeq(a.v, a.v) & (Words)vec_cmpeq(b.v, b.v);
  const auto ordered = (__vector unsigned long long)both;
  return (ordered[0] & ordered[1]) != ~0ull;
}

// For every choice of lanes, with the first lane in the highest bit: the bytes of the chosen lanes, side by side.
struct ChosenBytes {
  uint8_t order[16][16];
};
constexpr ChosenBytes kChosenBytes = [] {
  ChosenBytes r{};
  for (int mask = 0; mask < 16; ++mask) {
    for (int lane = 0, n = 0; lane < 4; ++lane) {
      if (!(mask << lane & 8)) continue;
      for (int byte = 0; byte < 4; ++byte) r.order[mask][n++] = static_cast<uint8_t>(4 * lane + byte);
    }
  }
  return r;
}();
TW_INLINE int compress(float* p, F a, F low, F high) {
  const Bytes16 within = (Bytes16)((Words)vec_cmpge(a.v, low.v) & (Words)vec_cmple(a.v, high.v));
  constexpr uint8_t kNone = 128;
  const Bytes16 lanes = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone,
                       kNone, kNone, kNone, kNone, 0,     32,    64,    96};
  const auto mask = static_cast<unsigned>(vec_bperm_u128(within, lanes)[0]);
  store(p, {vec_perm(a.v, a.v, load_as<Bytes16>(kChosenBytes.order[mask]))});
  return __builtin_popcount(mask);
}

#if __ARCH__ >= 13
TW_INLINE F floats(Ints a) { return {vec_float(a)}; }
TW_INLINE F small_floats(Ints a) { return floats(a); }
#else
TW_INLINE F small_floats(Ints a) { return {(Floats)((Words)a + words(kMagicBits)) - vec_splats(kMagic)}; }
// Both halves are exact. Only the last step rounds.
TW_INLINE F floats(Ints a) {
  const F high = small_floats(a >> 16);
  const F low = {(Floats)(((Words)a & words(0xffff)) | words(0x4b000000)) - vec_splats(0x1p23f)};
  return fma(high, set1(65536.0f), low);
}
#endif

TW_INLINE F dot_single(F acc, F b, const float* a) { return fma(b, set1(*a), acc); }

using BF16Activation = float;
struct Pairs {
  F even, odd;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  const Words pairs = load_as<Words>(p);
  return {{(Floats)(pairs & words(0xffff0000))}, {(Floats)(pairs << 16)}};
}
// Two bytes in the two halves of a word, each sign-extended.
TW_INLINE Words signed_pairs(const void* p) { return (Words)vec_unpackh(load_eight<SignedBytes>(p)); }
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const Words pairs = signed_pairs(p), used = words(0x8fe00000);
  return {widened((pairs << 5) & used), widened((pairs << 21) & used)};
}
// A 256th of each number in an e4m3 cache. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The
// exponent is too small by 112.
TW_INLINE F cached_e4m3(Words bits) {
  const Floats x = (Floats)(bits & words(0x87f00000)) * vec_splats(0x1p112f);
  return {(Floats)((Words)x | (Words)vec_cmpeq(x, vec_splats(1.875f)))};  // the code for NaN
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const Words pairs = signed_pairs(p);
  return {cached_e4m3(pairs << 4), cached_e4m3(pairs << 20)};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const Ints pairs = (Ints)signed_pairs(p);
  return {small_floats(pairs >> 16), small_floats((Ints)((Words)pairs << 16) >> 16)};
}
TW_INLINE Pairs drop_odd(Pairs b) { return {b.even, zero()}; }
TW_INLINE F dot_pairs(F acc, Pairs b, const float* a) { return fma(b.odd, set1(a[1]), fma(b.even, set1(a[0]), acc)); }

TW_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
TW_INLINE void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

struct I {
  Ints v;
};
TW_INLINE I set1_int(int x) { return {vec_splats(x)}; }
TW_INLINE I add(I a, I b) { return {a.v + b.v}; }
TW_INLINE int hsum(I a) {
  const Ints two = a.v + vec_sld(a.v, a.v, 8);
  return two[0] + two[1];
}
TW_INLINE F to_floats(I a) { return floats(a.v); }
TW_INLINE F small_to_floats(I a) { return small_floats(a.v); }
TW_INLINE I round_to_int(F a) {
  const F bounded = min(max(a, set1(-4194303.0f)), set1(4194303.0f));
  return {(Ints)((Words)(bounded.v + vec_splats(kMagic)) - words(kMagicBits))};
}
TW_INLINE void store(int8_t* p, I a) {
  const Shorts halves = vec_pack(a.v, a.v);
  const Words bytes = (Words)vec_pack(halves, halves);
  const uint32_t four = bytes[0];
  std::memcpy(p, &four, sizeof four);
}

struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const Ints bytes = vec_unpackh(vec_unpackh((SignedBytes)words(four)));
  return {small_floats((Ints)((Words)bytes << 28) >> 28), small_floats(bytes >> 4)};
}

// Four bytes, each in a word.
TW_INLINE F load(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const Halves halves = (Halves)vec_mergeh(vec_splats(uint8_t{0}), (Bytes16)words(four));
  return small_floats((Ints)vec_mergeh(vec_splats(uint16_t{0}), halves));
}
TW_INLINE F load(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return small_floats(vec_unpackh(vec_unpackh((SignedBytes)words(four))));
}

// e4m3 numbers. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The exponent is too small by 120.
TW_INLINE F widened_e4m3(Words bits) {
  return {(Floats)(bits & words(0x87f00000)) * vec_splats(0x1p120f)};
}
TW_INLINE F load(const e4m3* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return widened_e4m3((Words)vec_unpackh(vec_unpackh((SignedBytes)words(four))) << 20);
}
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const Words pairs = signed_pairs(from);
  const F even = widened_e4m3(pairs << 4), odd = widened_e4m3(pairs << 20);
  const Words both = ((Words)even.v & words(0xffff0000)) | (Words)odd.v >> 16;
  std::memcpy(to, &both, sizeof both);
}

TW_INLINE I load(const uint32_t* p) { return {load_as<Ints>(p)}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  const Words index = (Words)codes.v >> SHIFT;
  // The positions of each number's four bytes within its half of the table.
  const Bytes16 bytes = (Bytes16)((index & words(7)) * words(0x04040404) + words(0x00010203));
  const auto half = [&](int i) {
    return (Words)vec_perm(load_as<Bytes16>(table + i), load_as<Bytes16>(table + i + 4), bytes);
  };
  return {(Floats)vec_sel(half(0), half(8), (Words)vec_cmpgt(index & words(8), words(0)))};
}

struct Bytes {
  Bytes16 v;
};
TW_INLINE Bytes load_bytes(const uint8_t* p) { return {load_as<Bytes16>(p)}; }
TW_INLINE void store(uint8_t* p, Bytes a) { std::memcpy(p, &a.v, sizeof a.v); }
template <int SHIFT, int BITS>
TW_INLINE Bytes field(Bytes a) {
  return {(a.v >> SHIFT) & vec_splats(static_cast<uint8_t>((1 << BITS) - 1))};
}
template <int SHIFT>
TW_INLINE Bytes or_above(Bytes low, Bytes high) {
  return {low.v | (high.v << SHIFT)};
}
TW_INLINE Bytes sub(Bytes a, uint8_t b) { return {a.v - vec_splats(b)}; }
TW_INLINE Bytes lookup(const uint8_t* table, Bytes index) {
  const Bytes16 entries = load_as<Bytes16>(table);
  return {vec_perm(entries, entries, index.v)};
}

// Sums of two products must fit in 16 bits, so weights are signed and have no more bits than activations.
constexpr bool kDotsBytes = false;  // see attention_bytes.h
constexpr int kQuadZero = 0;
struct Quads {
  SignedBytes v;
};
TW_INLINE Quads load_quads(const uint8_t* p) {
  return {(SignedBytes)(load_as<Bytes16>(p) ^ vec_splats(uint8_t{0x80}))};
}
TW_INLINE Quads as_quads(Bytes a) { return {(SignedBytes)a.v}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const Bytes16 both = load_as<Bytes16>(p);
  low = {(SignedBytes)(both & vec_splats(uint8_t{15}))};
  high = {(SignedBytes)(both >> 4)};
}
TW_INLINE SignedBytes four_bytes(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return (SignedBytes)words(four);
}
TW_INLINE I add_pairs(I acc, Shorts pairs) {
  const Shorts ones = vec_splats(int16_t{1});
  return {vec_moadd(pairs, ones, vec_meadd(pairs, ones, acc.v))};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* p) {
  const SignedBytes x = four_bytes(p);
  return add_pairs(acc, vec_moadd(w.v, x, vec_mule(w.v, x)));
}

// 16 products of at most 15 and 127 fit in 16 bits.
struct NibbleSum {
  Shorts v;
};
TW_INLINE NibbleSum begin_nibbles(I) { return {vec_splats(int16_t{0})}; }
TW_INLINE NibbleSum dot_quads(NibbleSum acc, Quads w, const int8_t* p) {
  const SignedBytes x = four_bytes(p);
  return {vec_moadd(w.v, x, vec_meadd(w.v, x, acc.v))};
}
TW_INLINE I end_nibbles(I dot, NibbleSum sum) { return add_pairs(dot, sum.v); }

}  // namespace tidewheel::TW_ISA
