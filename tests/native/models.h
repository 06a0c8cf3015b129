// Levels that are tested though no processor at hand may have them.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace tidewheel::test {

// The kernels of x86's amx over a software model of its tiles, and of avx2_vnni with its instruction in AVX-512's encoding;
// where the processor has avx512_bf16, which both need.
std::vector<const Kernels*> modelled_kernels();

}  // namespace tidewheel::test
