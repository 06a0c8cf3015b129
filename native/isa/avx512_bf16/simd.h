// AVX-512 with BF16 and VNNI: the same vector vocabulary. This level's compiler flags switch on its dot products.
#pragma once

#include "isa/avx512/simd.h"
