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

TEST_CASE("the table of processors that fetch lines in pairs knows Zen 4") {
  CHECK(brings_line_pairs("AuthenticAMD", 0xa10f11));        // EPYC 9004
  CHECK(brings_line_pairs("AuthenticAMD", 0xa60f12));        // Ryzen 7000
  CHECK(brings_line_pairs("AuthenticAMD", 0xaa0f02));        // EPYC 8004
  CHECK_FALSE(brings_line_pairs("AuthenticAMD", 0xa00f11));  // Zen 3
  CHECK_FALSE(brings_line_pairs("AuthenticAMD", 0xb00f21));  // Zen 5
  CHECK_FALSE(brings_line_pairs("GenuineIntel", 0xc06f2));
}
