// What each kernel file defines for its level. table.cpp collects these functions in the table that runtime/levels
// offers.
//
// A level reuses another level's kernels where its own instructions would not change them. TW_FLOATS and the other
// macros name the levels that groups of kernels come from. CMakeLists.txt has the groups, and each level's line in
// native/isa says what it reuses. Everything that both levels must agree on is a part of such a kernel's name, so the
// linker finds it only if they agree.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace tidewheel {

namespace TW_FLOATS {
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args);
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial);
void attention_reduce(const AttentionArgs& args, const float* partials);
void normalize(const Norm& norm, float* x, int size);
void normalize_to(const Norm& norm, const float* x, int size, float* out);
void add_normalized(const Norm& norm, float* x, int size, float scale, float* y);
void convolve(const ConvolveArgs& args);
void recur(const RecurrenceArgs& args);
void multiply_gate(Gate gate, const float* by, int size, float* x);
void sample(const SampleArgs& args);
void quantize_blocks(const QuantizeArgs& args);
void search_grid(const SearchGridArgs& args);
void round_inputs(const RoundInputsArgs& args);
}  // namespace TW_FLOATS

namespace TW_BFLOAT16 {
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args);
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial);
}  // namespace TW_BFLOAT16

namespace TW_SMALL_FLOATS {
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args);
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial);
}  // namespace TW_SMALL_FLOATS

namespace TW_INT8 {
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args);
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial);
}  // namespace TW_INT8

namespace TW_INT4 {
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention(const AttentionArgs& args);
template <typename T, typename Query, int STEP, int TILE_ROWS>
void attention_split(const AttentionArgs& args, int split, float* partial);
}  // namespace TW_INT4

namespace TW_BLOCKS {
// Multiplies at most FEW_ROWS packed rows by a panel, for formats of blocks.h.
template <int FEW_ROWS, int RUN, int QUAD_ZERO>
void multiply_few_rows(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile);
}  // namespace TW_BLOCKS

}  // namespace tidewheel

namespace tidewheel::TW_ISA {

using namespace TW_FLOATS;
using namespace TW_BLOCKS;

extern const Kernels kKernels;

int tile_rows(const WeightFormat& format);
int row_block(const WeightFormat& format, int k);
size_t row_bytes(const WeightFormat& format, int k);
size_t panel_bytes(const WeightFormat& format, int k);
void pack_weights(const WeightFormat& format, const PackWeightsArgs& args);
void pack_blocks(const WeightFormat& format, const PackBlocksArgs& args);
void unpack_blocks_row(const WeightFormat& format, const void* weight, int k, int row, float* out);
// The same for formats of widened.h.
void pack_widened(const WeightFormat& format, const PackBlocksArgs& args);
void unpack_widened_row(const WeightFormat& format, const void* weight, int k, int row, float* out);
void unpack_row(const WeightFormat& format, const void* weight, int k, int row, float* out);
void pack_inputs(const WeightFormat& format, const PackInputsArgs& args, int row_begin, int row_end);
void gemm(const WeightFormat& format, const GemmArgs& args);
void project(const ProjectArgs& args);
void pack_lora_panel_inputs(DType type, const float* x, int first, int count, int zeros, void* row);
void store_qkv(CacheType type, const StoreQkvArgs& args);
double peak_float32(int rounds);
double peak_bfloat16(int rounds);
double peak_int8(int rounds);
double read_memory(const void* data, size_t bytes);

}  // namespace tidewheel::TW_ISA
