// The vector vocabulary on IBM Z with vector enhancements facility 1 (z14): 4 floats a register, 32 registers,
// big-endian. With facility 2 (z15: the vxe2 level is compiled with it), one instruction converts integers to floats.
#pragma once

#include <vecintrin.h>

#include "isa/ibm/vectors.h"

namespace tidewheel::TW_ISA {

constexpr int kTileVectors = 2;

TW_INLINE F widened(Words bits) { return scaled_f16(bits); }
TW_INLINE F load(const f16* p) { return load_scaled(p); }
TW_INLINE void store(f16* p, F a) { store_rounded(p, a); }
// Mode 2 is C's a > b ? a : b, which gives b if either is NaN.
TW_INLINE F max(F a, F b) { return {__builtin_s390_vfmaxsb(a.v, b.v, 2)}; }
TW_INLINE F min(F a, F b) { return {__builtin_s390_vfminsb(a.v, b.v, 2)}; }

// Added to a float of at most 22 integer bits, this leaves the integer in the low bits.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t kMagicBits = 0x4b400000;

// The shift removes the bits of the magic number.
TW_INLINE F pow2(F n) { return {(Floats)(((Words)(n.v + vec_splats(kMagic)) + words(127)) << 23)}; }

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

TW_INLINE uint32_t unordered(F a, F b) {
  const Words both = (Words)vec_cmpeq(a.v, a.v) & (Words)vec_cmpeq(b.v, b.v);
  const auto ordered = (__vector unsigned long long)both;
  return (ordered[0] & ordered[1]) != ~0ull;
}
TW_INLINE unsigned lanes_in(Words within) {
  constexpr uint8_t kNone = 128;
  const Bytes16 lanes = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone,
                       kNone, kNone, kNone, kNone, 96,    64,    32,    0};
  return static_cast<unsigned>(vec_bperm_u128((Bytes16)within, lanes)[0]);
}

}  // namespace tidewheel::TW_ISA

#include "isa/ibm/vocabulary.h"

namespace tidewheel::TW_ISA {

TW_INLINE I round_to_int(F a) {
  const F bounded = min(max(a, set1(-4194303.0f)), set1(4194303.0f));
  return {(Ints)((Words)(bounded.v + vec_splats(kMagic)) - words(kMagicBits))};
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
TW_INLINE I add_pairs(I acc, Shorts pairs) {
  const Shorts ones = vec_splats(int16_t{1});
  return {vec_moadd(pairs, ones, vec_meadd(pairs, ones, acc.v))};
}
TW_INLINE I dot_quads(I acc, Quads w, const int8_t* p) {
  const SignedBytes x = (SignedBytes)load_four(p);
  return add_pairs(acc, vec_moadd(w.v, x, vec_mule(w.v, x)));
}

// 16 products of at most 15 and 127 fit in 16 bits.
struct NibbleSum {
  Shorts v;
};
TW_INLINE NibbleSum begin_nibbles(I) { return {vec_splats(int16_t{0})}; }
TW_INLINE NibbleSum dot_quads(NibbleSum acc, Quads w, const int8_t* p) {
  const SignedBytes x = (SignedBytes)load_four(p);
  return {vec_moadd(w.v, x, vec_meadd(w.v, x, acc.v))};
}
TW_INLINE I end_nibbles(I dot, NibbleSum sum) { return add_pairs(dot, sum.v); }

}  // namespace tidewheel::TW_ISA
