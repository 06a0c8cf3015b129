#include "kernels/table.h"

#include <algorithm>

#include "attention_products.h"
#include "isa/contract.h"
#include "kernels/cache.h"
#include "kernels/element.h"

namespace tidewheel::TW_ISA {
namespace {

// The scratch memory that attention needs with any type of cache.
size_t attention_scratch_bytes(const Heads& heads) {
  const int tokens = std::max(1, kAttentionRows / heads.group());
  const size_t rows = size_t(tokens) * heads.group();
  const size_t spread = heads.values_in_keys() ? kAttentionTile * (kSpreadValues + rows) : 0;
  // What tiles copy of K and V: two bytes an element.
  const size_t copied = kAttentionTile * (32 + size_t(heads.stored_values())) / 2;
  constexpr int kRows = std::max({kTileRows, BFloat16Products::kRows, Int8Products::kRows});
  return sizeof(float) * (rows * (heads.padded_dim() + 16) + (3 * kRows + 2) * kAttentionTile + 4 * rows +
                          2 * heads.partial_floats(tokens) + spread + copied) + 14 * 64;
}

}  // namespace

const Kernels kKernels = {
    TW_ISA_NAME,
    {sizeof(Cached<float>::Query), sizeof(Cached<bf16>::Query), sizeof(Cached<f16>::Query), sizeof(Cached<e5m2>::Query),
     sizeof(Cached<int8_t>::Query), sizeof(Cached<e4m3>::Query),
     sizeof(Cached<int4x2>::Query)},
    Cached<int8_t>::kStep,
    tile_rows, row_block, row_bytes, panel_bytes, pack_weights, pack_blocks, quantize_blocks, search_grid, round_inputs, unpack_row, pack_inputs, gemm, project, pack_lora_panel_inputs, normalize, add_normalized,
    store_qkv, attention_scratch_bytes,
    {
        {TW_FLOATS::attention<float, Cached<float>::Query, Cached<float>::kStep, kTileRows>,
         TW_FLOATS::attention_split<float, Cached<float>::Query, Cached<float>::kStep, kTileRows>},
        {TW_BFLOAT16::attention<bf16, Cached<bf16>::Query, Cached<bf16>::kStep, kTileRows>,
         TW_BFLOAT16::attention_split<bf16, Cached<bf16>::Query, Cached<bf16>::kStep, kTileRows>},
        {TW_FLOATS::attention<f16, Cached<f16>::Query, Cached<f16>::kStep, kTileRows>,
         TW_FLOATS::attention_split<f16, Cached<f16>::Query, Cached<f16>::kStep, kTileRows>},
        {TW_SMALL_FLOATS::attention<e5m2, Cached<e5m2>::Query, Cached<e5m2>::kStep, kTileRows>,
         TW_SMALL_FLOATS::attention_split<e5m2, Cached<e5m2>::Query, Cached<e5m2>::kStep, kTileRows>},
        {TW_INT8::attention<int8_t, Cached<int8_t>::Query, Cached<int8_t>::kStep, kTileRows>,
         TW_INT8::attention_split<int8_t, Cached<int8_t>::Query, Cached<int8_t>::kStep, kTileRows>},
        {TW_SMALL_FLOATS::attention<e4m3, Cached<e4m3>::Query, Cached<e4m3>::kStep, kTileRows>,
         TW_SMALL_FLOATS::attention_split<e4m3, Cached<e4m3>::Query, Cached<e4m3>::kStep, kTileRows>},
        {TW_INT4::attention<int4x2, Cached<int4x2>::Query, Cached<int4x2>::kStep, kTileRows>,
         TW_INT4::attention_split<int4x2, Cached<int4x2>::Query, Cached<int4x2>::kStep, kTileRows>},
    },
    attention_reduce,
    convolve, recur, multiply_gate, sample,
    peak_float32, peak_bfloat16, peak_int8, read_memory,
};

}  // namespace tidewheel::TW_ISA
