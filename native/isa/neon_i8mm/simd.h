// NEON with bfloat16 and 8-bit matrix products: the same vocabulary, whose dot products this level's compiler flags switch
// on. What multiplies matrices is in micro_kernels.h.
#pragma once

#include "isa/neon/simd.h"
