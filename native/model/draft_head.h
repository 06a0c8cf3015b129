// A draft head: a layer, in addition to the model's own, that predicts further tokens for drafts. This class has what
// all kinds have in common.
//
// Its input row at a position is made from the token there and from what the model left of the token before. It writes
// K and V to the same positions of the blocks, in a cache layer after the model's own layers. The model's steps do
// nothing else for it, so a step that drafts no tokens computes only K and V.
//
// If the token before is not known, as at the beginning of a sequence, the row is zero. Then K and V are zero as well,
// and attention to them adds nothing. Its predictions are only used as drafts.
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

  // What the model leaves of a token has `width` numbers. Throws std::invalid_argument if there are no draft tokens or
  // more than one cache group.
  DraftHead(Context& context, int width, int num_draft_tokens);
  virtual ~DraftHead() = default;
  DraftHead(const DraftHead&) = delete;
  DraftHead& operator=(const DraftHead&) = delete;

  // Allocates memory for up to `max_sequences` sequences. Throws std::bad_alloc.
  virtual void allocate(int max_sequences);

  // Called before a checked step runs.
  void begin(const Step& step);
  // Called in a step before the model's residual block number `residual`, counted over all layers, and after the last
  // one. `hidden` [T, hidden] is the input of that block.
  virtual void watch(Worker&, const Step&, int, const float*) const {}
  // Whether it reads rows of all tokens behind the input of residual block number `residual`.
  virtual bool reads_behind(int) const { return true; }
  // Called in a step after the model's layers. Writes K and V of all its tokens. `hidden` [T, hidden] is the layers'
  // output, and `final_norm` is the model's.
  virtual void remember(Worker& worker, const Step& step, const float* hidden, const Norm& final_norm) const = 0;

  // Whether it can predict the token after the sequence's token: the row of the token before must be known.
  bool knows(const Step& step, int sequence) const { return rows_.before(step, sequence) != nullptr; }
  // Called before a prediction after the one token that each sequence of the step has. `from` says which rows of the
  // last prediction stand for what the model left of the tokens before. Empty: use what the model left.
  void begin_prediction(const Step& step, std::span<const int> from);
  // Whether its attention computes common prefixes of sequences together.
  virtual bool takes_prefixes() const { return true; }
  // Returns a row for each sequence, as input of its own head or, without one, of the model's head.
  virtual Rows predict(Worker& worker, const Step& step) const = 0;
  virtual bool has_head() const { return false; }
  // Writes `logits` [rows, the model's vocabulary].
  virtual void head(Worker&, const Rows&, float*) const {}

  void copy_blocks(std::span<const int32_t> pairs) { rows_.copy_blocks(pairs); }

 protected:
  // What the model left of the token before.
  struct Before {
    const float* row = nullptr;  // null: the previous row of this step
    bool known = true;
  };

  // Copies norm(rows) [T, width] of the tokens that are kept for the next steps.
  void keep(Worker& worker, const float* rows, const Norm& norm) const;
  // Computes the rope angles of the positions from which it predicts.
  void turn(Worker& worker, const Step& step) const;
  float* predicted() const { return reinterpret_cast<float*>(predicted_.data()); }

  Context& context_;
  const int width_;
  std::vector<Before> before_;  // [T]
  std::vector<int> unknown_;    // tokens

 private:
  const int num_rows_;
  HiddenRows rows_;
  Arena predicted_;  // [max sequences, width]: predicted rows, fed back as input
};

}  // namespace tidewheel
