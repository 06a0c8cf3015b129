// The vector vocabulary on POWER8, little-endian: 4 floats a register, 64 registers, of which instructions on bytes and
// integers reach 32. On POWER9 (the vsx3 level is compiled for it), binary16 has instructions of its own.
#pragma once

#include <altivec.h>
// Strict C++ has these as macros, of which the last is a keyword.
#undef vector
#undef pixel
#undef bool

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

static_assert(kLittleEndian, "the order of bytes in words is that of little-endian POWER");

constexpr int kLanes = 4;
constexpr int kTileRows = 8;
constexpr int kTileVectors = 4;

using Floats = __vector float;
using Words = __vector unsigned int;
using Ints = __vector signed int;
using Halves = __vector unsigned short;
using Shorts = __vector signed short;
using Bytes16 = __vector unsigned char;
using SignedBytes = __vector signed char;
using Longs = __vector unsigned long long;

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
  const unsigned long long eight = ((Longs)a)[0];
  std::memcpy(p, &eight, sizeof eight);
}
TW_INLINE Words words(uint32_t x) { return vec_splats(x); }
TW_INLINE Words load_four(const void* p) {  // the same 4 bytes in every word
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return words(four);
}
TW_INLINE Ints extended_bytes(Words a) { return vec_unpackh(vec_unpackh((SignedBytes)a)); }  // the first four

TW_INLINE F set1(float x) { return {vec_splats(x)}; }
TW_INLINE F zero() { return {vec_splats(0.0f)}; }
TW_INLINE F load(const float* p) { return {load_as<Floats>(p)}; }
TW_INLINE F load(const bf16* p) { return {(Floats)vec_mergeh(vec_splats(uint16_t{0}), load_eight<Halves>(p))}; }
#ifdef _ARCH_PWR9
// The lower half of each word is a binary16 number. Its upper half may be anything.
TW_INLINE F from_binary16(Words halves) {
  F r;
  asm("xvcvhpsp %x0,%x1" : "=wa"(r.v) : "wa"(halves));
  return r;
}
TW_INLINE F load(const f16* p) {
  const Halves halves = load_eight<Halves>(p);
  return from_binary16((Words)vec_mergeh(halves, halves));
}
#else
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
#endif
TW_INLINE void store(float* p, F a) { std::memcpy(p, &a.v, sizeof a.v); }
TW_INLINE void store(bf16* p, F a) {
  const Words bits = (Words)a.v;
  const Words rounded = (bits + (bits >> 16 & words(1)) + words(0x7fff)) >> 16;
  const Words half = vec_sel(bits >> 16 | words(0x40), rounded, (Words)vec_cmpeq(a.v, a.v));
  store_eight(p, vec_pack(half, half));
}
TW_INLINE void store(f16* p, F a) {
#ifdef _ARCH_PWR9
  Words half;
  asm("xvcvsphp %x0,%x1" : "=wa"(half) : "wa"(a.v));
#else  // as to_f16 does it
  const Words bits = (Words)a.v, rest = bits & words(0x7fffffff);
  const Words normal = (rest + words(0xfff) + (rest >> 13 & words(1)) - words(0x38000000)) >> 13;
  const Words subnormal = (Words)((Floats)rest + vec_splats(0.5f)) - words(0x3f000000);
  Words half = vec_sel(normal, subnormal, (Words)vec_cmpgt(words(0x38800000), rest));
  half = vec_sel(half, words(0x7c00), (Words)vec_cmpgt(rest, words(0x477fefff)));
  half = vec_sel(half, words(0x7e00), (Words)vec_cmpgt(rest, words(0x7f800000)));
  half |= bits >> 16 & words(0x8000);
#endif
  store_eight(p, vec_pack(half, half));
}
TW_INLINE F add(F a, F b) { return {a.v + b.v}; }
TW_INLINE F sub(F a, F b) { return {a.v - b.v}; }
TW_INLINE F mul(F a, F b) { return {a.v * b.v}; }
TW_INLINE F div(F a, F b) { return {a.v / b.v}; }
TW_INLINE F abs(F a) { return {vec_abs(a.v)}; }
// Compares and selects, because POWER's own maximum of a number and NaN does not return the second operand.
TW_INLINE F max(F a, F b) { return {vec_sel(b.v, a.v, vec_cmpgt(a.v, b.v))}; }
TW_INLINE F min(F a, F b) { return {vec_sel(b.v, a.v, vec_cmplt(a.v, b.v))}; }
TW_INLINE F select_less(F a, F b, F x, F y) { return {vec_sel(y.v, x.v, vec_cmplt(a.v, b.v))}; }
TW_INLINE F fma(F a, F b, F c) { return {vec_madd(a.v, b.v, c.v)}; }
TW_INLINE F round(F a) { return {vec_rint(a.v)}; }
TW_INLINE F floats(Ints a) { return {vec_ctf(a, 0)}; }
TW_INLINE F pow2(F n) { return {(Floats)((Words)(vec_cts(n.v, 0) + vec_splats(127)) << 23)}; }
TW_INLINE F binade(F a) { return {(Floats)((Words)a.v & words(0x7f800000))}; }

