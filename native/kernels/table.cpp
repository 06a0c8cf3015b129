#include "kernels/table.h"

#include "kernels/element.h"

namespace tidewheel::TW_ISA {

const Kernels kKernels = {
    TW_ISA_NAME,
    {sizeof(Element<float>::Activation), sizeof(Element<bf16>::Activation), sizeof(Element<f16>::Activation)},
    kTileRows,
    row_bytes, panel_bytes, pack, unpack_row, pack_rows, gemm, normalize, prepare, attention_scratch_bytes, attention, sample,
    peak_float32, peak_bfloat16, peak_int8, read_memory,
};

}  // namespace tidewheel::TW_ISA
