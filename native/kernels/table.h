// What each kernel file defines for its level; table.cpp gathers them.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace tidewheel::TW_ISA {

void pack(DType type, const PackArgs& args);
void unpack_row(DType type, const void* weight, int k, int row, float* out);
void gemm(DType type, const GemmArgs& args);
void norm(DType type, const NormArgs& args, int row_begin, int row_end);
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
