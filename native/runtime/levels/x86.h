// What is known of x86 processors beside the instructions that they have. The table is fixed, and nothing is measured at a
// start: a processor always uses the same level, so its bits do not change.
#pragma once

#include <string>

namespace tidewheel {

// Whether products of bfloat16 pairs (vdpbf16ps) are slower than widening both and multiplying in float32. `vendor` is that
// of cpuid leaf 0, `signature` eax of leaf 1.
bool has_slow_bfloat16_dots(const std::string& vendor, unsigned signature);

// Whether a prefetched cache line brings the next one along, so that prefetching both only takes room for other ones.
bool brings_line_pairs(const std::string& vendor, unsigned signature);

}  // namespace tidewheel
