#include "kernels/table.h"

#include "kernels/cache.h"
#include "kernels/element.h"

namespace tidewheel::TW_ISA {

const Kernels kKernels = {
    TW_ISA_NAME,
    {sizeof(Element<float>::Activation), sizeof(Element<bf16>::Activation), sizeof(Element<f16>::Activation)},
    {sizeof(Cached<float>::Query), sizeof(Cached<bf16>::Query), sizeof(Cached<f16>::Query), sizeof(Cached<e5m2>::Query),
     sizeof(Cached<int8_t>::Query)},
    pack, unpack_row, gemm, norm, prepare, attention_scratch_bytes, attention, attention_piece, attention_merge, sample,
    peak_float32, peak_bfloat16, peak_int8, read_memory,
};

}  // namespace tidewheel::TW_ISA
