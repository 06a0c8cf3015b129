// Keeps the rows that a model left of tokens, for the steps that continue after them. A token is identified by its
// place in the KV cache: a sequence that has the block and the position has the row, and so do forks that share the
// block.
//
// There is memory for the last tokens of as many sequences as run at a time. A sequence that returns finds its rows
// unless that many other sequences have run since. If a block has a new owner, a row may be of other tokens. So rows
// may only be used where they cannot change what is sampled.
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
  // A token of the step whose row is kept, and the place of the row.
  struct Kept {
    int token;
    float* row;
  };

  // Allocates memory for the last `rows` tokens of `sequences` sequences, `size` floats each. Throws std::bad_alloc.
  void allocate(int sequences, int rows, int size);

  // The row of the token before a sequence's first token of the step; null if it is not kept.
  const float* before(const Step& step, int sequence) const;
  // Assigns memory to the last tokens of each sequence. The rows that `before` returned for this step stay valid until
  // the kept rows are written.
  void begin(const Step& step);
  // The kept tokens of the last step that began.
  std::span<const Kept> kept() const { return kept_; }
  // Blocks were copied: pairs (from, to), one after the other.
  void copy_blocks(std::span<const int32_t> pairs);

 private:
  struct Row {
    int place, index, position;
  };
  // The rows of one sequence.
  struct Place {
    std::vector<int64_t> tokens;  // keys of `rows_` that may belong to this place
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
