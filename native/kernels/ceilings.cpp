// What this level can do at most on this machine: register-only dot products, and a plain read of memory. Many
// independent chains, so that latency does not count; results are folded into the return value so nothing is removed.
#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kChains = kTileRows * kTileVectors;  // as many accumulators as a GEMM tile keeps
constexpr int kInner = 1024;
// Added to a count of operations to keep the arithmetic alive; far below the count's precision.
constexpr double kTrace = 1e-30;

template <typename T>
double peak(int rounds, const T* weights, const typename Element<T>::Activation* x) {
  F acc[kChains];
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) acc[c] = set1(static_cast<float>(c));  // else all chains are one
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < kInner; ++i) {
      const auto w = Element<T>::load_step(weights);
#pragma GCC unroll 32
      for (int c = 0; c < kChains; ++c) acc[c] = Element<T>::dot(acc[c], w, x);
      // The operands may have changed, for all the compiler knows: nothing is folded or hoisted.
      asm volatile("" : "+r"(weights), "+r"(x) : : "memory");
    }
  }
  F sum = zero();
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) sum = add(sum, acc[c]);
  return 2.0 * rounds * kInner * kChains * kLanes * Element<T>::kStep + kTrace * hsum(sum);
}

}  // namespace

double peak_float32(int rounds) {
  alignas(64) float weights[kLanes] = {};
  const float x[1] = {1.0f};
  return peak<float>(rounds, weights, x);
}

double peak_bfloat16(int rounds) {
  alignas(64) bf16 weights[2 * kLanes] = {};
  const BF16Activation x[2] = {};
  return peak<bf16>(rounds, weights, x);
}

double peak_int8(int rounds) {
  alignas(64) const uint8_t zeros[4 * kLanes] = {};
  const int8_t quad[4] = {1, 1, 1, 1};
  const uint8_t* w = zeros;
  const int8_t* x = quad;
  I acc[kChains];
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) acc[c] = set1_int(c);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < kInner; ++i) {
      const Quads quads = load_quads(w);
#pragma GCC unroll 32
      for (int c = 0; c < kChains; ++c) acc[c] = dot_quads(acc[c], quads, x);
      asm volatile("" : "+r"(w), "+r"(x) : : "memory");
    }
  }
  int sum = 0;
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) sum += hsum(acc[c]);
  return 2.0 * rounds * kInner * kChains * kLanes * 4 + kTrace * sum;
}

double read_memory(const void* data, size_t bytes) {
  const float* p = static_cast<const float*>(data);
  const size_t count = bytes / sizeof(float) / (8 * kLanes) * (8 * kLanes);
  F acc[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) acc[j] = zero();
  for (size_t i = 0; i < count; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      acc[j] = add(acc[j], load(p + i + j * kLanes));
    }
    prefetch(reinterpret_cast<const char*>(p + i) + 4096);
  }
  F sum = zero();
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) sum = add(sum, acc[j]);
  return static_cast<double>(count * sizeof(float)) + kTrace * hsum(sum);
}

}  // namespace tidewheel::TW_ISA
