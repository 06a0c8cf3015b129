// What recurrent layers keep of sequences: slots of float32, one for each sequence or snapshot. A slot holds all
// layers.
//
// Draft tokens at the tokens to come change no slot, for they may be wrong. A slot holds the state after the token
// before them, and a log of what they gave to the recurrences, which is far less than a state. The sequence's next step
// begins behind the draft tokens that were accepted: they are replayed from the log first, token by token as they would
// have run.
#pragma once

#include <span>
#include <vector>

#include "model/step.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// Tokens of one sequence, and where its state is.
struct SequenceTokens {
  int begin, count, slot;
  int draft_tokens;    // the last ones of them
  bool is_first;  // it begins here: what its slot holds is of another sequence
  bool logged;    // they are the first of the slot's log; else they are tokens of the step, from `begin` on
};

class StateSlots {
 public:
  // While a model is put together: room in every slot, or in each token of its log, for `floats` numbers of a layer.
  // Returns where they begin.
  size_t add(size_t floats);
  size_t add_to_log(size_t floats);
  // Throws std::bad_alloc. A log has room for `max_draft_tokens`.
  void allocate(int num_slots, int max_draft_tokens);

  bool empty() const { return floats_ == 0; }
  size_t bytes() const { return memory_.bytes() + log_.bytes(); }
  float* at(int slot, size_t offset) const { return reinterpret_cast<float*>(memory_.data()) + slot * floats_ + offset; }
  // Of the first draft token. Those of the others are `log_stride` apart.
  float* log_at(int slot, size_t offset) const {
    return reinterpret_cast<float*>(log_.data()) + slot * max_draft_tokens_ * log_stride_ + offset;
  }
  size_t log_stride() const { return log_stride_; }

  // Throws std::invalid_argument unless every sequence of the step has a slot of its own, with the state before it.
  void check(const Step& step) const;
  void check_slot(int slot) const;
  // Before a step that was checked runs: what it replays and what it runs.
  void begin(const Step& step);
  std::span<const SequenceTokens> replayed() const { return replayed_; }
  std::span<const SequenceTokens> running() const { return running_; }

  // (from, to) after (from, to), one after the other.
  void copy(ThreadPool& pool, std::span<const int32_t> pairs);

 private:
  struct Slot {
    int length = 0;   // tokens of the sequence that its state is after
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
