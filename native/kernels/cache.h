// Cached<T>: the layout of K and V of type T in a block, and how they are multiplied by queries and probabilities. T is
// float, f16, bf16, e5m2, e4m3 or int8_t. The last four store consecutive elements in pairs, one pair for each
// multiply-accumulate. On levels with `kDotsBytes`, int8_t is stored in fours. int4x2 has a layout of its own:
// CachedInt4Head.
#pragma once

#include <type_traits>

#include "kernels/element.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

template <CacheType TYPE, typename Elements>
struct CachedAs : Elements {
  static constexpr CacheType kType = TYPE;
  // The type of queries and probabilities. It is bfloat16 only if the level can multiply bfloat16.
  using Query = typename Elements::Activation;
};

// For levels that multiply integers, four by four.
struct ByteElements {
  static constexpr int kStep = 4;
  using Activation = float;  // rounded to integers later
};

template <typename T>
struct Cached;
template <>
struct Cached<float> : CachedAs<CacheType::kFloat32, SingleElements<float>> {};
template <>
struct Cached<f16> : CachedAs<CacheType::kFloat16, SingleElements<f16>> {};
template <>
struct Cached<bf16> : CachedAs<CacheType::kBFloat16, PairedElements<bf16>> {};
template <>
struct Cached<e5m2> : CachedAs<CacheType::kFloat8E5M2, PairedElements<e5m2>> {};
template <>
struct Cached<e4m3> : CachedAs<CacheType::kFloat8E4M3, PairedElements<e4m3>> {};
template <>
struct Cached<int8_t>
    : CachedAs<CacheType::kInt8, std::conditional_t<kDotsBytes, ByteElements, PairedElements<int8_t>>> {};
template <>
struct Cached<int4x2> : CachedAs<CacheType::kInt4, SingleElements<float>> {};

template <typename T>
constexpr bool kHasScales = Cached<T>::kType == CacheType::kInt8;
// The factor for elements after they are loaded: `load_pairs` returns a 256th of e4m3 numbers.
template <typename T>
constexpr float kLoadedUnit = Cached<T>::kType == CacheType::kFloat8E4M3 ? 256.0f : 1.0f;

// One KV head's part of a block. `dim` (of K) and `values` (of V) are padded. `values` is 0 if V is a part of K.
template <typename T>
struct CachedHead {
  static constexpr int kStep = Cached<T>::kStep;
  T* const k;
  const int dim, values;

  T* v() const { return k + size_t(dim) * kBlockTokens; }
  float* k_scales() const { return reinterpret_cast<float*>(k + size_t(dim + values) * kBlockTokens); }
  float* v_scales() const { return k_scales() + kBlockTokens; }
  // The offset of elements d .. d + kStep - 1 of a slot's K.
  T* k_step(int slot, int d) const { return k + (size_t(d / kStep) * kBlockTokens + slot) * kStep; }
  T* v_element(int slot, int d) const { return v() + (size_t(slot / kStep) * values + d) * kStep + slot % kStep; }
};

// The same for int4.
struct CachedInt4Head {
  uint8_t* const k;
  const int dim, values;

  // Elements d and d + 1 of a slot's K.
  uint8_t* k_pair(int slot, int d) const { return k + d / 2 * kBlockTokens + slot; }
  // A slot's V in a group: kCacheGroup / 2 bytes, followed by those of the next slot.
  uint8_t* v_group(int slot, int group) const {
    return k + (size_t(dim) + size_t(group * kBlockTokens + slot) * kCacheGroup / kBlockTokens) * kBlockTokens / 2;
  }
  // The scales of a group of K, and of V, by slot.
  f16* k_scales(int group) const {
    return reinterpret_cast<f16*>(v_group(0, cache_groups(values))) + group * kBlockTokens;
  }
  f16* v_scales(int group) const { return k_scales(cache_groups(dim) + group); }
};

// Calls `body` with a null pointer to the type that `type` stands for.
template <typename Body>
TW_INLINE void with_cached(CacheType type, Body&& body) {
  switch (type) {
    case CacheType::kFloat32: return body(static_cast<float*>(nullptr));
    case CacheType::kBFloat16: return body(static_cast<bf16*>(nullptr));
    case CacheType::kFloat16: return body(static_cast<f16*>(nullptr));
    case CacheType::kFloat8E5M2: return body(static_cast<e5m2*>(nullptr));
    case CacheType::kInt8: return body(static_cast<int8_t*>(nullptr));
    case CacheType::kFloat8E4M3: return body(static_cast<e4m3*>(nullptr));
    case CacheType::kInt4: return body(static_cast<int4x2*>(nullptr));
  }
}

}  // namespace tidewheel::TW_ISA
