// Without a dot product of bytes, a product of signed bytes takes a sign, two multiplications and an addition: see
// dot_quads. Five to eight rows share the signs: see signed_bytes.h. With many rows, weights and inputs are widened to 16
// bits, a chunk at a time, and one multiplication takes two inputs of a column. Codes of a few bits are multiplied as
// bytes. Both take up to six rows by two vectors, so that one load of an input serves two products. The integers are the
// same.
#pragma once

#include <type_traits>

#include "isa/avx2/channel_rows.h"
#include "isa/avx2/signed_bytes.h"
#include "isa/avx2/wide_chunk.h"
#include "kernels/gemm_blocks.h"
#include "kernels/gemm_chunks.h"

namespace tidewheel::TW_ISA {

template <typename T>
using FloatRows = InRegisters<FloatTile<T>>;

// A chunk of all strips of a panel, and its products with packed rows: see BlockRows.
template <ChunkTraits T>
class ChunkStrips {
  static constexpr int kParts = T.parts(), kQuads = kGroupQuads / kParts;
  static constexpr bool kWide = T.short_quads == 0;  // 16 bits a factor; otherwise a part's products are added in 16 bits
  static constexpr int kVectors = 2;                 // strips at a time
  static_assert(kStrips % kVectors == 0 && (kWide || T.short_quads == kQuads));

 public:
  using Chunk = std::conditional_t<kWide, WideChunk, Expanded>;
  static constexpr int kTiles = 8;

  ChunkStrips() {}  // leaves the room for chunks as it is

  Chunk& strip(int s) { return strips_[s]; }

  // Sets `tile` to the products of n packed rows, of which `x` is the first group in this chunk, or adds them.
  void multiply(const char* x, int n, int groups, bool begins, float* tile, const Ahead& ahead) {
    ahead.bring(0, ahead.lines);
    if constexpr (kWide) widen_inputs(x, n, groups);
    (this->*by_rows(std::make_integer_sequence<int, kTileRows>())[n - 1])(x, groups, begins, tile);
  }

 private:
  // Of the inputs themselves, in the same order.
  void widen_inputs(const char* x, int n, int groups) {
    for (int g = 0, size = n * kRowGroup; g < groups; ++g, x += size) {
      x += (1 + kParts) * n * kQuad;
      widen_bytes(x, size, inputs_ + g * size);
    }
  }

  template <int ROWS>
  void rows(const char* x, int groups, bool begins, float* tile) const {
    for (int s = 0; s < kStrips; s += kVectors) {
      columns<ROWS>(x, inputs_, strips_[s], groups, begins, tile + s * kLanes);
    }
  }

  template <int ROWS>
  TW_INLINE void columns(const char* x, const int16_t* wide, const Chunk& strip, int groups, bool begins, float* tile) {
    constexpr ptrdiff_t kLine = ROWS * kQuad;  // all that a group has lies in lines of 4 bytes a row
    alignas(64) static constexpr float kZeros[kTileRows * kPanel] = {};
    const float* before = begins ? kZeros : tile;
    const auto* codes = strip.codes;
    const float* scale = strip.scales[0];
    const char* bytes = x + (1 + kParts) * kLine;
    for (int g = 0; g < groups; ++g, x += kLine * (1 + kParts + kGroupQuads), bytes += kLine * (1 + kParts)) {
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p, scale += kLanes) {
        const char* const correction = x + (1 + p) * kLine;
        I dot[ROWS][kVectors];
        sum_part<ROWS>(dot, codes, bytes, wide, correction);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const F w = load(scale + v * sizeof(Chunk) / sizeof(float));
          [[maybe_unused]] F shift;
          if constexpr (T.shifts) shift = load(scale + kShiftFloats + v * sizeof(Chunk) / sizeof(float));
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            float* const out = tile + r * kPanel + v * kLanes;
            F sum = load(before + r * kPanel + v * kLanes);
            sum = add_dots(sum, to_floats(dot[r][v]), w, reinterpret_cast<const float*>(x)[r]);
            if constexpr (T.shifts) sum = fma(shift, set1(reinterpret_cast<const float*>(correction)[r]), sum);
            store(out, sum);
          }
        }
        before = tile;
        asm("" : "+r"(before));  // otherwise GCC writes each sum to the stack, too, to read it there
      }
    }
  }

  // Sets `dot` to the dot products of a part. Moves `codes` and the inputs past it.
  template <int ROWS>
  TW_INLINE void sum_part(I (&dot)[ROWS][kVectors], const auto*& codes, const char*& bytes, const int16_t*& wide,
                          const char* correction) {
    constexpr size_t kNext = sizeof(Chunk) / sizeof(*codes);  // from a strip's codes to the next one's
    if constexpr (kWide) {  // of signed factors, which need no correction
#pragma GCC unroll 16
      for (int i = 0; i < 2 * kQuads; ++i, codes += 2 * kLanes) {
        const __m256i left = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + kNext));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const __m256i two = four_bytes(wide + r * kQuad + i % 2 * 2);
          const I a = {_mm256_madd_epi16(left, two)}, b = {_mm256_madd_epi16(right, two)};
          dot[r][0] = settled(i == 0 ? a : add(dot[r][0], a));
          dot[r][1] = settled(i == 0 ? b : add(dot[r][1], b));
        }
        if (i % 2 == 1) wide += ROWS * kQuad;
        asm("" : "+r"(wide));  // otherwise GCC keeps the place of each input in memory, and reads it before the input
      }
    } else {
      ShortSum sum[ROWS][kVectors];
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q, codes += kVectorBytes) {
        const Quads left = as_quads(load_bytes(codes)), right = as_quads(load_bytes(codes + kNext));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const auto* four = reinterpret_cast<const int8_t*>(bytes) + r * kQuad;
          const ShortSum a = multiply_short(left, four), b = multiply_short(right, four);
          sum[r][0] = q == 0 ? a : add(sum[r][0], a);
          sum[r][1] = q == 0 ? b : add(sum[r][1], b);
        }
        bytes += ROWS * kQuad;
        asm("" : "+r"(bytes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          dot[r][v] = add_short(set1_int(T.shifts ? 0 : reinterpret_cast<const int32_t*>(correction)[r]), sum[r][v]);
        }
      }
    }
  }

  static constexpr size_t kShiftFloats = (offsetof(Chunk, shifts) - offsetof(Chunk, scales)) / sizeof(float);

  using Multiply = void (ChunkStrips::*)(const char*, int, bool, float*) const;
  template <int... I>
  static const Multiply* by_rows(std::integer_sequence<int, I...>) {
    static constexpr Multiply kMultiply[] = {&ChunkStrips::template rows<I + 1>...};
    return kMultiply;
  }

  Chunk strips_[kStrips];
  alignas(64) int16_t inputs_[kWide ? kChunkInputs * kTileRows : 1];
};

