// AVX2 with AVX-VNNI, which processors without AVX-512 have: the same vocabulary, whose dot product of int8 this level's
// compiler flags switch on.
#pragma once

#include "isa/avx2/simd.h"
