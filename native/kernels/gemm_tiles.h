// Micro-tiles in vector registers: ROWS packed rows times one panel of columns, into tile [ROWS][kPanel]. Each output
// has one accumulator, which takes the inputs in order.
#pragma once

#include <utility>

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

// Prefetches what follows a line of a panel, which is read in order, for a tile of ROWS rows. With few rows it comes from
// memory, and must arrive before it is needed. Whole tiles find it in a cache, except the first of them.
template <int ROWS, typename T>
TW_INLINE void prefetch_panel(const T* line) {
  if constexpr (ROWS < kTileRows && requires { prefetch_in_steps(line); }) {
    prefetch_in_steps(line);
  } else {
    prefetch(reinterpret_cast<const char*>(line) + 4096);
  }
}

// A peak is measured with `kPeakSums` independent sums, enough that latency does not matter, in `kPeakSteps` steps a
// round. Their total is added to the result, far below its precision, so that the compiler cannot remove the work.
constexpr int kPeakSums = kTileRows * kTileVectors, kPeakSteps = 1024;
constexpr double kPeakTrace = 1e-30;

// How a kind of weight is multiplied: `rows<ROWS>(format, packed rows, panel, k, tile)`.
template <typename T>
struct FloatTile {
  using E = Element<T>;

  static constexpr int kStepVectors = kLoadsHalves<T> ? 1 : E::kStep;  // that a vector of columns takes up

  // With few rows, more columns are computed at once, as many as fit into the registers of a whole tile.
  static constexpr int vectors_for(int rows) {
    int vectors = kTileVectors;
    while (vectors < kStrips && (rows + kStepVectors) * 2 * vectors <= (kTileRows + 1) * kTileVectors) vectors *= 2;
    return vectors;
  }

  static double peak(int rounds) {
    alignas(64) const T weights[E::kStep * kLanes] = {};
    const typename E::Activation inputs[E::kStep] = {};
    const T* w = weights;
    const typename E::Activation* x = inputs;
    F acc[kPeakSums];
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) acc[c] = set1(static_cast<float>(c));  // else the compiler would merge all sums
    for (int i = 0; i < rounds * kPeakSteps; ++i) {
      const typename E::Vector step = E::load_step(w);
#pragma GCC unroll 32
      for (int c = 0; c < kPeakSums; ++c) acc[c] = E::dot(acc[c], step, x);
      // To the compiler, the operands may have changed here. So it cannot merge or hoist the work.
      asm volatile("" : "+r"(w), "+r"(x) : : "memory");
    }
    F sum = zero();
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) sum = add(sum, acc[c]);
    return 2.0 * rounds * kPeakSteps * kPeakSums * kLanes * E::kStep + kPeakTrace * hsum(sum);
  }

  template <int ROWS>
  static void rows(const WeightFormat&, const char* x, const char* panel, int k, float* tile) {
    constexpr int kVectors = vectors_for(ROWS);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      columns<ROWS, kVectors>(reinterpret_cast<const typename E::Activation*>(x),
                              reinterpret_cast<const T*>(panel) + column * E::kStep, float_steps<T>(k), tile + column);
    }
  }

  template <int ROWS, int VECTORS>
  TW_INLINE void columns(const typename E::Activation* x, const T* weight, int steps, float* tile) {
    F acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    }
    for (int s = 0; s < steps; ++s) {
      prefetch_panel<ROWS>(weight);
      if constexpr (VECTORS * kLanes * E::kStep * sizeof(T) > 64) prefetch_panel<ROWS>(weight + 64 / sizeof(T));
      add_products<E>(acc, [&](int v) { return weight + v * kLanes * E::kStep; }, x, E::kStep);
      weight += kPanel * E::kStep;
      x += ROWS * E::kStep;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) store(tile + r * kPanel + v * kLanes, acc[r][v]);
    }
  }
};

// Adds a group's dot products times the scales of weights and row.
TW_INLINE F add_dots(F sum, F dots, F w, float scale) { return fma(dots, mul(w, set1(scale)), sum); }

