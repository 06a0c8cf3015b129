#pragma once

#include <string_view>

#include "quantize/quantize.h"

namespace tidewheel {

// Quantizes `rows` rows into `out` [rows][blocks of a row], with as many threads. `args` says all but the blocks and the
// importance, which is [cols] or null and may be of any size. Results do not depend on the threads, nor on the kernels'
// level. Throws std::invalid_argument for a type that is not quantized to, for rows that are no whole blocks, and for
// numbers that are not finite or, of an importance, below 0.
void quantize_rows(const Kernels& kernels, QuantizeArgs args, const float* importance, int64_t rows, int threads);

}  // namespace tidewheel
