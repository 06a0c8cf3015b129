// AVX-512 with VNNI, without BF16: the same vector vocabulary. This level's compiler flags switch on its int8 dot
// product.
#pragma once

#include "isa/avx512/simd.h"
#include "prefetch_in_steps.h"
