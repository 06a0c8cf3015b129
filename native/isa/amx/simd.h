// AMX in addition to AVX-512 with BF16 and VNNI: the same vector vocabulary. GEMM and attention use tiles besides.
#pragma once

#include "isa/avx512_bf16/simd.h"
#include "isa/avx512_vnni/prefetch_in_steps.h"
