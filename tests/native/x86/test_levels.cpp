#include <doctest/doctest.h>

#include "runtime/levels/x86.h"

using namespace tidewheel;

TEST_CASE("the table of slow bfloat16 dot products knows processors by vendor, family and model") {
  CHECK(has_slow_bfloat16_dots("GenuineIntel", 0xc06f2));        // Emerald Rapids: family 6, model 207
  CHECK_FALSE(has_slow_bfloat16_dots("GenuineIntel", 0x606a6));  // Ice Lake
  CHECK_FALSE(has_slow_bfloat16_dots("GenuineIntel", 0x5065b));  // Cooper Lake
  CHECK_FALSE(has_slow_bfloat16_dots("AuthenticAMD", 0xa10f11));  // Zen 4
  CHECK_FALSE(has_slow_bfloat16_dots("AuthenticAMD", 0xc06f2));
}
