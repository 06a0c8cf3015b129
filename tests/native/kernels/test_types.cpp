#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "kernels/types.h"

using namespace tidewheel;

TEST_CASE("every float16 survives the way through float") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16 half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(to_float(to_f16(value))));
    } else {
      CHECK(to_f16(value).bits == half.bits);
    }
  }
}

TEST_CASE("every bfloat16 survives the way through float") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(to_float(to_bf16(value))));
    } else {
      CHECK(to_bf16(value).bits == half.bits);
    }
  }
}

TEST_CASE("every number of e4m3 is what its bits say") {
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const float value = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8, exponent - 7)
                                 : std::ldexp(static_cast<float>(mantissa), -9);
    CHECK(to_float(e4m3{static_cast<uint8_t>(code)}) == value);
    CHECK(to_float(e4m3{static_cast<uint8_t>(code | 128)}) == -value);
  }
}

TEST_CASE("rounding goes to the nearest, ties to even") {
  CHECK(to_bf16(1.0f + 0x1p-8f).bits == 0x3f80);              // half way, down to even
  CHECK(to_bf16(1.0f + 3 * 0x1p-8f).bits == 0x3f82);          // half way, up to even
  CHECK(to_bf16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(to_f16(1.0f + 0x1p-11f).bits == 0x3c00);
  CHECK(to_f16(1.0f + 3 * 0x1p-11f).bits == 0x3c02);
  CHECK(to_f16(65519.0f).bits == 0x7bff);
  CHECK(to_f16(65520.0f).bits == 0x7c00);
  CHECK(to_f16(0x1p-24f).bits == 0x0001);
  CHECK(to_f16(0x1p-25f).bits == 0x0000);                     // half of the smallest, down to even
  CHECK(to_f16(-0x1.8p-24f).bits == 0x8002);
}
