// Chunks of quantized files' weights, from the bits that are stored to integers and scales.
#include "kernels/blocks.h"

namespace tidewheel::TW_ISA {
namespace {

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
  F e4m3_byte(int i) const { return load(reinterpret_cast<const e4m3*>(bytes(i))); }
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

void put_scales(const WeightFormat& format, const Header& header, int groups, Expanded& out) {
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
    case WeightKind::kNvfp4: {  // half of the scale, as codes are twice e2m1
      const F divisor = header.word(0);
      for (int h = 0; h < 2 * groups; ++h) scale(h, mul(div(header.e4m3_byte(h), divisor), set1(0.5f)));
      break;
    }
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

const uint8_t* expand_scales(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
  const ChunkHeader fields = ChunkHeader::of(format, groups);
  for (size_t i = 0; i < fields.size(); i += kLineBytes) prefetch(chunk + kChunkAheadBytes + i);
  put_scales(format, {chunk, fields}, groups, out);
  return reinterpret_cast<const uint8_t*>(chunk) + fields.size();
}

void expand_chunk(const WeightFormat& format, const char* chunk, int groups, Expanded& out) {
  const uint8_t* planes = expand_scales(format, chunk, groups, out);
  with_traits(format, [&]<BlockTraits TRAITS>() {
    uint8_t* to = out.codes;
    for (int g = 0; g < groups; ++g) {
      Bytes codes[kGroupQuads];
      load_group<TRAITS, unsigned_expanded(TRAITS)>(planes, codes);
#pragma GCC unroll 8
      for (int q = 0; q < kGroupQuads; ++q) store(to + q * kVectorBytes, codes[q]);
      to += kRowGroup * kLanes;
    }
  });
}

}  // namespace tidewheel::TW_ISA
