// One forward pass: the arrays of engine/devices/batch.py's StepBatch.
#pragma once

#include <cstdint>
#include <span>

#include "model/sampler.h"

namespace tidewheel {

struct Step {
  std::span<const int32_t> token_ids, positions;  // [T]
  std::span<const int32_t> query_start;           // [S + 1]
  std::span<const int32_t> context_len;           // [S]
  const int32_t* block_tables = nullptr;          // [S, block_table_stride]
  int64_t block_table_stride = 0;
  std::span<const int32_t> logits_rows;           // [any number]
  Sampling sampling;
  float* out_logits = nullptr;                    // [R, vocab] if wanted
};

}  // namespace tidewheel
