// What each kernel file defines for its level; table.cpp gathers them into the table that runtime/levels offers.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

extern const Kernels kKernels;

int tile_rows(const WeightFormat& format);
int row_block(const WeightFormat& format, int k);
size_t row_bytes(const WeightFormat& format, int k);
size_t panel_bytes(const WeightFormat& format, int k);
void pack(const WeightFormat& format, const PackArgs& args);
void unpack_row(const WeightFormat& format, const void* weight, int k, int row, float* out);
void pack_rows(const WeightFormat& format, const RowsArgs& args, int row_begin, int row_end);
void gemm(const WeightFormat& format, const GemmArgs& args);
void normalize(const Norm& norm, float* x, int size);
void prepare(CacheType type, const PrepareArgs& args);
size_t attention_scratch_bytes(const Heads& heads);
void attention(CacheType type, const AttentionArgs& args);
void attention_piece(CacheType type, const AttentionArgs& args, int piece, float* partial);
void attention_merge(const AttentionArgs& args, const float* partials);
void sample(const SampleArgs& args);
double peak_float32(int rounds);
double peak_bfloat16(int rounds);
double peak_int8(int rounds);
double read_memory(const void* data, size_t bytes);

}  // namespace tidewheel::TW_ISA
