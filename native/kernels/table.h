// What each kernel file defines for its level. table.cpp collects them in the table that runtime/levels offers.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

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
// At most kFewRows packed rows times a panel, for formats of blocks.h.
void multiply_few_rows(const WeightFormat& format, const char* x, const char* panel, int k, int rows, float* tile);
void project(const ProjectArgs& args);
void pack_stripe_inputs(DType type, const float* x, int first, int count, int zeros, void* row);
void normalize(const Norm& norm, float* x, int size);
void normalize_to(const Norm& norm, const float* x, int size, float* out);
void add_normalized(const Norm& norm, float* x, int size, float scale, float* y);
void store_qkv(CacheType type, const StoreQkvArgs& args);
size_t attention_scratch_bytes(const Heads& heads);
void attention(CacheType type, const AttentionArgs& args);
void attention_piece(CacheType type, const AttentionArgs& args, int piece, float* partial);
void attention_merge(const AttentionArgs& args, const float* partials);
void convolve(const ConvolveArgs& args);
void recur(const RecurrenceArgs& args);
void multiply_gate(Gate gate, const float* by, int size, float* x);
void sample(const SampleArgs& args);
double peak_float32(int rounds);
double peak_bfloat16(int rounds);
double peak_int8(int rounds);
double read_memory(const void* data, size_t bytes);

}  // namespace tidewheel::TW_ISA
