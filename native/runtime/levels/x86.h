// What is known about x86 processors beyond the instructions that they have. The table is fixed and nothing is measured
// at start-up, so a processor always uses the same level, and its results stay the same bit for bit.
#pragma once

#include <string>

namespace tidewheel {

// Whether products of bfloat16 pairs (vdpbf16ps) are slower than widening both sides and multiplying in float32.
// `vendor` is from cpuid leaf 0, `signature` is eax of leaf 1.
bool has_slow_bfloat16_dots(const std::string& vendor, unsigned signature);

// Whether prefetching a cache line also brings the next one. Then prefetching both only evicts other lines.
bool brings_line_pairs(const std::string& vendor, unsigned signature);

}  // namespace tidewheel
