// Chunks of quantized files' weights, from the bits that are stored to integers and scales.
#include "kernels/blocks.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr uint8_t shifted(int value) { return static_cast<uint8_t>(value + (kUnsignedCodes ? kQuadZero : 0)); }

struct alignas(16) Table {
  uint8_t entries[16];
};
constexpr Table make_table(const int (&values)[16]) {
  Table table{};
  for (int i = 0; i < 16; ++i) table.entries[i] = shifted(values[i]);
  return table;
}
constexpr Table kNonlinear = make_table({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
// Twice the values of e2m1.
constexpr Table kTwiceE2m1 = make_table({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});

// Codes of GROUPS groups at a time, all planes joined.
template <bool WHOLE, bool FOUR, bool TWO, bool ONE, bool SHIFTS>
TW_INLINE void expand_codes(const uint8_t* planes, int groups, int zero, const uint8_t* table, uint8_t* out) {
  constexpr int kLowBits = FOUR ? 4 : 2;
  const auto put = [&](int quad, Bytes codes) {
    if constexpr (WHOLE) {
      if constexpr (!kUnsignedCodes) codes = sub(codes, 128);
    } else if (table) {
      codes = lookup(table, codes);
    } else if constexpr (!kUnsignedCodes && !SHIFTS) {
      codes = sub(codes, static_cast<uint8_t>(zero));
    }
    store(out + quad * kVectorBytes, codes);
  };
  for (int g = 0; g < groups; ++g) {
    if constexpr (WHOLE) {
      for (int q = 0; q < kGroupQuads; ++q) put(q, load_bytes(planes + q * kVectorBytes));
      planes += 8 * kVectorBytes;
    } else {
      Bytes codes[kGroupQuads];
      if constexpr (FOUR) {
#pragma GCC unroll 4
        for (int q = 0; q < kGroupQuads; q += 2) {
          const Bytes both = load_bytes(planes);
          codes[q] = field<0, 4>(both);
          codes[q + 1] = field<4, 4>(both);
          planes += kVectorBytes;
        }
      }
      if constexpr (TWO) {
#pragma GCC unroll 2
        for (int q = 0; q < kGroupQuads; q += 4) {
          const Bytes all = load_bytes(planes);
          if constexpr (FOUR) {
            codes[q] = or_above<4>(codes[q], field<0, 2>(all));
            codes[q + 1] = or_above<4>(codes[q + 1], field<2, 2>(all));
            codes[q + 2] = or_above<4>(codes[q + 2], field<4, 2>(all));
            codes[q + 3] = or_above<4>(codes[q + 3], field<6, 2>(all));
          } else {
            codes[q] = field<0, 2>(all);
            codes[q + 1] = field<2, 2>(all);
            codes[q + 2] = field<4, 2>(all);
            codes[q + 3] = field<6, 2>(all);
          }
          planes += kVectorBytes;
        }
      }
      if constexpr (ONE) {
        const Bytes all = load_bytes(planes);
        codes[0] = or_above<kLowBits>(codes[0], field<0, 1>(all));
        codes[1] = or_above<kLowBits>(codes[1], field<1, 1>(all));
        codes[2] = or_above<kLowBits>(codes[2], field<2, 1>(all));
        codes[3] = or_above<kLowBits>(codes[3], field<3, 1>(all));
        codes[4] = or_above<kLowBits>(codes[4], field<4, 1>(all));
        codes[5] = or_above<kLowBits>(codes[5], field<5, 1>(all));
        codes[6] = or_above<kLowBits>(codes[6], field<6, 1>(all));
        codes[7] = or_above<kLowBits>(codes[7], field<7, 1>(all));
        planes += kVectorBytes;
      }
#pragma GCC unroll 8
      for (int q = 0; q < kGroupQuads; ++q) put(q, codes[q]);
    }
    out += kRowGroup * kLanes;
  }
}

// A header's fields, as floats.
struct Header {
  const char* at;
  ChunkHeader fields;

  F half(int i) const { return load(reinterpret_cast<const f16*>(at) + i * kLanes); }
  F brain(int i) const { return load(reinterpret_cast<const bf16*>(at) + i * kLanes); }
  F word(int i) const {
    return load(reinterpret_cast<const float*>(at + ChunkHeader::words_at(fields.halves)) + i * kLanes);
  }
  const uint8_t* bytes(int i) const {
    return reinterpret_cast<const uint8_t*>(at) + ChunkHeader::bytes_at(fields.halves, fields.words) + i * kLanes;
  }
  F byte(int i) const { return load(bytes(i)); }
  F signed_byte(int i) const { return load(reinterpret_cast<const int8_t*>(bytes(i))); }
  // Both halves of a byte.
  F low_bits(int i) const {
    const F all = byte(i);
    return sub(all, mul(set1(16.0f), high(all)));
  }
  F high_bits(int i) const { return high(byte(i)); }

 private:
  static F high(F byte) { return round(sub(mul(byte, set1(1.0f / 16)), set1(15.0f / 32))); }
};

TW_INLINE F negative(F x) { return sub(zero(), x); }

// 2^(e - 128) in two factors: the lowest is no normal number.
TW_INLINE F half_of_e8m0(F e) {
  const F first = round(mul(sub(e, set1(128.0f)), set1(0.5f)));
  return mul(pow2(first), pow2(sub(sub(e, set1(128.0f)), first)));
}

void expand_scales(const WeightFormat& format, const Header& header, int groups, Expanded& out) {
  const auto scale = [&](int i, F value) { store(out.scales[i], value); };
  const auto shift = [&](int i, F value) { store(out.shifts[i], value); };
  switch (format.kind) {
    case WeightKind::kQ5_0:
    case WeightKind::kIq4Nl:
      for (int g = 0; g < groups; ++g) scale(g, header.half(g));
      break;
    case WeightKind::kQ5_1:
      for (int g = 0; g < groups; ++g) {
        scale(g, header.half(g));
        shift(g, header.half(groups + g));
      }
      break;
    case WeightKind::kQ4K:
    case WeightKind::kQ5K: {
      const F d = header.half(0), minimum = negative(header.half(1));
      for (int g = 0; g < groups; ++g) {
        scale(g, mul(d, header.byte(g)));
        shift(g, mul(minimum, header.byte(groups + g)));
      }
      break;
    }
    case WeightKind::kQ2K: {
      const F d = header.half(0), minimum = negative(header.half(1));
      for (int h = 0; h < 2 * groups; ++h) {
        scale(h, mul(d, header.low_bits(h)));
        shift(h, mul(minimum, header.high_bits(h)));
      }
      break;
    }
    case WeightKind::kQ3K:
    case WeightKind::kQ6K: {
      const F d = header.half(0);
      for (int h = 0; h < 2 * groups; ++h) scale(h, mul(d, header.signed_byte(h)));
      break;
    }
    case WeightKind::kIq4Xs: {
      const F d = header.half(0);
      for (int g = 0; g < groups; ++g) scale(g, mul(d, header.signed_byte(g)));
      break;
    }
    case WeightKind::kMxfp4:
      for (int g = 0; g < groups; ++g) scale(g, half_of_e8m0(header.byte(g)));
      break;
    default: {
      const int scales = grid_scales(format, groups);
      for (int i = 0, g = 0; i < scales; ++i) {
        const F s = format.scale_type == DType::kFloat32   ? header.word(i)
                    : format.scale_type == DType::kFloat16 ? header.half(i)
                                                           : header.brain(i);
        F z = zero();
        if (format.zero_points) {
          z = header.byte(i);
          if (format.bits == 8 && !kUnsignedCodes) z = sub(z, set1(128.0f));
          z = mul(s, negative(z));
        }
        const int end = format.group < kChunkInputs ? (i + 1) * format.group / kRowGroup : groups;
        for (; g < end && g < groups; ++g) {
          scale(g, s);
          shift(g, z);
        }
      }
    }
  }
}

}  // namespace

size_t block_strip_bytes(const WeightFormat& format, int k) {
  const int groups = row_groups(k), rest = groups % kChunkGroups;
  return groups / kChunkGroups * chunk_bytes(format, kChunkGroups) + (rest ? chunk_bytes(format, rest) : 0);
}

void expand_chunk(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
  const ChunkHeader fields = ChunkHeader::of(format, groups);
  expand_scales(format, {chunk, fields}, groups, out);
  const auto* planes = reinterpret_cast<const uint8_t*>(chunk) + fields.size();
  const BlockTraits traits = traits_of(format);
  switch (format.kind) {
    case WeightKind::kQ4K: return expand_codes<false, true, false, false, true>(planes, groups, 0, nullptr, out.codes);
    case WeightKind::kQ5_1:
    case WeightKind::kQ5K: return expand_codes<false, true, false, true, true>(planes, groups, 0, nullptr, out.codes);
    case WeightKind::kQ5_0: return expand_codes<false, true, false, true, false>(planes, groups, 16, nullptr, out.codes);
    case WeightKind::kQ6K: return expand_codes<false, true, true, false, false>(planes, groups, 32, nullptr, out.codes);
    case WeightKind::kQ3K: return expand_codes<false, false, true, true, false>(planes, groups, 4, nullptr, out.codes);
    case WeightKind::kQ2K: return expand_codes<false, false, true, false, true>(planes, groups, 0, nullptr, out.codes);
    case WeightKind::kIq4Nl:
    case WeightKind::kIq4Xs:
      return expand_codes<false, true, false, false, false>(planes, groups, 0, kNonlinear.entries, out.codes);
    case WeightKind::kMxfp4:
    case WeightKind::kNvfp4:
      return expand_codes<false, true, false, false, false>(planes, groups, 0, kTwiceE2m1.entries, out.codes);
    default: {
      const int zero = traits.shifts ? 0 : traits.zero;  // with shifts, codes are taken as they are
      switch (format.bits) {
        case 2: return expand_codes<false, false, true, false, false>(planes, groups, zero, nullptr, out.codes);
        case 3: return expand_codes<false, false, true, true, false>(planes, groups, zero, nullptr, out.codes);
        case 4: return expand_codes<false, true, false, false, false>(planes, groups, zero, nullptr, out.codes);
        default: return expand_codes<true, false, false, false, false>(planes, groups, 0, nullptr, out.codes);
      }
    }
  }
}

}  // namespace tidewheel::TW_ISA
