// Multiplies a few rows by weights that keep the bits of a quantized file. Integer sums are exact, and floats are added
// in the order of gemm_blocks.h, so the results are the same as those with many rows.
#include "kernels/block_scales.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

// The prefetch distance: headers and planes from memory must arrive before they are needed.
constexpr int kAheadBytes = 8192;

template <WeightKind KIND, BlockTraits T, int ROWS>
void multiply_strip(const WeightFormat& format, const char* x, const char* chunk, int k, float* tile) {
  constexpr int kParts = T.halves ? 2 : 1;
  const auto* group = reinterpret_cast<const BlockRows<ROWS, kParts>*>(x);
  const size_t chunk_size = chunk_bytes(format, kChunkGroups);
  const int groups = row_groups(k);
  F acc[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) acc[r] = zero();
  for (int begin = 0; begin < groups; begin += kChunkGroups, chunk += chunk_size) {
    const int count = groups - begin < kChunkGroups ? groups - begin : kChunkGroups;
    ScaleReader<KIND, T> scales(format, chunk, count);
    const uint8_t* planes = scales.planes();
    prefetch_lines(chunk + kAheadBytes, reinterpret_cast<const char*>(planes) - chunk);
    for (int g = 0; g < count; ++g, ++group) {
      prefetch_lines(reinterpret_cast<const char*>(planes) + kAheadBytes, T.vectors() * kVectorBytes);
      Bytes codes[kGroupQuads];
      load_group<T>(planes, codes);
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        I dot[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) dot[r] = set1_int(T.shifts ? 0 : group->correction[p][r]);
        BlockRows<ROWS, kParts>::template multiply_part<short_quads(T)>(dot, [&](int s) { return codes[s]; }, *group, p);
        F w, shift = zero();
        scales.next(w, shift);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          acc[r] = add_dots(acc[r], small_to_floats(dot[r]), w, group->scale[r]);
          if constexpr (T.shifts) {
            const F sum = set1(reinterpret_cast<const float*>(group->correction[p])[r]);
            acc[r] = fma(shift, sum, acc[r]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) store(tile + r * kPanel, acc[r]);
}

using Multiply = void (*)(const WeightFormat&, const char*, const char*, int, float*);

template <WeightKind KIND, BlockTraits T, int... I>
Multiply by_rows(int rows, std::integer_sequence<int, I...>) {
  static constexpr Multiply kMultiply[] = {multiply_strip<KIND, T, I + 1>...};
  return kMultiply[rows - 1];
}

}  // namespace

template <int FEW_ROWS, int RUN, int QUAD_ZERO>
void multiply_few_rows(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile) {
  with_kind(format, [&]<WeightKind KIND, BlockTraits TRAITS>() {
    const Multiply multiply = by_rows<KIND, TRAITS>(rows, std::make_integer_sequence<int, FEW_ROWS>{});
    for (int s = 0; s < kStrips; ++s) multiply(format, x, panel + s * block_strip_bytes(format, k), k, tile + s * kLanes);
  });
}

template void multiply_few_rows<kFewRows, kBlockRun, kQuadZero>(const WeightFormat&, const char*, const char*, int, int,
                                                                float*);

}  // namespace tidewheel::TW_ISA