// The halves of a vector in the other order, and the words of each half in the other order.
template <typename Vector>
TW_INLINE Vector swap_halves(Vector a) {
  return vec_perm(a, a, Bytes16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
}
template <typename Vector>
TW_INLINE Vector swap_words(Vector a) {
  return vec_perm(a, a, Bytes16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
}
TW_INLINE float hsum(F a) {
  const Floats two = a.v + swap_halves(a.v);
  return (two + swap_words(two))[0];
}
TW_INLINE float hmax(F a) {
  const F two = max(a, {swap_halves(a.v)});
  return max(two, {swap_words(two.v)}).v[0];
}
TW_INLINE F keep_if(F value, F x, F bound) {
  return {(Floats)((Words)value.v & (Words)vec_cmpge(x.v, bound.v))};
}
TW_INLINE F choose(uint32_t bits, F x, F y) {
  const Words lanes = {1, 2, 4, 8};
  return {vec_sel(y.v, x.v, vec_cmpeq(words(bits) & lanes, lanes))};
}
TW_INLINE uint32_t unordered(F a, F b) { return !vec_all_eq(a.v, a.v) || !vec_all_eq(b.v, b.v); }

// For every set of lanes, the bytes of its lanes side by side.
struct ChosenBytes {
  uint8_t order[16][16];
};
constexpr ChosenBytes kChosenBytes = [] {
  ChosenBytes r{};
  for (int mask = 0; mask < 16; ++mask) {
    for (int lane = 0, n = 0; lane < 4; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (int byte = 0; byte < 4; ++byte) r.order[mask][n++] = static_cast<uint8_t>(4 * lane + byte);
    }
  }
  return r;
}();
TW_INLINE int compress(float* p, F a, F low, F high) {
  const Words within = (Words)vec_cmpge(a.v, low.v) & (Words)vec_cmple(a.v, high.v);
  const Longs lanes = (Longs)(within & Words{1, 2, 4, 8});
  const unsigned long long pairs = lanes[0] | lanes[1];
  const auto mask = static_cast<unsigned>((pairs | pairs >> 32) & 15);
  store(p, {vec_perm(a.v, a.v, load_as<Bytes16>(kChosenBytes.order[mask]))});
  return __builtin_popcount(mask);
}

TW_INLINE F dot_single(F acc, F b, const float* a) { return fma(b, set1(*a), acc); }

using BF16Activation = float;
struct Pairs {
  F even, odd;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  const Words pairs = load_as<Words>(p);
  return {{(Floats)(pairs << 16)}, {(Floats)(pairs & words(0xffff0000))}};
}
// Two bytes in the lower half of each word. The sign of the second one fills the upper half.
TW_INLINE Words byte_pairs(const void* p) { return (Words)vec_unpackh(load_eight<Shorts>(p)); }
// The first byte of each pair, with SPARE copies of its sign above it and zeros below it.
template <int SPARE>
TW_INLINE Words first_bytes(Words pairs) { return (Words)((Ints)(pairs << 24) >> SPARE); }
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const Words pairs = byte_pairs(p);
#ifdef _ARCH_PWR9
  return {from_binary16(pairs << 8), from_binary16(pairs & words(0xff00))};
#else
  const Words used = words(0x8fe00000);
  return {widened(first_bytes<3>(pairs) & used), widened((pairs << 13) & used)};
#endif
}
// A 256th of each number in an e4m3 cache. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The
// exponent is too small by 112.
TW_INLINE F cached_e4m3(Words bits) {
  const Floats x = (Floats)(bits & words(0x87f00000)) * vec_splats(0x1p112f);
  return {(Floats)((Words)x | (Words)vec_cmpeq(x, vec_splats(1.875f)))};  // the code for NaN
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const Words pairs = byte_pairs(p);
  return {cached_e4m3(first_bytes<4>(pairs)), cached_e4m3(pairs << 12)};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const Words pairs = byte_pairs(p);
  return {floats((Ints)first_bytes<24>(pairs)), floats((Ints)pairs >> 8)};
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
  const Ints two = a.v + swap_halves(a.v);
  return (two + swap_words(two))[0];
}
TW_INLINE F to_floats(I a) { return floats(a.v); }
TW_INLINE F small_to_floats(I a) { return floats(a.v); }
TW_INLINE I round_to_int(F a) { return {vec_cts(round(a).v, 0)}; }
TW_INLINE void store(int8_t* p, I a) {
  const Shorts halves = vec_pack(a.v, a.v);
  const uint32_t four = ((Words)vec_pack(halves, halves))[0];
  std::memcpy(p, &four, sizeof four);
}

struct NibbleFloats {
  F low, high;
};
TW_INLINE NibbleFloats load_signed_nibbles(const uint8_t* p) {
  const Ints bytes = extended_bytes(load_four(p));
  return {floats((Ints)((Words)bytes << 28) >> 28), floats(bytes >> 4)};
}

TW_INLINE F load(const uint8_t* p) {
  const Bytes16 four = (Bytes16)load_four(p), none = vec_splats(uint8_t{0});
  return floats((Ints)vec_perm(four, none, Bytes16{0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3, 16, 16, 16}));
}
TW_INLINE F load(const int8_t* p) { return floats(extended_bytes(load_four(p))); }

// e4m3 numbers. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The exponent is too small by 120.
TW_INLINE F widened_e4m3(Words bits) {
  return {(Floats)(bits & words(0x87f00000)) * vec_splats(0x1p120f)};
}
TW_INLINE F load(const e4m3* p) { return widened_e4m3((Words)extended_bytes(load_four(p)) << 20); }
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const Words pairs = byte_pairs(from);
  const F even = widened_e4m3(first_bytes<4>(pairs)), odd = widened_e4m3(pairs << 12);
  const Words both = (Words)even.v >> 16 | ((Words)odd.v & words(0xffff0000));
  std::memcpy(to, &both, sizeof both);
}

