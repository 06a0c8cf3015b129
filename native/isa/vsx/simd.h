// The vector vocabulary on POWER8, little-endian: 4 floats a register, 64 registers, of which instructions on bytes and
// integers reach 32. On POWER9 (the vsx3 level is compiled for it), binary16 has instructions of its own.
#pragma once

#include <altivec.h>
// Strict C++ has these as macros, of which the last is a keyword.
#undef vector
#undef pixel
#undef bool

#include "isa/ibm/vectors.h"

namespace tidewheel::TW_ISA {

static_assert(kLittleEndian, "the order of bytes in words is that of little-endian POWER");

constexpr int kTileVectors = 4;

#ifdef _ARCH_PWR9
// The lower half of each word is a binary16 number. Its upper half may be anything.
TW_INLINE F from_binary16(Words halves) {
  F r;
  asm("xvcvhpsp %x0,%x1" : "=wa"(r.v) : "wa"(halves));
  return r;
}
TW_INLINE F widened(Words bits) { return from_binary16(bits >> 13); }
TW_INLINE F load(const f16* p) {
  const Halves halves = load_eight<Halves>(p);
  return from_binary16((Words)vec_mergeh(halves, halves));
}
TW_INLINE void store(f16* p, F a) {
  Words half;
  asm("xvcvsphp %x0,%x1" : "=wa"(half) : "wa"(a.v));
  store_eight(p, vec_pack(half, half));
}
#else
TW_INLINE F widened(Words bits) { return scaled_f16(bits); }
TW_INLINE F load(const f16* p) { return load_scaled(p); }
TW_INLINE void store(f16* p, F a) { store_rounded(p, a); }
#endif
// Compares and selects, because POWER's own maximum of a number and NaN does not return the second operand.
TW_INLINE F max(F a, F b) { return {vec_sel(b.v, a.v, vec_cmpgt(a.v, b.v))}; }
TW_INLINE F min(F a, F b) { return {vec_sel(b.v, a.v, vec_cmplt(a.v, b.v))}; }
TW_INLINE F floats(Ints a) { return {vec_ctf(a, 0)}; }
TW_INLINE F small_floats(Ints a) { return floats(a); }
TW_INLINE F pow2(F n) { return {(Floats)((Words)(vec_cts(n.v, 0) + vec_splats(127)) << 23)}; }
TW_INLINE uint32_t unordered(F a, F b) { return !vec_all_eq(a.v, a.v) || !vec_all_eq(b.v, b.v); }
TW_INLINE unsigned lanes_in(Words within) {
  const Longs lanes = (Longs)(within & Words{1, 2, 4, 8});
  const unsigned long long pairs = lanes[0] | lanes[1];
  return static_cast<unsigned>((pairs | pairs >> 32) & 15);
}

}  // namespace tidewheel::TW_ISA

#include "isa/ibm/vocabulary.h"

namespace tidewheel::TW_ISA {

TW_INLINE I round_to_int(F a) { return {vec_cts(round(a).v, 0)}; }

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
