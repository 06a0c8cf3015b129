// One forward pass: the arrays of engine/devices/batch.py's StepBatch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/sampler.h"

namespace tidewheel {

// The sequences' block tables for one cache group, one row per sequence.
struct BlockTables {
  const int32_t* rows = nullptr;  // [S, stride]
  int64_t stride = 0;

  const int32_t* of(int sequence) const { return rows + sequence * stride; }
};

struct Step {
  std::span<const int32_t> token_ids, positions;  // [T]
  std::span<const int32_t> query_start;           // [S + 1]
  std::span<const int32_t> context_len;           // [S]
  std::vector<BlockTables> block_tables;          // [cache groups]
  std::span<const int32_t> state_slots;           // [S], for recurrent layers; empty if the model has none
  std::span<const int32_t> adapters;              // [S], the sequences' adapter numbers, -1: none; empty: none has one
  std::span<const int32_t> logits_rows;           // [any number]
  Sampling sampling;
  float* out_logits = nullptr;                    // [R, vocab] if wanted
  std::span<const int32_t> num_draft_tokens = {};      // [S], drafts among each one's last tokens; empty: none
  std::span<float> rows = {};                     // [T, row_floats], between pipeline stages; empty for a whole model
};

}  // namespace tidewheel
