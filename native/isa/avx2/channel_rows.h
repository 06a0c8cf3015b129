// Micro-kernels for kInt8Channel: up to eight rows at once as weights are stored, and many rows in 16 bits, six rows by two
// vectors.
#pragma once

#include <utility>

#include "isa/avx2/signed_bytes.h"
#include "isa/avx2/wide_chunk.h"
#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

// A tile of many rows holds integers until all inputs are added.
class Int8ChannelRows {
 public:
  static constexpr int kRows = 8 * kTileRows;

  Int8ChannelRows() {}  // leaves the room for a chunk as it is

  void multiply(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if (rows <= kFewInRegisters) return multiply_few(format, x, panel, k, rows, tile);
    const size_t strip_size = strip_bytes(format, k), row_size = row_bytes(format, k);
    const int inputs = channel_inputs(k);
    for (int begin = 0; begin < inputs; begin += kChunkInputs) {
      const int quads = (inputs - begin < kChunkInputs ? inputs - begin : kChunkInputs) / kQuad;
      const char* const chunk = panel + begin * kLanes;
      for (int s = 0; s < kStrips; ++s) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(chunk + s * strip_size);
        for (int q = 0; q < quads; ++q) put_quad(strips_[s], q, load_bytes(bytes + q * kVectorBytes));
      }
      const size_t chunk_size = size_t(quads) * kVectorBytes, part = chunk_size * kTileRows / rows;
      const char* next = begin + kChunkInputs < inputs ? chunk + chunk_size : panel + kStrips * strip_size;
      for (int r = 0; r < rows; r += kTileRows, next += part) {
        for (int s = 0; s < kStrips; ++s) {
          for (size_t i = 0; i < part; i += kLineBytes) prefetch_later(next + s * strip_size + i);
        }
        const int n = rows - r < kTileRows ? rows - r : kTileRows;
        widen_bytes(x + r * row_size + n * (kHeadBytes + begin), n * quads * kQuad, inputs_);
        (this->*by_rows(std::make_integer_sequence<int, kTileRows>())[n - 1])(quads, begin == 0, tile + r * kPanel);
      }
    }
    for (int r = 0; r < rows; r += kTileRows) {
      const int n = rows - r < kTileRows ? rows - r : kTileRows;
      const auto* scales = reinterpret_cast<const float*>(x + r * row_size);
      for (int s = 0; s < kStrips; ++s) {
        const F w = load(reinterpret_cast<const float*>(panel + (s + 1) * strip_size) - kLanes);
        for (int i = 0; i < n; ++i) {
          float* const out = tile + (r + i) * kPanel + s * kLanes;
          store(out, mul(to_floats(load_sums(out)), mul(w, set1(scales[i]))));
        }
      }
    }
  }

  static double peak(int rounds) { return Int8ChannelTile::peak(rounds); }

 private:
  static constexpr int kVectors = 2;  // strips at a time
  static constexpr size_t kNext = sizeof(WideChunk) / sizeof(int16_t);  // from a strip's codes to the next one's

  static I load_sums(const float* tile) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile))}; }

  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    const auto multiply = [&]<int FIRST, int SECOND>() {
      multiply_bytes_of_channels<FIRST, SECOND>(format, x, panel, k, tile);
    };
    if (with_byte_rows(rows, multiply)) return;
    if (rows < kFewestForMagnitudes) return InRegisters<Int8ChannelTile>().multiply(format, x, panel, k, rows, tile);
    multiply.template operator()<kTileRows, 0>();
    multiply_few(format, x + kTileRows * row_bytes(format, k), panel, k, rows - kTileRows, tile + kTileRows * kPanel);
  }

  template <int ROWS>
  void rows(int quads, bool begins, float* tile) const {
    for (int s = 0; s < kStrips; s += kVectors) columns<ROWS>(strips_[s].codes, inputs_, quads, begins, tile + s * kLanes);
  }

  template <int ROWS>
  TW_INLINE void add_pairs(I (&sum)[ROWS][kVectors], const int16_t* codes, const int16_t* x) {
    const __m256i left = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + kNext));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const __m256i two = four_bytes(x + r * kQuad);
      sum[r][0] = settled(add(sum[r][0], {_mm256_madd_epi16(left, two)}));
      sum[r][1] = settled(add(sum[r][1], {_mm256_madd_epi16(right, two)}));
    }
  }

  template <int ROWS>
  TW_INLINE void columns(const int16_t* codes, const int16_t* x, int quads, bool begins, float* tile) {
    I sum[ROWS][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = begins ? set1_int(0) : load_sums(tile + r * kPanel + v * kLanes);
    }
    for (int q = 0; q < quads; ++q, codes += kQuad * kLanes, x += ROWS * kQuad) {
      add_pairs<ROWS>(sum, codes, x);
      add_pairs<ROWS>(sum, codes + 2 * kLanes, x + 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile + r * kPanel + v * kLanes), sum[r][v].v);
      }
    }
  }

  using Multiply = void (Int8ChannelRows::*)(int, bool, float*) const;
  template <int... I>
  static const Multiply* by_rows(std::integer_sequence<int, I...>) {
    static constexpr Multiply kMultiply[] = {&Int8ChannelRows::template rows<I + 1>...};
    return kMultiply;
  }

  WideChunk strips_[kStrips];
  alignas(64) int16_t inputs_[kChunkInputs * kTileRows];
};

}  // namespace tidewheel::TW_ISA
