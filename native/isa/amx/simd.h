// AMX beside AVX-512 with BF16 and VNNI: the same vocabulary of vectors. Tiles are for the micro-kernels of GEMM.
#pragma once

#include "isa/avx512_bf16/simd.h"
