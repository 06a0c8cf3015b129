// What recurrent layers keep of sequences: slots of float32, one for each sequence or snapshot. A slot holds all
// layers.
//
// Draft tokens do not change a slot, because they may be wrong. A slot holds the state after the token before them, and
// a log of their inputs to the recurrences, which is much smaller than a state. The sequence's next step begins after
// the accepted draft tokens. These are first replayed from the log, token by token, exactly as they would have run.
#pragma once

#include <span>
#include <vector>

#include "model/step.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// Tokens of one sequence, and the slot of its state.
struct SequenceTokens {
  int begin, count, slot;
  int draft_tokens;    // the last tokens, which are drafts
  bool is_first;  // the sequence begins here: its slot still holds another sequence's state
  bool logged;    // the tokens are the first of the slot's log; otherwise they are the step's, from `begin` on
};

class StateSlots {
 public:
  // Called while a model is built: reserves `floats` numbers for a layer in every slot, or for each token in every log.
  // Return the offset.
  size_t add(size_t floats);
  size_t add_to_log(size_t floats);
  // A log has room for `max_draft_tokens`. Throws std::bad_alloc.
  void allocate(int num_slots, int max_draft_tokens);

  bool empty() const { return floats_ == 0; }
  size_t bytes() const { return memory_.bytes() + log_.bytes(); }
  float* at(int slot, size_t offset) const { return reinterpret_cast<float*>(memory_.data()) + slot * floats_ + offset; }
  // The log of the first draft token. Those of the others are `log_stride` apart.
  float* log_at(int slot, size_t offset) const {
    return reinterpret_cast<float*>(log_.data()) + slot * max_draft_tokens_ * log_stride_ + offset;
  }
  size_t log_stride() const { return log_stride_; }

  // Throws std::invalid_argument unless every sequence of the step has a slot of its own, with the state before it.
  void check(const Step& step) const;
  void check_slot(int slot) const;
  // Called before a checked step runs: finds the tokens that it replays and those that it runs.
  void begin(const Step& step);
  std::span<const SequenceTokens> replayed() const { return replayed_; }
  std::span<const SequenceTokens> running() const { return running_; }

  // Copies slots for pairs (from, to), one after the other.
  void copy(ThreadPool& pool, std::span<const int32_t> pairs);

 private:
  struct Slot {
    int length = 0;   // number of the sequence's tokens that the state includes
    int draft_tokens = 0;  // in its log
  };

  static size_t take(size_t floats, size_t& end);

  size_t floats_ = 0, log_stride_ = 0;  // of a slot, and of a token in its log
  size_t max_draft_tokens_ = 0;
  Arena memory_, log_;
  std::vector<Slot> slots_;
  std::vector<SequenceTokens> replayed_, running_;
};

}  // namespace tidewheel
