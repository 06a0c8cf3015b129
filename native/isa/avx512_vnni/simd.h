// AVX-512 with VNNI, without BF16: the same vocabulary, whose dot product of int8 this level's compiler flags switch on.
#pragma once

#include "isa/avx512/simd.h"
