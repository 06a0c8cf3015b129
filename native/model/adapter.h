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

// What an adapter adds to outputs `first_output` to `first_output + outputs - 1` of one matrix: scale * (B A x + bias)
// + shift. The rank may be 0 if there is a shift. Updates of one matrix with the same `a`, rank and scale share one
// projection of x.
struct LowRankUpdate {
  std::string name;  // the matrix's tensor
  int first_output = 0, outputs = 0, inputs = 0, rank = 0;
  const float* a = nullptr;     // [rank, inputs]
  const float* b = nullptr;     // [outputs, rank]
  const float* bias = nullptr;  // [outputs], or null
  float scale = 1;
  const float* shift = nullptr;  // [outputs], or null: the adapter's own bias minus the matrix's
};

// A matrix [vocab, embedding size] that an adapter has in place of the model's.
struct OwnMatrix {
  const void* data;
  DType type;
};

// Everything that an adapter changes.
struct AdapterContent {
  std::vector<LowRankUpdate> updates;
  std::optional<LowRankUpdate> embedding;  // added to tokens' embedding rows; its inputs are the vocabulary
  std::optional<OwnMatrix> embed, head;
  float rope_factor = 1;
};

// The place of the embedding. In a pipeline stage that has only the head, the place of the head: both have the same
// shape.
std::optional<MatrixPlace> table_of(const Weights& weights);

class Adapter {
 public:
  // Everything that an adapter adds to the products of one packed matrix.
  struct Part {
    int values = 0;                  // of h
    const char* a = nullptr;         // LoRA panels of values, one after the other
    std::vector<float> scale, one;   // [values]: h = scale * (A x + one); `one` is 1 for a bias or shift, otherwise 0
    std::vector<LoraPanel> lora_panels;
    // The A of the matrix that is usually computed next, divided into as many pieces as this matrix has panels.
    const char* next = nullptr;
    size_t next_bytes = 0;  // of one piece

    int value_lora_panels() const { return (values + kLoraPanel - 1) / kLoraPanel; }
  };

  // Throws std::invalid_argument for a matrix that is not in the model or has another shape, or for more values than
  // `max_values`. Throws std::bad_alloc.
  Adapter(const Weights& weights, DType type, const AdapterContent& content, int max_values);

  DType type() const { return type_; }
  // The divisor of the angles of the model's rope: https://arxiv.org/abs/2306.15595.
  float rope_factor() const { return rope_factor_; }
  size_t bytes() const { return memory_.bytes(); }
  // Null if the adapter does not change the matrix.
  const Part* part(const Linear& linear) const {
    const auto& part = parts_[linear.id];
    return part ? &*part : nullptr;
  }

  // Whether it changes one of the matrices from `first` to `last`, in the order of Linear::id.
  bool changes(const Linear& first, const Linear& last) const {
    const auto next = std::lower_bound(changed_.begin(), changed_.end(), first.id);
    return next != changed_.end() && *next <= last.id;
  }

  // Writes a token's row of the adapter's own embedding, if it has one. Otherwise leaves `row` unchanged.
  bool look_up(int token, float* row) const;
  // The size of a packed row with `inputs` inputs, as LoRA panels are multiplied by it.
  static size_t packed_row_floats(int inputs) { return round_up(inputs + kLoraPanelInputs, 16); }
  // Adds the embedding's update to a token's row. `scratch` has room for `embedding_scratch` floats.
  void add_embedding(const Kernels& kernels, int token, float* row, float* scratch) const;
  static size_t embedding_scratch(int size, int rank) {
    return rank + packed_row_floats(rank) + round_up(size, kLoraPanel);
  }
  // The adapter's own head, in LoRA panels over the vocabulary, in the adapter's type. Null if it uses the model's
  // head.
  const char* head() const { return head_; }

 private:
  const DType type_;
  const float rope_factor_;
  std::vector<std::optional<Part>> parts_;  // by Linear::id
  std::vector<int> changed_;                // the ids of the matrices that it changes, ascending
  int size_ = 0;  // of an embedding row
  const char *embed_ = nullptr, *head_ = nullptr;
  // The embedding's update: scale * B A, with A [vocab, rank] and B in LoRA panels.
  int rank_ = 0;
  float scale_ = 1;
  const char *tokens_a_ = nullptr, *rows_b_ = nullptr;
  Arena memory_;
};

}  // namespace tidewheel
