#include "kernels/table.h"

#include "kernels/cache.h"
#include "kernels/element.h"

namespace tidewheel::TW_ISA {

const Kernels kKernels = {
    TW_ISA_NAME,
    {sizeof(Cached<float>::Query), sizeof(Cached<bf16>::Query), sizeof(Cached<f16>::Query), sizeof(Cached<e5m2>::Query),
     sizeof(Cached<int8_t>::Query), sizeof(Cached<e4m3>::Query),
     sizeof(Cached<int4x2>::Query)},
    Cached<int8_t>::kStep,
    tile_rows, row_block, row_bytes, panel_bytes, pack_weights, pack_blocks, unpack_row, pack_inputs, gemm, project, pack_stripe_inputs, normalize, add_normalized,
    store_qkv, attention_scratch_bytes, attention, attention_piece, attention_merge,
    convolve, recur, multiply_gate, sample,
    peak_float32, peak_bfloat16, peak_int8, read_memory,
};

}  // namespace tidewheel::TW_ISA
