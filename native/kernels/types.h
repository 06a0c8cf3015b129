// Element types and the scalar conversions between them. There is no state, and there are no templates that a linker
// could merge across ISA levels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace tidewheel {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

constexpr bool kLittleEndian = std::endian::native == std::endian::little;

constexpr int dtype_bytes(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// 8-bit floats with 5 bits of exponent and 2 of mantissa: the upper byte of binary16.
struct e5m2 {
  uint8_t bits;
};

// 8-bit floats with 4 bits of exponent and 3 of mantissa, and no infinities. Loaders of e4m3 weights refuse the two
// codes that are not numbers; here they count as 480. In a cache, kE4m3Nan is NaN.
struct e4m3 {
  uint8_t bits;
};

constexpr uint8_t kE4m3Nan = 0x7f;

// Two 4-bit numbers in two's complement, the first one in the lower bits.
struct int4x2 {
  uint8_t bits;
};

// The type of cached K and V. Int8 has a float32 scale for each token and KV head, one for K and one for V. E4m3 has
// one scale for all K of a layer and one for all V, which are not in the cache. Int4 has a float16 scale for every
// kCacheGroup elements of a head.
enum class CacheType : int {
  kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E5M2 = 3, kInt8 = 4, kFloat8E4M3 = 5, kInt4 = 6,
};
constexpr int kCacheTypes = 7;
constexpr int kCacheGroup = 32;
constexpr int cache_groups(int elements) { return (elements + kCacheGroup - 1) / kCacheGroup; }

// Only for types whose elements are whole bytes.
constexpr int cache_element_bytes(CacheType type) {
  if (type == CacheType::kFloat32) return 4;
  return type == CacheType::kBFloat16 || type == CacheType::kFloat16 ? 2 : 1;
}

// Forced inline: an out-of-line copy compiled for a newer ISA must never be the one the linker keeps for an older CPU.
#define TW_INLINE static inline __attribute__((always_inline))

TW_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

TW_INLINE float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

TW_INLINE float to_float(float x) { return x; }
TW_INLINE float to_float(bf16 x) { return bits_float(uint32_t{x.bits} << 16); }

// IEEE 754 binary16, subnormals and infinities included.
TW_INLINE float to_float(f16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  // In binary32's position, the exponent is too small by 112. The multiplication corrects that, for subnormals too.
  const uint32_t number = float_bits(bits_float(rest << 13) * 0x1p112f), special = 0x7f800000u | rest << 13;
  const uint32_t is_special = 0u - uint32_t{rest >= 0x7c00u};  // a mask, not a branch, so that compilers can vectorize
  return bits_float(sign | (special & is_special) | (number & ~is_special));
}

// binary16 holds a 256th of each number, with the same bits of exponent and mantissa.
TW_INLINE float to_float(e4m3 x) {
  return 256.0f * to_float(f16{static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
TW_INLINE float to_float(e5m2 x) { return to_float(f16{static_cast<uint16_t>(x.bits << 8)}); }

// Rounds to nearest, ties to even. NaN stays NaN.
TW_INLINE bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

TW_INLINE f16 to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (rest < 0x38800000u) {  // below 2^-14: the addition rounds the subnormal in place
    const float shifted = bits_float(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace tidewheel
