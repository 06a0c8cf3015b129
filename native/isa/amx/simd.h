// AMX in addition to AVX-512 with BF16 and VNNI: the same vector vocabulary. Only the GEMM micro-kernels use tiles.
#pragma once

#include "isa/avx512_bf16/simd.h"
