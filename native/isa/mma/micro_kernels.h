// GEMM by the outer products of POWER10. Floats are multiplied and added one input after the other, as by vectors, so
// each output is the same bit for bit.
#pragma once

#include "kernels/gemm_blocks.h"
#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kAccumulators = 8;  // that the processor has

// Eight accumulators at once, each with the same inputs.
template <typename Multiply>
TW_INLINE void multiply_accumulators(__vector_quad (&acc)[kAccumulators], Multiply&& multiply) {
#pragma GCC unroll 8
  for (int c = 0; c < kAccumulators; ++c) multiply(&acc[c]);
}

// The operations of `rounds` rounds. `multiply(acc, w, x)` is one instruction of `operations`.
template <typename Multiply>
TW_INLINE double peak_of_accumulators(int rounds, int operations, Multiply&& multiply) {
  alignas(16) const uint8_t weights[16] = {}, inputs[16] = {};
  const uint8_t *w = weights, *x = inputs;
  __vector_quad acc[kAccumulators];
  multiply_accumulators(acc, [](auto* a) __attribute__((always_inline)) { __builtin_mma_xxsetaccz(a); });
  for (int i = 0; i < rounds * kPeakSteps; ++i) {
    const Bytes16 columns = load_as<Bytes16>(w), rows = load_as<Bytes16>(x);
    multiply_accumulators(acc, [&](auto* a) __attribute__((always_inline)) { multiply(a, columns, rows); });
    asm volatile("" : "+r"(w), "+r"(x) : : "memory");
  }
  float sum = 0.0f;
#pragma GCC unroll 8
  for (int c = 0; c < kAccumulators; ++c) {
    Floats rows[kAccumulatorRows];
    __builtin_mma_disassemble_acc(rows, &acc[c]);
    sum += rows[0][0];
  }
  return 1.0 * rounds * kPeakSteps * kAccumulators * operations + kPeakTrace * sum;
}

template <typename T>
struct FloatAccumulatorTile {
  using E = Element<T>;

  static double peak(int rounds) {
    return peak_of_accumulators(rounds, 2 * kAccumulatorRows * kLanes,
                                [](__vector_quad* acc, Bytes16 w, Bytes16 x) __attribute__((always_inline)) {
                                  __builtin_mma_xvf32gerpp(acc, x, w);
                                });
  }

  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    if constexpr (ROWS < kLeastAccumulatedRows) {
      FloatTile<T>::template rows<ROWS>(format, x, panel, k, tile);
    } else {
      constexpr int kTiles = RowSums<ROWS>::kCount, kVectors = kAccumulators / kTiles;
      for (int column = 0; column < kPanel; column += kVectors * kLanes) {
        columns<ROWS, kVectors>(reinterpret_cast<const float*>(x), reinterpret_cast<const T*>(panel) + column * E::kStep,
                                float_steps<T>(k), tile + column);
      }
    }
  }

 private:
  // One step's inputs of the rows from `ROW` on, an accumulator's worth: in[i] has those of a step's input i.
  template <int ROWS, int ROW>
  TW_INLINE void load_inputs(const float* x, Bytes16 (&in)[E::kStep]) {
    constexpr int kNumbers = (ROWS - ROW) * E::kStep;
    const Bytes16 first = load_words<kNumbers>(x + ROW * E::kStep);
    if constexpr (E::kStep == 1) {
      in[0] = first;
    } else {
      Bytes16 second = first;
      if constexpr (kNumbers > 4) second = load_words<kNumbers - 4>(x + ROW * E::kStep + 4);
      in[0] = vec_perm(first, second, Bytes16{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27});
      in[1] = vec_perm(first, second, Bytes16{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
    }
  }

  template <int ROWS, int VECTORS, int TILE = 0>
  TW_INLINE void add_tiles(__vector_quad (&acc)[RowSums<ROWS>::kCount][VECTORS], const Bytes16 (&w)[VECTORS][E::kStep],
                           const float* x) {
    Bytes16 in[E::kStep];
    load_inputs<ROWS, TILE * kAccumulatorRows>(x, in);
#pragma GCC unroll 2
    for (int i = 0; i < E::kStep; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) __builtin_mma_xvf32gerpp(&acc[TILE][v], in[i], w[v][i]);
    }
    if constexpr (TILE + 1 < RowSums<ROWS>::kCount) add_tiles<ROWS, VECTORS, TILE + 1>(acc, w, x);
  }

  template <int ROWS, int VECTORS>
  TW_INLINE void columns(const float* x, const T* weight, int steps, float* tile) {
    constexpr int kTiles = RowSums<ROWS>::kCount;
    __vector_quad acc[kTiles][VECTORS];
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) __builtin_mma_xxsetaccz(&acc[t][v]);
    }
    for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 4
      for (size_t i = 0; i < VECTORS * kLanes * E::kStep * sizeof(T); i += 64) prefetch_panel<ROWS>(weight + i / sizeof(T));
      Bytes16 w[VECTORS][E::kStep];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const typename E::Vector step = E::load_step(weight + v * kLanes * E::kStep);
        if constexpr (E::kStep == 1) {
          w[v][0] = (Bytes16)step.v;
        } else {
          w[v][0] = (Bytes16)step.even.v;
          w[v][1] = (Bytes16)step.odd.v;
        }
      }
      add_tiles<ROWS, VECTORS>(acc, w, x);
      weight += kPanel * E::kStep;
      x += ROWS * E::kStep;
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      Floats rows[kTiles][kAccumulatorRows];
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) __builtin_mma_disassemble_acc(rows[t], &acc[t][v]);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        store(tile + r * kPanel + v * kLanes, F{rows[r / kAccumulatorRows][r % kAccumulatorRows]});
      }
    }
  }
};

struct Int8ChannelAccumulatorTile : Int8ChannelTile {
  static double peak(int rounds) {
    return peak_of_accumulators(rounds, 2 * kAccumulatorRows * kLanes * kQuad,
                                [](__vector_quad* acc, Bytes16 w, Bytes16 x) __attribute__((always_inline)) {
                                  __builtin_mma_xvi8ger4pp(acc, x, w);
                                });
  }
};

template <typename T>
using FloatRows = InRegisters<FloatAccumulatorTile<T>>;
using Int8ChannelRows = InRegisters<Int8ChannelAccumulatorTile>;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = InRegisters<GroupTile<NIBBLES, SHIFTS>>;
template <ChunkTraits T>
using ExpandedRows = StripRows<T>;

}  // namespace tidewheel::TW_ISA
