// A low-rank adapter, packed for the kernels: y += scale * B (A x), https://arxiv.org/abs/2106.09685.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "model/require.h"
#include "model/weights/weights.h"
#include "runtime/arena.h"

namespace tidewheel {

// What an adapter adds to the outputs `first_output` to `first_output + outputs - 1` of one matrix: scale * (B A x +
// bias) + shift. The rank may be 0 if there is a shift. Updates of one matrix that have the same `a`, rank and scale
// project x once.
struct LowRankUpdate {
  std::string name;  // of the matrix' tensor
  int first_output = 0, outputs = 0, inputs = 0, rank = 0;
  const float* a = nullptr;     // [rank, inputs]
  const float* b = nullptr;     // [outputs, rank]
  const float* bias = nullptr;  // [outputs], or null
  float scale = 1;
  const float* shift = nullptr;  // [outputs], or null: how far the adapter's own bias is from the matrix'
};

// A matrix [vocab, embedding size] that an adapter has instead of the model's.
struct OwnMatrix {
  const void* data;
  DType type;
};

// All that an adapter changes.
struct AdapterContent {
  std::vector<LowRankUpdate> updates;
  std::optional<LowRankUpdate> embedding;  // added to tokens' rows: its inputs are the vocabulary
  std::optional<OwnMatrix> embed, head;
  float rope_factor = 1;
};

// Where the embedding lies, or in a stage of a pipeline that has the head alone, the head: both are of the same shape.
std::optional<MatrixPlace> table_of(const Weights& weights);

class Adapter {
 public:
  // All that an adapter adds to the products of one packed matrix.
  struct Part {
    int values = 0;                  // of h
    const char* a = nullptr;         // LoRA panels of values, one behind the other
    std::vector<float> scale, one;   // [values]: h = scale * (A x + one), where `one` is 1 for a bias or shift and else 0
    std::vector<LoraPanel> lora_panels;
    // The A of the matrix that is mostly computed next, in as many pieces as this one has panels.
    const char* next = nullptr;
    size_t next_bytes = 0;  // of a piece

    int value_lora_panels() const { return (values + kLoraPanel - 1) / kLoraPanel; }
  };

  // Throws std::invalid_argument for a matrix that is not in the model or has another shape, or more values than
  // `max_values`, and std::bad_alloc.
  Adapter(const Weights& weights, DType type, const AdapterContent& content, int max_values);

  DType type() const { return type_; }
  // What the angles of the model's rope are divided by, https://arxiv.org/abs/2306.15595.
  float rope_factor() const { return rope_factor_; }
  size_t bytes() const { return memory_.bytes(); }
  // Null if the matrix is left as it is.
  const Part* part(const Linear& linear) const {
    const auto& part = parts_[linear.id];
    return part ? &*part : nullptr;
  }

  // Whether it changes one of the matrices from `first` to `last`, in the order of Linear::id.
  bool changes(const Linear& first, const Linear& last) const {
    const auto next = std::lower_bound(changed_.begin(), changed_.end(), first.id);
    return next != changed_.end() && *next <= last.id;
  }

  // The row of a token in the embedding, if the adapter has one of its own; else `row` stays as it is.
  bool look_up(int token, float* row) const;
  // The room of a row that LoRA panels of `inputs` inputs are multiplied by.
  static size_t packed_row_floats(int inputs) { return round_up(inputs + kLoraPanelInputs, 16); }
  // Adds to a token's row. `scratch` has room for `embedding_scratch` floats.
  void add_embedding(const Kernels& kernels, int token, float* row, float* scratch) const;
  static size_t embedding_scratch(int size, int rank) {
    return rank + packed_row_floats(rank) + round_up(size, kLoraPanel);
  }
  // The head of the adapter's own in LoRA panels of the vocabulary, of its type; null: it is the model's.
  const char* head() const { return head_; }

 private:
  const DType type_;
  const float rope_factor_;
  std::vector<std::optional<Part>> parts_;  // by Linear::id
  std::vector<int> changed_;                // the ids of those that it has, ascending
  int size_ = 0;  // of the embedding
  const char *embed_ = nullptr, *head_ = nullptr;
  // What is added to a token's row: scale * B A, with A [vocab, rank] and LoRA panels of B.
  int rank_ = 0;
  float scale_ = 1;
  const char *tokens_a_ = nullptr, *rows_b_ = nullptr;
  Arena memory_;
};

}  // namespace tidewheel
