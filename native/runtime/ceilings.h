// The machine's own limits, measured with a team of threads on one ISA level.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

struct Ceilings {
  double read_bytes_per_second, bfloat16_flops, int8_ops, float32_flops;
};

// The best of several rounds, which take `seconds` in all. Memory is read over `megabytes`, far more than caches hold.
Ceilings measure_ceilings(const Kernels& kernels, const std::vector<int>& cpus, double seconds, int megabytes);

}  // namespace tidewheel
