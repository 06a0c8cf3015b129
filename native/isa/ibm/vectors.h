// What the levels of POWER and IBM Z have in common, first part: vectors of 16 bytes, and float32. Both have the same
// functions for vectors, after the level's own header of the compiler has been included.
#pragma once

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

constexpr int kLanes = 4;
constexpr int kTileRows = 8;

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
TW_INLINE F load(const bf16* p) {
  const Halves halves = load_eight<Halves>(p), none = vec_splats(uint16_t{0});
  return {(Floats)(kLittleEndian ? vec_mergeh(none, halves) : vec_mergeh(halves, none))};
}
// `bits` has binary16's sign in bit 31 and its other 15 bits in bits 27 to 13, and what lies between is not used. The
// exponent is too small by 112, and by more for infinity and NaN.
TW_INLINE F scaled_f16(Words bits) {
  bits &= words(0x8fffe000);
  const Words top = words(0x0f800000), special = (Words)vec_cmpeq(bits & top, top);
  const Floats scaled = (Floats)bits * vec_splats(0x1p112f);
  return {(Floats)((Words)scaled | (special & words(0x7f800000)))};
}
TW_INLINE void store(float* p, F a) { std::memcpy(p, &a.v, sizeof a.v); }
TW_INLINE void store(bf16* p, F a) {
  const Words bits = (Words)a.v;
  const Words rounded = (bits + (bits >> 16 & words(1)) + words(0x7fff)) >> 16;
  const Words half = vec_sel(bits >> 16 | words(0x40), rounded, (Words)vec_cmpeq(a.v, a.v));
  store_eight(p, vec_pack(half, half));
}
TW_INLINE F load_scaled(const f16* p) { return scaled_f16((Words)vec_unpackh(load_eight<Shorts>(p)) << 13); }
// As to_f16 does it.
TW_INLINE void store_rounded(f16* p, F a) {
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
TW_INLINE F select_less(F a, F b, F x, F y) { return {vec_sel(y.v, x.v, vec_cmplt(a.v, b.v))}; }
TW_INLINE F fma(F a, F b, F c) { return {vec_madd(a.v, b.v, c.v)}; }
TW_INLINE F round(F a) { return {vec_rint(a.v)}; }
TW_INLINE F binade(F a) { return {(Floats)((Words)a.v & words(0x7f800000))}; }

}  // namespace tidewheel::TW_ISA