// A group: its head, then its integers.
template <int ROWS>
struct RowGroup {
  float scale[ROWS];
  int32_t correction[ROWS];
  int8_t quads[kRowGroup / kQuad][ROWS][kQuad];
};

// Calls `body` with sums for several rows: with `dot`, or with the level's own kind, which is then added to `dot`.
template <int ROWS, typename Sum, typename Body>
TW_INLINE void with_row_sums(Sum (&dot)[ROWS], Body&& body) {
  if constexpr (requires { accumulate_rows(dot, body); }) {
    accumulate_rows(dot, body);
  } else {
    body(dot);
  }
}

// Uses the level's own code for several rows at once, if it has any.
template <int ROWS, typename Sums, typename W>
TW_INLINE void multiply_quads(Sums& sum, W w, const int8_t (*x)[kQuad]) {
  if constexpr (requires { dot_rows<ROWS>(sum, w, x); }) {
    dot_rows<ROWS>(sum, w, x);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sum[r] = dot_quads(sum[r], w, x[r]);
  }
}

// The dot products of one group. Moves `weight` past it.
template <int ROWS>
TW_INLINE void multiply_bytes(I (&dot)[ROWS], const uint8_t*& weight, const int8_t (*x)[ROWS][kQuad]) {
  with_row_sums(dot, [&](auto& sum) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int s = 0; s < kRowGroup / kQuad; ++s) {
      if (s * kLanes * kQuad % 64 == 0) prefetch_panel<ROWS>(weight);  // once a cache line
      multiply_quads<ROWS>(sum, load_quads(weight), x[s]);
      weight += kLanes * kQuad;
    }
  });
}
template <int ROWS>
TW_INLINE void multiply_nibbles(I (&dot)[ROWS], const uint8_t*& weight, const int8_t (*x)[ROWS][kQuad]) {
  NibbleSum sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) sum[r] = begin_nibbles(dot[r]);
  with_row_sums(sum, [&](auto& sums) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int s = 0; s < kRowGroup / kQuad; s += 2) {
      if (s / 2 * kLanes * kQuad % 64 == 0) prefetch_panel<ROWS>(weight);
      Quads low, high;
      load_nibbles(weight, low, high);
      multiply_quads<ROWS>(sums, low, x[s]);
      multiply_quads<ROWS>(sums, high, x[s + 1]);
      weight += kLanes * kQuad;
    }
  });
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) dot[r] = end_nibbles(dot[r], sum[r]);
}
template <int ROWS, bool NIBBLES>
TW_INLINE void multiply_group(I (&dot)[ROWS], const uint8_t*& weight, const int8_t (*x)[ROWS][kQuad]) {
  if constexpr (NIBBLES) {
    multiply_nibbles<ROWS>(dot, weight, x);
  } else {
    multiply_bytes<ROWS>(dot, weight, x);
  }
}

// Without a dot product of bytes, those of codes that need no sign of their own are the most that the level can do.
template <typename Sum, typename W>
TW_INLINE Sum peak_dot(Sum acc, W quads, const int8_t* x) {
  if constexpr (requires { add_short(acc, multiply_short(quads, x)); }) {
    return add_short(acc, multiply_short(quads, x));
  } else {
    return dot_quads(acc, quads, x);
  }
}

