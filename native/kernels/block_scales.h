// Reads the scales and shifts of quantized files' chunks, one after the other.
#pragma once

#include "kernels/blocks.h"

namespace tidewheel::TW_ISA {

template <WeightKind KIND, BlockTraits T>
class ScaleReader {
 public:
  [[gnu::always_inline]] ScaleReader(const WeightFormat& format, const char* chunk, int groups)
      : format_(format), chunk_(chunk), fields_(ChunkHeader::of(format, groups)), groups_(groups) {
    using enum WeightKind;
    if constexpr (KIND == kQ2K || kSixes) whole_ = half(0), minimum_ = negative(half(1));
    if constexpr (kSixes) spread_sixes();
    if constexpr (KIND == kQ3K || KIND == kQ6K || KIND == kIq4Xs) whole_ = half(0);
    if constexpr (KIND == kNvfp4) whole_ = word(0);
  }

  // The bit planes after the header.
  const uint8_t* planes() const { return reinterpret_cast<const uint8_t*>(chunk_) + fields_.size(); }

  // The scale and shift of the next 32 inputs, or of the next 16. `shift` is set only if the format has shifts.
  [[gnu::always_inline]] void next(F& scale, F& shift) {
    using enum WeightKind;
    const int i = next_++;
    if constexpr (KIND == kQ5_0 || KIND == kIq4Nl) {
      scale = half(i);
    } else if constexpr (KIND == kQ5_1) {
      scale = half(i), shift = half(groups_ + i);
    } else if constexpr (kSixes) {
      scale = mul(whole_, load(sixes_ + i * kLanes)), shift = mul(minimum_, load(sixes_ + (kChunkGroups + i) * kLanes));
    } else if constexpr (KIND == kQ2K) {
      const F both = byte(i), high = round(sub(mul(both, set1(1.0f / 16)), set1(15.0f / 32)));
      scale = mul(whole_, sub(both, mul(set1(16.0f), high))), shift = mul(minimum_, high);
    } else if constexpr (KIND == kQ3K || KIND == kQ6K || KIND == kIq4Xs) {
      scale = mul(whole_, load(reinterpret_cast<const int8_t*>(bytes(i))));
    } else if constexpr (KIND == kMxfp4) {
      scale = half_of_e8m0(byte(i));
    } else if constexpr (KIND == kNvfp4) {  // half of the scale, because codes are twice the e2m1 value
      scale = mul(div(load(reinterpret_cast<const e4m3*>(bytes(i))), whole_), set1(0.5f));
    } else {
      const int per_scale = format_.group < kChunkInputs ? format_.group / kRowGroup : kChunkGroups;
      if (i % per_scale == 0) read_grid(i / per_scale);
      scale = whole_, shift = minimum_;
    }
  }

 private:
  // 8 scales and 8 minima of 6 bits each in 12 bytes, as in the file. First scales 0 to 3, with the high bits of scales
  // 4 to 7 above them; then the minima in the same way; then the low bits of scales 4 to 7, with those of minima 4 to 7
  // above them.
  static constexpr bool kSixes = KIND == WeightKind::kQ4K || KIND == WeightKind::kQ5K;

  void spread_sixes() {
    const uint8_t* from = bytes(0);
    const Bytes scales = load_bytes(from), minima = load_bytes(from + kVectorBytes), low = load_bytes(from + 2 * kVectorBytes);
    store(sixes_, field<0, 6>(scales));
    store(sixes_ + kVectorBytes, or_above<4>(field<0, 4>(low), field<6, 2>(scales)));
    store(sixes_ + 2 * kVectorBytes, field<0, 6>(minima));
    store(sixes_ + 3 * kVectorBytes, or_above<4>(field<4, 4>(low), field<6, 2>(minima)));
  }

  void read_grid(int i) {
    whole_ = format_.scale_type == DType::kFloat32   ? word(i)
             : format_.scale_type == DType::kFloat16 ? half(i)
                                                     : load(reinterpret_cast<const bf16*>(chunk_) + i * kLanes);
    if constexpr (T.shifts) {
      F point = byte(i);
      if (T.whole && !kUnsignedBytes) point = sub(point, set1(128.0f));
      minimum_ = mul(whole_, negative(point));
    }
  }

  F half(int i) const { return load(reinterpret_cast<const f16*>(chunk_) + i * kLanes); }
  F word(int i) const {
    return load(reinterpret_cast<const float*>(chunk_ + ChunkHeader::words_at(fields_.halves)) + i * kLanes);
  }
  const uint8_t* bytes(int i) const {
    return reinterpret_cast<const uint8_t*>(chunk_) + ChunkHeader::bytes_at(fields_.halves, fields_.words) + i * kLanes;
  }
  F byte(int i) const { return load(bytes(i)); }

  TW_INLINE F negative(F x) { return sub(zero(), x); }
  // 2^(e - 128) as a product of two factors, because the lowest value is not a normal number.
  TW_INLINE F half_of_e8m0(F e) {
    const F first = round(mul(sub(e, set1(128.0f)), set1(0.5f)));
    return mul(pow2(first), pow2(sub(sub(e, set1(128.0f)), first)));
  }

  const WeightFormat& format_;
  const char* const chunk_;
  const ChunkHeader fields_;
  const int groups_;
  int next_ = 0;
  alignas(64) uint8_t sixes_[kSixes ? 2 * kChunkGroups * kLanes : 1];
  F whole_ = zero(), minimum_ = zero();  // of the whole chunk; for grids, of the current group
};

}  // namespace tidewheel::TW_ISA
