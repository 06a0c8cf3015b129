// A layer beside the model's own that predicts further tokens, for drafts: what those of all kinds have in common.
//
// Its row at a position is made of the token there and of what the model left of the token before. It writes K and V at
// that position of the blocks, in a layer of the cache behind the model's own. The model's steps do no more of it, so a
// step that nothing is drafted in computes only those.
//
// Where the token before is not known, as at the beginning of a sequence, the row is zero. Then K and V are zero as
// well, and nothing that attends to them gets a value of it. What it says is only ever a draft.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "model/context.h"
#include "model/hidden_rows.h"
#include "model/step.h"

namespace tidewheel {

class DraftHead {
 public:
  // Writes the model's embedding of one of a step's tokens.
  using Embed = std::function<void(Worker&, const Step&, int64_t token, float* row)>;

  // What the model leaves of a token has `width` numbers. Throws std::invalid_argument unless there is at least one
  // draft token and the cache has one group.
  DraftHead(Context& context, int width, int num_draft_tokens);
  virtual ~DraftHead() = default;
  DraftHead(const DraftHead&) = delete;
  DraftHead& operator=(const DraftHead&) = delete;

  // For up to `max_sequences` sequences. Throws std::bad_alloc.
  virtual void allocate(int max_sequences);

  // Before a step that was checked runs.
  void begin(const Step& step);
  // In the step, before the model's residual block of that number, counted over all layers, and behind the last one:
  // `hidden` [T, hidden] is what it is given.
  virtual void watch(Worker&, const Step&, int, const float*) const {}
  // In the step, behind the model's layers: K and V of all its tokens. `hidden` [T, hidden] is what the layers gave,
  // and `final_norm` the model's.
  virtual void remember(Worker& worker, const Step& step, const float* hidden, const Norm& final_norm) const = 0;

  // Whether something can be predicted behind the sequence's token: the row of the one before it is known.
  bool knows(const Step& step, int sequence) const { return rows_.before(step, sequence) != nullptr; }
  // Before it predicts behind the one token that each sequence of the step has. `from`: which of the rows that were
  // predicted last is what the model is taken to leave of the token before; empty: what it did leave.
  void begin_prediction(const Step& step, std::span<const int> from);
  // Whether its attention takes the common prefixes of sequences together.
  virtual bool takes_prefixes() const { return true; }
  // Returns a row of each sequence, as its head takes them, or else the model's.
  virtual Rows predict(Worker& worker, const Step& step) const = 0;
  virtual bool has_head() const { return false; }
  // Writes `logits` [rows, vocabulary of the model].
  virtual void head(Worker&, const Rows&, float*) const {}

  void copy_blocks(std::span<const int32_t> pairs) { rows_.copy_blocks(pairs); }

 protected:
  // What the model left of the token before.
  struct Before {
    const float* row = nullptr;  // null: in the row before, of this step
    bool known = true;
  };

  // Copies norm(rows) [T, width] of those that are kept for the next steps.
  void keep(Worker& worker, const float* rows, const Norm& norm) const;
  // Angles of the positions that are predicted behind.
  void turn(Worker& worker, const Step& step) const;
  float* predicted() const { return reinterpret_cast<float*>(predicted_.data()); }

  Context& context_;
  const int width_;
  std::vector<Before> before_;  // [T]
  std::vector<int> unknown_;    // tokens

 private:
  const int num_rows_;
  HiddenRows rows_;
  Arena predicted_;  // [max sequences, width], as they are fed back
};

}  // namespace tidewheel