struct Int8ChannelTile {
  static double peak(int rounds) {
    alignas(64) const uint8_t weights[kQuad * kLanes] = {};
    const int8_t inputs[kQuad] = {1, 1, 1, 1};
    const uint8_t* w = weights;
    const int8_t* x = inputs;
    I acc[kPeakSums];
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) acc[c] = set1_int(c);
    for (int i = 0; i < rounds * kPeakSteps; ++i) {
      const Quads quads = load_quads(w);
#pragma GCC unroll 32
      for (int c = 0; c < kPeakSums; ++c) {
        if constexpr (kDotsBytes) {
          acc[c] = dot_quads(acc[c], quads, x);
        } else {
          asm volatile("" : "+r"(x) : : "memory");  // else all sums would share their products
          acc[c] = peak_dot(acc[c], quads, x);
        }
      }
      asm volatile("" : "+r"(w), "+r"(x) : : "memory");
    }
    int sum = 0;
#pragma GCC unroll 32
    for (int c = 0; c < kPeakSums; ++c) sum += hsum(acc[c]);
    return 2.0 * rounds * kPeakSteps * kPeakSums * kLanes * kQuad + kPeakTrace * sum;
  }

  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    const auto* scale = reinterpret_cast<const float*>(x);
    const auto* correction = reinterpret_cast<const int32_t*>(x) + ROWS;
    for (int strip = 0; strip < kStrips; ++strip) {
      const char* base = panel + strip * strip_bytes(format, k);
      const auto* weight = reinterpret_cast<const uint8_t*>(base);
      const auto* quads = reinterpret_cast<const int8_t(*)[ROWS][kQuad]>(x + ROWS * kHeadBytes);
      I dot[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) dot[r] = set1_int(correction[r]);
      for (int g = 0; g < row_groups(k); ++g) {
        multiply_group<ROWS, false>(dot, weight, quads);
        quads += kRowGroup / kQuad;
      }
      const F w = load(reinterpret_cast<const float*>(weight));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        store(tile + r * kPanel + strip * kLanes, mul(to_floats(dot[r]), mul(w, set1(scale[r]))));
      }
    }
  }
};

// kInt4, and kInt8.
template <bool NIBBLES, bool SHIFTS>
struct GroupTile {
  template <int ROWS>
  static void rows(const WeightFormat& format, const char* x, const char* panel, int k, float* tile) {
    for (int strip = 0; strip < kStrips; ++strip) {
      columns<ROWS>(format, reinterpret_cast<const RowGroup<ROWS>*>(x), panel + strip * strip_bytes(format, k), k,
                    tile + strip * kLanes);
    }
  }

  template <int ROWS>
  TW_INLINE void columns(const WeightFormat& format, const RowGroup<ROWS>* group, const char* strip, int k, float* tile) {
    const GroupLayout layout = GroupLayout::of(format, k);
    const int groups = row_groups(k), per_scale = format.group / kRowGroup;
    F acc[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) acc[r] = zero();
    const auto* weight = reinterpret_cast<const uint8_t*>(strip);
    for (int g = 0; g < groups;) {
      // A block's scales, then its two groups.
      const auto* scales = reinterpret_cast<const f16*>(weight);
      prefetch_panel<ROWS>(weight);
      weight += layout.header_bytes;
      for (int half = 0; half < 2 && g < groups; ++half) {
        const F w = load(scales + half * kLanes);
        [[maybe_unused]] F shift;
        if constexpr (SHIFTS) shift = load(scales + (2 + half) * kLanes);
        const int end = g + per_scale < groups ? g + per_scale : groups;
        for (; g < end; ++g, ++group) {
          I dot[ROWS];
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) dot[r] = set1_int(SHIFTS ? 0 : group->correction[r]);
          multiply_group<ROWS, NIBBLES>(dot, weight, group->quads);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; ++r) {
            acc[r] = add_dots(acc[r], small_to_floats(dot[r]), w, group->scale[r]);
            if constexpr (SHIFTS) acc[r] = fma(shift, set1(reinterpret_cast<const float*>(group->correction)[r]), acc[r]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(tile + r * kPanel, acc[r]);
  }
};

// A micro-kernel: up to kRows packed rows, which begin a packed tile, times a panel. `gemm` makes one for each call.
template <typename Tile>
struct InRegisters {
  static constexpr int kRows = kTileRows;

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) const {
    by_rows(std::make_integer_sequence<int, kRows>{})[rows - 1](format, x, panel, k, tile);
  }

  // Operations done by multiply-accumulates alone. A multiply and an add count as two.
  static double peak(int rounds) { return Tile::peak(rounds); }

 private:
  using Multiply = void (*)(const WeightFormat&, const char*, const char*, int, float*);
  template <int... I>
  static const Multiply* by_rows(std::integer_sequence<int, I...>) {
    static constexpr Multiply kMultiply[] = {Tile::template rows<I + 1>...};
    return kMultiply;
  }
};

}  // namespace tidewheel::TW_ISA
