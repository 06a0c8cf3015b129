// Weights that keep the bits of a quantized file, and what they are expanded to for a multiplication.
//
// Packed, a strip is kLanes columns in chunks of 256 inputs; the last has fewer, in whole groups of 32. A chunk:
//   header, for all lanes, filled up to whole vectors of bytes: float16 numbers [halves][kLanes], 4-byte numbers
//   [words][kLanes], bytes [bytes][kLanes]: the format's own scales;
//   then group after group the codes' bits, in planes. A plane is vectors of bytes [kLanes][4]: of four inputs, those at
//   bit 0, of the next four at the next field of bits, and so on. So a group of 32 has 4 vectors of 4-bit fields, then 2
//   of 2-bit fields, then 1 of single bits, or 8 of whole bytes, as far as the format has them; the first plane has a
//   code's lowest bits.
//
// A format differs from another in how a chunk is expanded, and not in how that is multiplied.
#pragma once

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

constexpr int kChunkInputs = 256;
constexpr int kChunkGroups = kChunkInputs / kRowGroup;
constexpr int kVectorBytes = kQuad * kLanes;
constexpr int kGroupQuads = kRowGroup / kQuad;

// What a format is.
struct BlockTraits {
  bool whole, four, two, one;  // planes
  bool halves;                 // scales are for 16 inputs, else for 32 or more
  bool shifts;                 // w = scale * code + shift, else scale * (code - zero)
  bool table;                  // codes are places in a table of integers
  int zero;

  // Of a group of all lanes.
  constexpr int vectors() const { return 8 * whole + 4 * four + 2 * two + one; }
};

constexpr BlockTraits traits_of(const WeightFormat& format) {
  switch (format.kind) {
    case WeightKind::kQ5_0: return {false, true, false, true, false, false, false, 16};
    case WeightKind::kQ5_1:
    case WeightKind::kQ5K: return {false, true, false, true, false, true, false, 0};
    case WeightKind::kQ2K: return {false, false, true, false, true, true, false, 0};
    case WeightKind::kQ3K: return {false, false, true, true, true, false, false, 4};
    case WeightKind::kQ4K: return {false, true, false, false, false, true, false, 0};
    case WeightKind::kQ6K: return {false, true, true, false, true, false, false, 32};
    case WeightKind::kIq4Nl:
    case WeightKind::kIq4Xs:
    case WeightKind::kMxfp4: return {false, true, false, false, false, false, true, 0};
    case WeightKind::kNvfp4: return {false, true, false, false, true, false, true, 0};
    default: {
      const int b = format.bits;
      return {b == 8, b == 4, b == 2 || b == 3, b == 3, false, format.zero_points, false, 1 << (b - 1)};
    }
  }
}

// Whole bytes and a table's integers are signed, and stored like this: plus 128 where weights are multiplied unsigned.
// Other codes are unsigned, and where weights are multiplied signed `zero` is taken off them.
constexpr bool kUnsignedCodes = kQuadZero != 0;
// What expanded weights without shifts are too high by.
constexpr int code_offset(const BlockTraits& traits) {
  if (!kUnsignedCodes || traits.shifts) return 0;
  return traits.table || traits.whole ? kQuadZero : traits.zero;
}

// Scales and zero points of a grid's chunk.
TW_INLINE int grid_scales(const WeightFormat& format, int groups) {
  return format.group < kChunkInputs ? (groups * kRowGroup + format.group - 1) / format.group : 1;
}

struct ChunkHeader {
  int halves, words, bytes;
  TW_INLINE ChunkHeader of(const WeightFormat& format, int groups) {
    switch (format.kind) {
      case WeightKind::kQ5_0:
      case WeightKind::kIq4Nl: return {groups, 0, 0};
      case WeightKind::kQ5_1: return {2 * groups, 0, 0};
      case WeightKind::kQ2K:
      case WeightKind::kQ4K:
      case WeightKind::kQ5K: return {2, 0, 2 * groups};
      case WeightKind::kQ3K:
      case WeightKind::kQ6K: return {1, 0, 2 * groups};
      case WeightKind::kIq4Xs: return {1, 0, groups};
      case WeightKind::kMxfp4: return {0, 0, groups};
      case WeightKind::kNvfp4: return {0, 1, 2 * groups};
      default: {
        const int scales = grid_scales(format, groups), zeros = format.zero_points ? scales : 0;
        return format.scale_type == DType::kFloat32 ? ChunkHeader{0, scales, zeros} : ChunkHeader{scales, 0, zeros};
      }
    }
  }
  TW_INLINE int padded(int column_bytes) { return round_up_to(column_bytes, kQuad) * kLanes; }
  TW_INLINE size_t words_at(int halves) { return size_t(halves) * sizeof(f16) * kLanes; }
  TW_INLINE size_t bytes_at(int halves, int words) { return (halves * sizeof(f16) + words * sizeof(float)) * kLanes; }
  size_t size() const { return padded(static_cast<int>(halves * sizeof(f16) + words * sizeof(float)) + bytes); }
};

TW_INLINE bool is_blocks(WeightKind kind) { return kind >= WeightKind::kQ5_0; }

TW_INLINE size_t chunk_bytes(const WeightFormat& format, int groups) {
  return ChunkHeader::of(format, groups).size() + size_t(groups) * traits_of(format).vectors() * kVectorBytes;
}

// A chunk, ready to be multiplied: codes in vectors of four inputs, and a scale, and where there are shifts a shift, for
// every 32 inputs or every 16.
struct alignas(64) Expanded {
  uint8_t codes[kChunkInputs * kLanes];
  float scales[2 * kChunkGroups][kLanes];
  float shifts[2 * kChunkGroups][kLanes];
};

void expand_chunk(const WeightFormat& format, const char* chunk, int groups, Expanded& out);

// The integer of column `lane` at input i, as in the definition of the format, with `scales` and `shifts`.
TW_INLINE int code_at(const BlockTraits& traits, const Expanded& e, int lane, int i) {
  const uint8_t code = e.codes[(i / kQuad * kLanes + lane) * kQuad + i % kQuad];
  return kUnsignedCodes ? code - code_offset(traits) : static_cast<int8_t>(code);
}

// Packed rows: a group of 32 inputs after the other. The scale; for all its inputs, or those of each half, what brings
// weights back to their zero: `code_offset` times the sum of the row's integers, negative, or with shifts that sum times
// the scale, in float; then the integers.
template <int ROWS, int PARTS>
struct BlockRows {
  float scale[ROWS];
  int32_t correction[PARTS][ROWS];
  int8_t quads[kGroupQuads][ROWS][kQuad];
};

TW_INLINE size_t block_row_bytes(const WeightFormat& format, int k) {
  return row_groups(k) * (sizeof(float) * (traits_of(format).halves ? 3 : 2) + kRowGroup);
}

}  // namespace tidewheel::TW_ISA
