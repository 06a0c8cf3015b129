// Element<T>: how weights of type T are multiplied by activations.
#pragma once

#include <type_traits>

#include "simd.h"

namespace tidewheel::TW_ISA {

// How numbers of type T, from weights or a cache, are multiplied by activations in a dot product. One
// multiply-accumulate takes `kStep` consecutive numbers.
template <typename T>
struct SingleElements {
  static constexpr int kStep = 1;
  using Activation = float;
  using Vector = F;
  TW_INLINE Vector load_step(const T* p) { return load(p); }
  TW_INLINE F dot(F acc, Vector w, const Activation* a) { return dot_single(acc, w, a); }
};

template <typename T>
struct PairedElements {
  static constexpr int kStep = 2;
  using Activation = BF16Activation;
  using Vector = Pairs;
  TW_INLINE Vector load_step(const T* p) { return load_pairs(p); }
  TW_INLINE F dot(F acc, Vector w, const Activation* a) { return dot_pairs(acc, w, a); }
};

template <typename T>
struct Element : SingleElements<T> {};  // float and f16
template <>
struct Element<bf16> : PairedElements<bf16> {};

// Whether the level has too few registers to hold both halves of pairs beside a tile's sums, and loads one half after
// the other.
template <typename T>
constexpr bool kLoadsHalves = requires(const T* p) { load_half<false>(p); };

// The first or the second numbers of pairs, as elements of their own.
template <typename T, bool SECOND>
struct HalfElements : SingleElements<T> {
  TW_INLINE F load_step(const T* p) { return load_half<SECOND>(p); }
};

// Adds one step's products to acc[r][v]: kLanes * kStep numbers of type T at at(v), multiplied by row r's activations.
// `stride` is the distance from one row's activations to the next row's.
template <typename E, int ROWS, int VECTORS, typename At, typename Activation>
TW_INLINE void add_products(F (&acc)[ROWS][VECTORS], At&& at, const Activation* x, size_t stride) {
  using T = std::remove_cvref_t<decltype(*at(0))>;
  if constexpr (E::kStep == 2 && kLoadsHalves<T>) {
    add_products<HalfElements<T, false>>(acc, at, x, stride);
    add_products<HalfElements<T, true>>(acc, at, x + 1, stride);
  } else if constexpr (E::kStep == 1 && VECTORS == 4 && requires(typename E::Vector w) { fma_in_order(w, w, w); }) {
    // Such a level has no registers for four vectors beside twelve sums.
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v += 2) {
      const typename E::Vector left = E::load_step(at(v)), right = E::load_step(at(v + 1));
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const typename E::Vector by = set1_in_order(x + r * stride);
        acc[r][v] = fma_in_order(left, by, acc[r][v]);
        acc[r][v + 1] = fma_in_order(right, by, acc[r][v + 1]);
      }
    }
  } else {
    typename E::Vector w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) w[v] = E::load_step(at(v));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = E::dot(acc[r][v], w[v], x + r * stride);
    }
  }
}

template <typename T>
TW_INLINE T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (__is_same(T, bf16)) {
    return to_bf16(x);
  } else {
    return to_f16(x);
  }
}

// Round kLanes floats to T and store them as T's activations.
template <typename T>
TW_INLINE void store_activations(typename Element<T>::Activation* p, F a) {
  if constexpr (sizeof(typename Element<T>::Activation) == sizeof(T)) {
    store(p, a);
  } else {
    T rounded[kLanes];
    store(rounded, a);
    store(p, load(rounded));
  }
}

// e^x in float: Cephes' polynomial, about 2 ulp. Below -87 it gives the value at -87, above 88 the value at 88.
TW_INLINE F exp(F x) {
  x = min(max(x, set1(-87.0f)), set1(88.0f));
  const F n = round(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  return mul(add(p, set1(1.0f)), pow2(n));
}

TW_INLINE F tanh(F x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

}  // namespace tidewheel::TW_ISA
