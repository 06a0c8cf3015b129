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

#include "kernels/gemm_tiles.h"

namespace tidewheel::TW_ISA {

constexpr int kVectorBytes = kQuad * kLanes;
constexpr int kGroupQuads = kRowGroup / kQuad;

// What integers codes stand for.
enum class Codes { kPlain, kNonlinear, kE2m1 };

// What a format is.
struct BlockTraits {
  bool whole, four, two, one;  // planes
  bool halves;                 // scales are for 16 inputs, else for 32 or more
  bool shifts;                 // w = scale * code + shift, else scale * (code - zero)
  int zero;
  Codes codes = Codes::kPlain;

  // Of a group of all lanes.
  constexpr int vectors() const { return 8 * whole + 4 * four + 2 * two + one; }
};

constexpr BlockTraits kQ5_0Traits = {false, true, false, true, false, false, 16};
constexpr BlockTraits kQ5KTraits = {false, true, false, true, false, true, 0};  // and kQ5_1
constexpr BlockTraits kQ2KTraits = {false, false, true, false, true, true, 0};
constexpr BlockTraits kQ3KTraits = {false, false, true, true, true, false, 4};
constexpr BlockTraits kQ4KTraits = {false, true, false, false, false, true, 0};
constexpr BlockTraits kQ6KTraits = {false, true, true, false, true, false, 32};
constexpr BlockTraits kIq4Traits = {false, true, false, false, false, false, 0, Codes::kNonlinear};
constexpr BlockTraits kMxfp4Traits = {false, true, false, false, false, false, 0, Codes::kE2m1};
constexpr BlockTraits kNvfp4Traits = {false, true, false, false, true, false, 0, Codes::kE2m1};
template <int BITS, bool ZERO_POINTS>
constexpr BlockTraits kGridTraits = {BITS == 8, BITS == 4, BITS == 2 || BITS == 3, BITS == 3, false, ZERO_POINTS,
                                     ZERO_POINTS ? 0 : 1 << (BITS - 1)};

// Calls `body` with a format's kind and traits as its template arguments.
template <typename Body>
TW_INLINE auto with_kind(const WeightFormat& format, Body&& body) {
  using enum WeightKind;
  switch (format.kind) {
    case kQ5_0: return body.template operator()<kQ5_0, kQ5_0Traits>();
    case kQ5_1: return body.template operator()<kQ5_1, kQ5KTraits>();
    case kQ2K: return body.template operator()<kQ2K, kQ2KTraits>();
    case kQ3K: return body.template operator()<kQ3K, kQ3KTraits>();
    case kQ4K: return body.template operator()<kQ4K, kQ4KTraits>();
    case kQ5K: return body.template operator()<kQ5K, kQ5KTraits>();
    case kQ6K: return body.template operator()<kQ6K, kQ6KTraits>();
    case kIq4Nl: return body.template operator()<kIq4Nl, kIq4Traits>();
    case kIq4Xs: return body.template operator()<kIq4Xs, kIq4Traits>();
    case kMxfp4: return body.template operator()<kMxfp4, kMxfp4Traits>();
    case kNvfp4: return body.template operator()<kNvfp4, kNvfp4Traits>();
    default: break;
  }
  const auto grid = [&]<int BITS>() {
    return format.zero_points ? body.template operator()<kGrid, kGridTraits<BITS, true>>()
                              : body.template operator()<kGrid, kGridTraits<BITS, false>>();
  };
  switch (format.bits) {
    case 2: return grid.template operator()<2>();
    case 3: return grid.template operator()<3>();
    case 4: return grid.template operator()<4>();
    default: return grid.template operator()<8>();
  }
}

TW_INLINE BlockTraits traits_of(const WeightFormat& format) {
  return with_kind(format, []<WeightKind, BlockTraits TRAITS>() { return TRAITS; });
}

// Whole bytes and a table's integers are signed, and stored like this: plus 128 where weights are multiplied unsigned.
constexpr bool kUnsignedBytes = kQuadZero != 0;
constexpr bool are_bytes(const BlockTraits& traits) { return traits.whole || traits.codes != Codes::kPlain; }

// Whether the level sums a few products of small unsigned codes in 16 bits (`multiply_short`).
template <typename W>
constexpr bool kHasShortSums = requires(W w, const int8_t* x) { multiply_short(w, x); };

// For how many vectors of codes such sums fit; 0 where they are not taken. A sum has two products a vector.
constexpr int short_quads(const BlockTraits& traits) {
  if (!kHasShortSums<Quads> || are_bytes(traits)) return 0;
  const int bits = 4 * traits.four + 2 * traits.two + traits.one, most = 32767 / (2 * 127 * ((1 << bits) - 1));
  const int quads = kGroupQuads / (traits.halves ? 2 : 1);
  return most >= quads ? quads : most >= 4 ? 4 : 2;
}

// Other codes are unsigned, and where weights are multiplied signed `zero` is taken off them.
constexpr bool unsigned_codes(const BlockTraits& traits) { return kUnsignedBytes || short_quads(traits) > 0; }
// What expanded weights without shifts are too high by.
constexpr int code_offset(const BlockTraits& traits) {
  if (!unsigned_codes(traits) || traits.shifts) return 0;
  return are_bytes(traits) ? kQuadZero : traits.zero;
}

// How a chunk is multiplied once it is expanded.
struct ChunkTraits {
  bool halves, shifts;
  int short_quads = 0;

