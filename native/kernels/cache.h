// Cached<T>: how K and V of type T lie in a block, and how they meet queries and probabilities. T is float, f16, bf16,
// e5m2 or int8_t. The last three come in pairs of consecutive elements, which one multiply-accumulate consumes.
#pragma once

#include "kernels/kernels.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

template <typename T>
struct CachedSingles {
  static constexpr int kStep = 1;
  using Query = float;  // probabilities too; rounded to bfloat16 only where the level multiplies that
  using Vector = F;
  TW_INLINE Vector load_step(const T* p) { return load(p); }
  TW_INLINE F dot(F acc, Vector w, const Query* q) { return fma(w, set1(*q), acc); }
};

template <typename T>
struct CachedPairs {
  static constexpr int kStep = 2;
  using Query = BF16Activation;
  using Vector = Pairs;
  TW_INLINE Vector load_step(const T* p) { return load_pairs(p); }
  TW_INLINE F dot(F acc, Vector w, const Query* q) { return dot_pairs(acc, w, q); }
};

template <typename T>
struct Cached;
template <>
struct Cached<float> : CachedSingles<float> {
  static constexpr CacheType kType = CacheType::kFloat32;
};
template <>
struct Cached<f16> : CachedSingles<f16> {
  static constexpr CacheType kType = CacheType::kFloat16;
};
template <>
struct Cached<bf16> : CachedPairs<bf16> {
  static constexpr CacheType kType = CacheType::kBFloat16;
};
template <>
struct Cached<e5m2> : CachedPairs<e5m2> {
  static constexpr CacheType kType = CacheType::kFloat8E5M2;
};
template <>
struct Cached<int8_t> : CachedPairs<int8_t> {
  static constexpr CacheType kType = CacheType::kInt8;
};
template <typename T>
constexpr bool kHasScales = Cached<T>::kType == CacheType::kInt8;

// One KV head's part of a block. `dim` is padded.
template <typename T>
struct CachedHead {
  static constexpr int kStep = Cached<T>::kStep;
  T* const k;
  const int dim;

  T* v() const { return k + size_t(dim) * kBlockTokens; }
  float* k_scales() const { return reinterpret_cast<float*>(k + size_t{2} * dim * kBlockTokens); }
  float* v_scales() const { return k_scales() + kBlockTokens; }
  // Where the elements d .. d + kStep - 1 of a slot's K begin.
  T* k_step(int slot, int d) const { return k + (size_t(d / kStep) * kBlockTokens + slot) * kStep; }
  T* v_element(int slot, int d) const { return v() + (size_t(slot / kStep) * dim + d) * kStep + slot % kStep; }
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
  }
}

}  // namespace tidewheel::TW_ISA
