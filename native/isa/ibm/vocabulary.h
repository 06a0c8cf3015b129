// What the levels of POWER and IBM Z have in common, second part. It is included after what a level does in its own
// way: max, min, `floats` of integers, `small_floats` of those of at most 22 bits, `widened` of what scaled_f16 takes with
// copies of the sign between, and lanes_in(within), which has a bit for each word that is all ones, the first word's the
// lowest.
#pragma once

namespace tidewheel::TW_ISA {

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
  const unsigned mask = lanes_in((Words)vec_cmpge(a.v, low.v) & (Words)vec_cmple(a.v, high.v));
  store(p, {vec_perm(a.v, a.v, load_as<Bytes16>(kChosenBytes.order[mask]))});
  return __builtin_popcount(mask);
}

TW_INLINE F dot_single(F acc, F b, const float* a) { return fma(b, set1(*a), acc); }

using BF16Activation = float;
struct Pairs {
  F even, odd;
};
TW_INLINE Pairs load_pairs(const bf16* p) {
  const Words pairs = load_as<Words>(p), low = pairs << 16, high = pairs & words(0xffff0000);
  return {{(Floats)(kLittleEndian ? low : high)}, {(Floats)(kLittleEndian ? high : low)}};
}
// Two bytes in the two halves of a word, each sign-extended.
TW_INLINE Words signed_pairs(const void* p) { return (Words)vec_unpackh(load_eight<SignedBytes>(p)); }
// The first or the second of these bytes, with its lowest bit at bit 16 + SHIFT, and copies of its sign above its highest.
template <bool SECOND, int SHIFT>
TW_INLINE Words byte_of(Words pairs) {
  return pairs << (SECOND == kLittleEndian ? SHIFT : 16 + SHIFT);
}
TW_INLINE Pairs load_pairs(const e5m2* p) {
  const Words pairs = signed_pairs(p), used = words(0xffe00000);
  return {widened(byte_of<false, 5>(pairs) & used), widened(byte_of<true, 5>(pairs) & used)};
}
// A 256th of each number in an e4m3 cache. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The
// exponent is too small by 112.
TW_INLINE F cached_e4m3(Words bits) {
  const Floats x = (Floats)(bits & words(0x87f00000)) * vec_splats(0x1p112f);
  return {(Floats)((Words)x | (Words)vec_cmpeq(x, vec_splats(1.875f)))};  // the code for NaN
}
TW_INLINE Pairs load_pairs(const e4m3* p) {
  const Words pairs = signed_pairs(p);
  return {cached_e4m3(byte_of<false, 4>(pairs)), cached_e4m3(byte_of<true, 4>(pairs))};
}
TW_INLINE Pairs load_pairs(const int8_t* p) {
  const Words pairs = signed_pairs(p);
  return {small_floats((Ints)byte_of<false, 0>(pairs) >> 16), small_floats((Ints)byte_of<true, 0>(pairs) >> 16)};
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
  return {small_floats((Ints)((Words)bytes << 28) >> 28), small_floats(bytes >> 4)};
}

TW_INLINE F load(const uint8_t* p) {
  const Bytes16 four = (Bytes16)load_four(p), none = vec_splats(uint8_t{0});
  const Bytes16 order = kLittleEndian ? Bytes16{0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3, 16, 16, 16}
                                      : Bytes16{16, 16, 16, 0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3};
  return small_floats((Ints)vec_perm(four, none, order));
}
TW_INLINE F load(const int8_t* p) { return small_floats(extended_bytes(load_four(p))); }

// e4m3 numbers. `bits` has the sign in bit 31 and the other bits in bits 26 to 20. The exponent is too small by 120.
TW_INLINE F widened_e4m3(Words bits) {
  return {(Floats)(bits & words(0x87f00000)) * vec_splats(0x1p120f)};
}
TW_INLINE F load(const e4m3* p) { return widened_e4m3((Words)extended_bytes(load_four(p)) << 20); }
TW_INLINE void widen(const e4m3* from, bf16* to) {
  const Words pairs = signed_pairs(from);
  const F even = widened_e4m3(byte_of<false, 4>(pairs)), odd = widened_e4m3(byte_of<true, 4>(pairs));
  const Words low = (Words)(kLittleEndian ? even : odd).v, high = (Words)(kLittleEndian ? odd : even).v;
  const Words both = low >> 16 | (high & words(0xffff0000));
  std::memcpy(to, &both, sizeof both);
}

TW_INLINE I load(const uint32_t* p) { return {load_as<Ints>(p)}; }
template <int SHIFT>
TW_INLINE F lookup(const float* table, I codes) {
  const Words index = (Words)codes.v >> SHIFT;
  // The positions of each number's four bytes within its half of the table.
  const Words first = words(kLittleEndian ? 0x03020100 : 0x00010203);
  const Bytes16 bytes = (Bytes16)((index & words(7)) * words(0x04040404) + first);
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

}  // namespace tidewheel::TW_ISA