// kInt8, and kInt4.
template <bool NIBBLES, bool SHIFTS>
struct PackedWeights : GroupWeights<NIBBLES, SHIFTS, kFewInRegisters> {
  using Weights = GroupWeights<NIBBLES, SHIFTS, kFewInRegisters>;

  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    if constexpr (!NIBBLES) {
      const auto multiply = [&]<int FIRST, int SECOND>() {
        multiply_bytes_of_groups<FIRST, SECOND>(format, x, panel, k, tile);
      };
      if (with_byte_rows(rows, multiply)) return;
      if (rows > kTileRows) {
        multiply.template operator()<kTileRows, 0>();
        const size_t tile_size = kTileRows * row_bytes(format, k);
        return multiply_few(format, x + tile_size, panel, k, rows - kTileRows, tile + kTileRows * kPanel);
      }
    }
    Weights::multiply_few(format, x, panel, k, rows, tile);
  }
};

// Signed codes go through bytes.
template <ChunkTraits T>
struct ChunkWeights : BlockWeights<T> {
  static constexpr int kFew = kFewInRegisters;

  using BlockWeights<T>::expand;
  TW_INLINE void expand(const WeightFormat& format, const char* chunk, int groups, WideChunk& out) {
    Expanded bytes;
    expand_chunk(format, chunk, groups, bytes);
    for (int q = 0; q < groups * kGroupQuads; ++q) put_signed_quad(out, q, load_bytes(bytes.codes + q * kVectorBytes).v);
    std::memcpy(out.scales, bytes.scales, sizeof out.scales);
    if constexpr (T.shifts) std::memcpy(out.shifts, bytes.shifts, sizeof out.shifts);
  }
  static void multiply_few(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
    StripRows<T>().multiply(format, x, panel, k, rows, tile);
  }
};

// Where only a few products fit in 16 bits, there are too few registers for two vectors.
template <ChunkTraits T>
constexpr bool kInChunks = T.short_quads == 0 || T.short_quads == kGroupQuads / T.parts();
template <ChunkTraits T>
struct ManyRows {
  using Type = StripRows<T>;
};
template <ChunkTraits T>
  requires kInChunks<T>
struct ManyRows<T> {
  using Type = ByChunks<ChunkWeights<T>, ChunkStrips<T>>;
};
template <ChunkTraits T>
using ExpandedRows = typename ManyRows<T>::Type;
template <bool NIBBLES, bool SHIFTS>
using GroupRows = ByChunks<PackedWeights<NIBBLES, SHIFTS>, ChunkStrips<PackedWeights<NIBBLES, SHIFTS>::kTraits>>;

}  // namespace tidewheel::TW_ISA
