// Copies V out of K, for heads whose V is a part of K: a block's elements go from K's layout into V's.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cache.h"
#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

template <int BYTES>
struct WordOf;
template <>
struct WordOf<1> { using Type = uint8_t; };
template <>
struct WordOf<2> { using Type = uint16_t; };
template <>
struct WordOf<4> { using Type = uint32_t; };
template <>
struct WordOf<8> { using Type = uint64_t; };
template <int BYTES>
using Word = typename WordOf<BYTES>::Type;

// Two elements for each of two tokens become two tokens for each of two elements.
TW_INLINE uint64_t swap_middle(uint64_t four) {
  return (four & 0xffff00000000ffffu) | (four >> 16 & 0xffff0000u) | (four & 0xffff0000u) << 16;
}
TW_INLINE uint32_t swap_middle(uint32_t four) {
  return (four & 0xff0000ffu) | (four >> 8 & 0xff00u) | (four & 0xff00u) << 8;
}

// `out` alternates between the first half of `in` and the second. Repeated as often as a square matrix has bits in its
// row numbers, this transposes the matrix. Compilers have vector instructions for such loops on every level.
template <int COUNT, typename W>
TW_INLINE void alternate(const W* __restrict in, W* __restrict out) {
  for (int i = 0; i < COUNT / 2; ++i) {
    out[2 * i] = in[i];
    out[2 * i + 1] = in[COUNT / 2 + i];
  }
}

// Four elements for each of four tokens become four tokens for each of four elements.
TW_INLINE void transpose_quads(const int8_t* __restrict k, int8_t* __restrict v, size_t stride) {
  using Vector [[gnu::vector_size(16)]] = int8_t;
  for (int quad = 0; quad < 4; ++quad) {
    for (int slot = 0; slot < kBlockTokens; slot += 4) {
      Vector a;
      std::memcpy(&a, k + (quad * kBlockTokens + slot) * 4, sizeof(a));
      a = __builtin_shufflevector(a, a, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      std::memcpy(v + slot / 4 * stride + quad * 16, &a, sizeof(a));
    }
  }
}

// Transposes elements d .. d + 15 of all slots, which are consecutive, from [16 / kStep][16 slots][kStep] to [16 slots
// / kStep][16][kStep]. The outermost rows of the result are `stride` elements apart.
template <typename T>
TW_INLINE void transpose_elements(const T* __restrict k, T* __restrict v, size_t stride) {
  constexpr int kStep = Cached<T>::kStep, kSide = kBlockTokens / kStep, kCount = kSide * kSide;
  using W = Word<sizeof(T) * kStep * kStep>;  // the elements that stay together
  W a[kCount], b[kCount];
  std::memcpy(b, k, sizeof(b));
  for (int i = 0; i < kCount / 2; ++i) {
    if constexpr (kStep == 2) {
      a[2 * i] = swap_middle(b[i]);
      a[2 * i + 1] = swap_middle(b[kCount / 2 + i]);
    } else {
      a[2 * i] = b[i];
      a[2 * i + 1] = b[kCount / 2 + i];
    }
  }
  alternate<kCount>(a, b);
  if constexpr (kSide == 16) {
    alternate<kCount>(b, a);
    alternate<kCount>(a, b);
    for (int row = 0; row < kSide; ++row) std::memcpy(v + row * stride, b + row * kSide, kSide * sizeof(W));
  } else {
    alternate<kCount>(b, a);
    for (int row = 0; row < kSide; ++row) std::memcpy(v + row * stride, a + row * kSide, kSide * sizeof(W));
  }
}

// Writes a block's V: `values` elements that begin at K's element `start`, in the layout of cached V with STRIDE
// elements.
template <int STRIDE, typename T>
TW_INLINE void spread_values(const CachedHead<T>& head, int start, int values, T* v) {
  constexpr int kStep = Cached<T>::kStep;
  for (int d = 0; d < values; d += kBlockTokens) {
    T padded[kBlockTokens * kBlockTokens];
    if constexpr (kStep == 4) {
      if (start % 4 != 0) {  // by 2: each quad of V has its halves in two quads of K
        for (int i = 0; i < 2 * kBlockTokens * kBlockTokens / 4; ++i) {
          const int element = start + d + i / (2 * kBlockTokens) * 4 + i % 2 * 2, slot = i / 2 % kBlockTokens;
          const T zeros[2] = {};
          std::memcpy(padded + i * 2, element < head.dim ? head.k_step(slot, element) + element % 4 : zeros, 2);
        }
        transpose_quads(padded, v + d * kStep, STRIDE * kStep);
        continue;
      }
    }
    const T* k = head.k_step(0, start + d);
    if (const int there = head.dim - start - d; there < kBlockTokens) {  // K may end before V's padding does
      std::memcpy(padded, k, sizeof(T) * there * kBlockTokens);
      std::memset(padded + there * kBlockTokens, 0, sizeof(T) * (kBlockTokens - there) * kBlockTokens);
      k = padded;
    }
    if constexpr (kStep == 4) transpose_quads(k, v + d * kStep, STRIDE * kStep);
    else transpose_elements(k, v + d * kStep, STRIDE * kStep);
  }
}

}  // namespace tidewheel::TW_ISA
