// AVX-512 with BF16 and VNNI: the same vocabulary, whose dot products this level's compiler flags switch on.
#pragma once

#include "isa/avx512/simd.h"