  TW_INLINE constexpr ChunkTraits of(const BlockTraits& traits) {
    return {traits.halves, traits.shifts, tidewheel::TW_ISA::short_quads(traits)};
  }
  constexpr int parts() const { return halves ? 2 : 1; }
};

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
      case WeightKind::kQ2K: return {2, 0, 2 * groups};
      case WeightKind::kQ4K:
      case WeightKind::kQ5K: return {2, 0, 12};
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

TW_INLINE bool is_blocks(WeightKind kind) { return kind >= WeightKind::kQ5_0 && kind <= WeightKind::kGrid; }

TW_INLINE size_t chunk_bytes(const WeightFormat& format, int groups) {
  return ChunkHeader::of(format, groups).size() + size_t(groups) * traits_of(format).vectors() * kVectorBytes;
}

// How many inputs of a column lie side by side in an expanded chunk: a quad, or two where the level pairs them.
template <typename B>
constexpr bool kPairsQuads = requires(B a) { pair_quads(a, a); };
constexpr int kExpandedUnit = kPairsQuads<Bytes> ? 2 * kQuad : kQuad;
// Puts a group's quads into that order.
template <typename B>
TW_INLINE void to_units(B (&quads)[kGroupQuads]) {
  if constexpr (kPairsQuads<B>) {
#pragma GCC unroll 4
    for (int q = 0; q < kGroupQuads; q += 2) pair_quads(quads[q], quads[q + 1]);
  }
}

// A chunk, ready to be multiplied: codes [inputs / unit][kLanes][unit], and a scale, and where there are shifts a shift,
// for every 32 inputs or every 16.
struct alignas(64) Expanded {
  uint8_t codes[kChunkInputs * kLanes];
  float scales[2 * kChunkGroups][kLanes];
  float shifts[2 * kChunkGroups][kLanes];
};

void expand_chunk(const WeightFormat& format, const char* chunk, int groups, Expanded& out);

// Where tiles multiply, what is expanded is signed if it has no shifts.
constexpr bool unsigned_expanded(const BlockTraits& traits) {
  return unsigned_codes(traits) && (traits.shifts || !kExpandedForTiles);
}

// The integer of column `lane` at input i, as in the definition of the format, with `scales` and `shifts`.
TW_INLINE int code_at(const BlockTraits& traits, const Expanded& e, int lane, int i) {
  const uint8_t code = e.codes[(i / kExpandedUnit * kLanes + lane) * kExpandedUnit + i % kExpandedUnit];
  return unsigned_expanded(traits) ? code - code_offset(traits) : static_cast<int8_t>(code);
}

TW_INLINE void prefetch_lines(const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLineBytes) prefetch(from + i);
}

