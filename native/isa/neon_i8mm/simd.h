// NEON with bfloat16 and 8-bit matrix products: the same vector vocabulary. This level's compiler flags switch on its
// dot products. The code that multiplies matrices is in micro_kernels.h.
#pragma once

#include "isa/neon/simd.h"
