// Codes and scales into the bytes of GGUF's blocks, whose fields are as engine/weights/block_types.py reads them.
#pragma once

#include "kernels/types.h"

namespace tidewheel::TW_ISA {

// Little-endian, on every machine.
TW_INLINE void put_half(uint8_t* to, float value) {
  const uint16_t bits = to_f16(value).bits;
  to[0] = static_cast<uint8_t>(bits);
  to[1] = static_cast<uint8_t>(bits >> 8);
}

// Fields of `bits` of codes: for each group of `size` bytes the lowest bits of all of them come first, then the next.
TW_INLINE void put_fields(uint8_t* to, const uint8_t* codes, int count, int bits, int shift, int size) {
  const int fields = 8 / bits;
  for (int i = 0; i < count * bits / 8; ++i) to[i] = 0;
  for (int i = 0; i < count; ++i) {
    const int group = i / (size * fields), within = i % (size * fields);
    to[group * size + within % size] |=
        static_cast<uint8_t>((codes[i] >> shift & ((1 << bits) - 1)) << within / size * bits);
  }
}

// 32 codes of 4 or 5 bits, with the fifth bits, if any, in front.
TW_INLINE void put_small_block(uint8_t* to, const uint8_t* codes, bool fifth) {
  if (fifth) {
    for (int i = 0; i < 4; ++i) {
      to[i] = 0;
      for (int j = 0; j < 8; ++j) to[i] |= static_cast<uint8_t>((codes[i * 8 + j] >> 4) << j);
    }
    to += 4;
  }
  put_fields(to, codes, 32, 4, 0, 16);
}

// Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes.
TW_INLINE void put_scales_and_minima(uint8_t* to, const uint8_t* scales, const uint8_t* minima) {
  for (int i = 0; i < 4; ++i) {
    to[i] = static_cast<uint8_t>(scales[i] | scales[i + 4] >> 4 << 6);
    to[i + 4] = static_cast<uint8_t>(minima[i] | minima[i + 4] >> 4 << 6);
    to[i + 8] = static_cast<uint8_t>((scales[i + 4] & 15) | (minima[i + 4] & 15) << 4);
  }
}

TW_INLINE void put_q2_k(uint8_t* to, float d, float dmin, const uint8_t* scales, const uint8_t* minima,
                        const uint8_t* codes) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(scales[i] | minima[i] << 4);
  put_fields(to + 16, codes, 256, 2, 0, 32);
  put_half(to + 80, d);
  put_half(to + 82, dmin);
}

TW_INLINE void put_q4_k(uint8_t* to, float d, float dmin, const uint8_t* scales, const uint8_t* minima,
                        const uint8_t* codes) {
  put_half(to, d);
  put_half(to + 2, dmin);
  put_scales_and_minima(to + 4, scales, minima);
  put_fields(to + 16, codes, 256, 4, 0, 32);
}

TW_INLINE void put_q5_k(uint8_t* to, float d, float dmin, const uint8_t* scales, const uint8_t* minima,
                        const uint8_t* codes) {
  put_half(to, d);
  put_half(to + 2, dmin);
  put_scales_and_minima(to + 4, scales, minima);
  put_fields(to + 16, codes, 256, 1, 4, 32);
  put_fields(to + 48, codes, 256, 4, 0, 32);
}

// `scales` are in two's complement, plus 32 for the types with scales of 6 bits.
TW_INLINE void put_q3_k(uint8_t* to, float d, const uint8_t* scales, const uint8_t* codes) {
  put_fields(to, codes, 256, 1, 2, 32);
  put_fields(to + 32, codes, 256, 2, 0, 32);
  put_fields(to + 96, scales, 16, 4, 0, 8);
  put_fields(to + 104, scales, 16, 2, 4, 4);
  put_half(to + 108, d);
}

TW_INLINE void put_q6_k(uint8_t* to, float d, const uint8_t* scales, const uint8_t* codes) {
  put_fields(to, codes, 256, 4, 0, 64);
  put_fields(to + 128, codes, 256, 2, 4, 32);
  for (int i = 0; i < 16; ++i) to[192 + i] = scales[i];
  put_half(to + 208, d);
}

TW_INLINE void put_iq4_xs(uint8_t* to, float d, const uint8_t* scales, const uint8_t* codes) {
  put_half(to, d);
  put_fields(to + 2, scales, 8, 2, 4, 1);
  put_fields(to + 4, scales, 8, 4, 0, 1);
  put_fields(to + 8, codes, 256, 4, 0, 16);
}

}  // namespace tidewheel::TW_ISA