struct alignas(16) CodeTable {
  uint8_t entries[16];
};
constexpr CodeTable make_table(const int (&values)[16], int added) {
  CodeTable table{};
  for (int i = 0; i < 16; ++i) table.entries[i] = static_cast<uint8_t>(values[i] + added);
  return table;
}
template <bool UNSIGNED>
constexpr CodeTable kNonlinear =
    make_table({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, UNSIGNED ? 128 : 0);
// Twice the values of e2m1.
template <bool UNSIGNED>
constexpr CodeTable kTwiceE2m1 = make_table({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, UNSIGNED ? 128 : 0);

// A group's codes, all planes joined, as they are multiplied. Moves `planes` past it.
template <BlockTraits T, bool UNSIGNED = unsigned_codes(T)>
TW_INLINE void load_group(const uint8_t*& planes, Bytes (&codes)[kGroupQuads]) {
  constexpr int kLowBits = T.four ? 4 : 2;
  if constexpr (T.whole) {
#pragma GCC unroll 8
    for (int q = 0; q < kGroupQuads; ++q) codes[q] = load_bytes(planes + q * kVectorBytes);
  }
  if constexpr (T.four) {
#pragma GCC unroll 4
    for (int q = 0; q < kGroupQuads; q += 2) {
      const Bytes both = load_bytes(planes + q / 2 * kVectorBytes);
      codes[q] = field<0, 4>(both);
      codes[q + 1] = field<4, 4>(both);
    }
  }
  if constexpr (T.two) {
#pragma GCC unroll 2
    for (int q = 0; q < kGroupQuads; q += 4) {
      const Bytes all = load_bytes(planes + (4 * T.four + q / 4) * kVectorBytes);
      const Bytes fields[] = {field<0, 2>(all), field<2, 2>(all), field<4, 2>(all), field<6, 2>(all)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if constexpr (T.four) {
          codes[q + i] = or_above<4>(codes[q + i], fields[i]);
        } else {
          codes[q + i] = fields[i];
        }
      }
    }
  }
  if constexpr (T.one) {
    const Bytes all = load_bytes(planes + (4 * T.four + 2 * T.two) * kVectorBytes);
    const Bytes fields[] = {field<0, 1>(all), field<1, 1>(all), field<2, 1>(all), field<3, 1>(all),
                            field<4, 1>(all), field<5, 1>(all), field<6, 1>(all), field<7, 1>(all)};
#pragma GCC unroll 8
    for (int q = 0; q < kGroupQuads; ++q) codes[q] = or_above<kLowBits>(codes[q], fields[q]);
  }
  planes += T.vectors() * kVectorBytes;
#pragma GCC unroll 8
  for (int q = 0; q < kGroupQuads; ++q) {
    if constexpr (T.codes != Codes::kPlain) {
      constexpr const CodeTable& kTable = T.codes == Codes::kNonlinear ? kNonlinear<UNSIGNED> : kTwiceE2m1<UNSIGNED>;
      codes[q] = lookup(kTable.entries, codes[q]);
    } else if constexpr (!UNSIGNED && T.whole) {
      codes[q] = sub(codes[q], 128);
    } else if constexpr (!UNSIGNED && !T.shifts) {
      codes[q] = sub(codes[q], static_cast<uint8_t>(T.zero));
    }
  }
}

// Packed rows: a group of 32 inputs after the other. The scale; for all its inputs, or those of each half, what brings
// weights back to their zero: `code_offset` times the sum of the row's integers, negative, or with shifts that sum times
// the scale, in float; then the integers.
template <int ROWS, int PARTS>
struct BlockRows {
  float scale[ROWS];
  int32_t correction[PARTS][ROWS];
  int8_t quads[kRowGroup / kBlockRun][ROWS][kBlockRun];

  // dot[r] += w times the four inputs of row r from 4 * s on.
  template <typename Sums>
  TW_INLINE void multiply(Sums& dot, Bytes w, const BlockRows& group, int s) {
    if constexpr (kBlockRun == kQuad) {
      multiply_quads<ROWS>(dot, as_quads(w), group.quads[s]);
    } else {
      const Quads quads = as_quads(w);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        dot[r] = dot_quads(dot[r], quads, group.quads[s * kQuad / kBlockRun][r] + s * kQuad % kBlockRun);
      }
    }
  }

  // The same for all inputs of part p. `code(s)` is the w for those from 4 * s on.
  template <int SHORT_QUADS, typename Code>
  TW_INLINE void multiply_part(I (&dot)[ROWS], const Code& code, const BlockRows& group, int p) {
    constexpr int kQuads = kGroupQuads / PARTS, kTogether = SHORT_QUADS > 0 ? SHORT_QUADS : 1;
    with_row_sums(dot, [&](auto& sums) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int s = p * kQuads; s < (p + 1) * kQuads; s += kTogether) {
        if constexpr (SHORT_QUADS > 0) {
          add_short_sums<SHORT_QUADS>(sums, code, group, s);
        } else {
          multiply(sums, code(s), group, s);
        }
      }
    });
  }

 private:
  template <int SHORT_QUADS, typename Code>
  TW_INLINE void add_short_sums(I (&dot)[ROWS], const Code& code, const BlockRows& group, int s) {
    decltype(multiply_short(as_quads(code(0)), group.quads[0][0])) sum[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < SHORT_QUADS; ++i) {
      const auto w = as_quads(code(s + i));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const auto products = multiply_short(w, group.quads[s + i][r]);
        sum[r] = i == 0 ? products : add(sum[r], products);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) dot[r] = add_short(dot[r], sum[r]);
  }
};

TW_INLINE size_t block_row_bytes(const WeightFormat& format, int k) {
  return row_groups(k) * (sizeof(float) * (traits_of(format).halves ? 3 : 2) + kRowGroup);
}

}  // namespace tidewheel::TW_ISA
