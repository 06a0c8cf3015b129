// The layer of a checkpoint that predicts the token after the next one (MTP): see engine/models/spec/mtp.py.
//
// Its row at a position is made of the token there and of what the model, behind its final norm, left of the token
// before. It writes K and V at that position of the blocks, in a layer of the cache behind the model's own. The model's
// steps do no more of it, so a step that nothing is guessed in computes only those.
//
// Where the token before is not known, as at the beginning of a sequence, the row is zero. Then K and V are zero as well,
// and nothing that attends to them gets a value of it. What it says is only ever a guess.
#pragma once

#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "model/branch.h"
#include "model/context.h"
#include "model/hidden_rows.h"
#include "model/plan.h"
#include "model/step.h"

namespace tidewheel {

class Mtp {
 public:
  // Writes the embedding of one of a step's tokens.
  using Embed = std::function<void(Worker&, const Step&, int64_t token, float* row)>;

  // Names its weights. Throws std::invalid_argument for a plan that the kernels cannot run.
  Mtp(const MtpPlan& plan, Context& context, Embed embed);
  // For so many sequences, with so many guesses of each. Throws std::bad_alloc.
  void allocate(int max_sequences);

  // Before a step that was checked runs.
  void begin(const Step& step);
  // In the step, behind the model's layers: K and V of all its tokens. `hidden` [T, hidden] is what the layers gave, and
  // `final_norm` the model's.
  void remember(Worker& worker, const Step& step, const float* hidden, const Norm& final_norm) const;

  // Whether something can be predicted behind the sequence's token: the row of the one before it is known.
  bool knows(const Step& step, int sequence) const { return rows_.before(step, sequence) != nullptr; }
  // Before it predicts behind the one token that each sequence of the step has. `from`: which of the rows that were
  // predicted last is what the model is taken to leave of the token before; empty: what it did leave.
  void begin_prediction(const Step& step, std::span<const int> from);
  // Returns a row of each sequence, as the head takes them.
  Rows predict(Worker& worker, const Step& step) const;

  void copy_blocks(std::span<const int32_t> pairs) { rows_.copy_blocks(pairs); }

 private:
  // What the model left of the token before.
  struct Before {
    const float* row = nullptr;  // null: in the row before, of this step
    bool known = true;
  };

  float* hidden() const { return context_.workspace.rows(hidden_); }
  void project(Worker& worker, const Step& step, const float* model_rows, const Norm& final_norm) const;

  Context& context_;
  const Embed embed_;
  const int num_rows_;
  const bool feeds_normed_;
  Norm embedding_norm_, hidden_norm_, final_norm_;
  Linear project_;
  std::deque<Branch> branches_;
  Buffer<float> inputs_;  // [T, 2 * hidden]: the embedding and the hidden row, normalized
  Buffer<float> hidden_;  // [T, hidden]
  HiddenRows rows_;
  Arena predicted_;       // [max sequences, hidden], as they are fed back
  std::vector<Before> before_;  // [T]
  std::vector<int> unknown_;    // tokens
};

}  // namespace tidewheel