TW_INLINE I load(const uint32_t* p) { return {load_as<Ints>(p)}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  const Words index = (Words)codes.v >> SHIFT;
  // The positions of each number's four bytes within its half of the table.
  const Bytes16 bytes = (Bytes16)((index & words(7)) * words(0x04040404) + words(0x03020100));
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

// One instruction multiplies signed with unsigned bytes and adds each four products to a sum.
constexpr bool kDotsBytes = false;  // see attention_bytes.h: not used for an int8 cache, because that was not measured
constexpr int kQuadZero = 128;
struct Quads {
  Bytes16 v;
};
TW_INLINE Quads load_quads(const uint8_t* p) { return {load_as<Bytes16>(p)}; }
TW_INLINE Quads as_quads(Bytes a) { return {a.v}; }
TW_INLINE void load_nibbles(const uint8_t* p, Quads& low, Quads& high) {
  const Bytes16 both = load_as<Bytes16>(p);
  low = {both & vec_splats(uint8_t{15})};
  high = {both >> 4};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* x) {
  return {vec_msum((SignedBytes)load_four(x), w.v, acc.v)};
}

using NibbleSum = I;
TW_INLINE I begin_nibbles(I dot) { return dot; }
TW_INLINE I end_nibbles(I, I sum) { return sum; }

}  // namespace tidewheel::TW_ISA
