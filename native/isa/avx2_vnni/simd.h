// AVX2 with AVX-VNNI, which processors without AVX-512 have. The vector vocabulary is the same; this level's compiler
// flags switch on its int8 dot product.
#pragma once

#include "isa/avx2/simd.h"
