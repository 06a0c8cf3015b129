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
  // [M, media_width]: what tokens have in place of an embedding, and what is added to their rows after each of
  // `media_layers`, a hidden size for each. `media_index` [T] are their numbers, -1: none; empty: no token has one.
  std::span<const float> media_rows = {};
  size_t media_width = 0;
  std::span<const int32_t> media_index = {}, media_layers = {};
  // [axes, T]: the tokens' positions on rope's axes; empty: on each of them they are `positions`.
  std::span<const int32_t> rope_positions = {};
  // [T]: the end of the positions that a token sees in layers that are two-way; empty: its own is the last one.
  std::span<const int32_t> visible_until = {};
  // For towers. `remembered`: the K, V and queries of these tokens have been stored by Mixer::remember.
  bool remembered = false;
  // `only_queries`: these tokens' K and V are not stored, and they see those that have been stored.
  bool only_queries = false;
  int first_query = 0;                            // the number of the first token among the queries that are kept
  // Tokens in ascending order: after the last layer that keeps something of every token, only their rows are computed.
  // It is ignored unless the rows of a mixer's input select them, or are theirs: see Rows.
  std::span<const int32_t> read_rows = {};
  std::span<float> rows = {};                     // [T, row_floats], between pipeline stages; empty for a whole model
};

}  // namespace tidewheel
