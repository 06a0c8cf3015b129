// Rows that a model left of tokens, for the steps that go on behind them. A token is known by its place in the KV cache:
// who has the block and the position, has the row, and so do forks that share the block.
//
// There is room for the last tokens of as many sequences as run. A sequence that comes back finds what it left, unless so
// many others have run since. What is found may be of other tokens if a block changed hands. So a row may only be used
// where it cannot change what is sampled.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "model/step.h"
#include "runtime/arena.h"

namespace tidewheel {

class HiddenRows {
 public:
  // A token of the step whose row is kept, and where.
  struct Kept {
    int token;
    float* row;
  };

  // Room for the last `rows` tokens of `sequences` sequences, `size` floats each. Throws std::bad_alloc.
  void allocate(int sequences, int rows, int size);

  // The row of the token before a sequence's first of the step; null: none is kept.
  const float* before(const Step& step, int sequence) const;
  // Makes room for the last tokens of each sequence. The rows that `before` gave for this step stay as they are until
  // the kept ones are written.
  void begin(const Step& step);
  // Of the last step that began.
  std::span<const Kept> kept() const { return kept_; }
  // A block is copied, (from, to) after (from, to).
  void copy_blocks(std::span<const int32_t> pairs);

 private:
  struct Row {
    int place, index, position;
  };
  // The rows of one sequence.
  struct Place {
    std::vector<int64_t> tokens;  // keys of `rows_` that may be its own
    uint64_t used = 0;            // the step that wrote it last
  };

  const Row* find(const Step& step, int sequence) const;
  float* at(const Row& row) const;
  void forget(int place);

  int rows_each_ = 0, size_ = 0;
  uint64_t step_ = 0;
  Arena memory_;  // [places, rows_each, size]
  std::vector<Place> places_;
  std::unordered_map<int64_t, Row> rows_;  // by the token's slot in the cache
  std::vector<Kept> kept_;
};

}  // namespace tidewheel
