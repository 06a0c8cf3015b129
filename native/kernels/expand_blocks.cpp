// Expands chunks of quantized files' weights from the stored bits to integers and scales.
#include "kernels/block_scales.h"

namespace tidewheel::TW_ISA {

size_t block_strip_bytes(const WeightFormat& format, int k) {
  const int groups = row_groups(k), rest = groups % kChunkGroups;
  return groups / kChunkGroups * chunk_bytes(format, kChunkGroups) + (rest ? chunk_bytes(format, rest) : 0);
}

void expand_chunk(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
  with_kind(format, [&]<WeightKind KIND, BlockTraits TRAITS>() {
    constexpr int kParts = TRAITS.halves ? 2 : 1;
    ScaleReader<KIND, TRAITS> scales(format, chunk, groups);
    const uint8_t* planes = scales.planes();
    uint8_t* to = out.codes;
    for (int g = 0; g < groups; ++g) {
      Bytes codes[kGroupQuads];
      load_group<TRAITS, unsigned_expanded(TRAITS)>(planes, codes);
      to_units(codes);
#pragma GCC unroll 8
      for (int q = 0; q < kGroupQuads; ++q) store(to + q * kVectorBytes, codes[q]);
      to += kRowGroup * kLanes;
      for (int i = g * kParts; i < (g + 1) * kParts; ++i) {
        F scale, shift = zero();
        scales.next(scale, shift);
        store(out.scales[i], scale);
        if constexpr (TRAITS.shifts) store(out.shifts[i], shift);
      }
    }
  });
}

}  // namespace tidewheel::TW_ISA
