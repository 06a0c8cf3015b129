// A draft head that predicts the next token from the inputs of three of the model's layers (EAGLE3): see
// engine/models/spec/eagle3.py. What the model leaves of a token is, for this layer, the fused row of those three
// inputs.
#pragma once

#include <deque>
#include <memory>

#include "model/residual_block.h"
#include "model/plan.h"
#include "model/draft_head.h"

namespace tidewheel {

class Eagle3 final : public DraftHead {
 public:
  // Names its weights. `model_vocab` is the model's number of tokens. `first_residuals` has the first residual block of
  // each of the model's layers, then the number of blocks. `fused` has room for [T, hidden], which nothing else uses
  // during a step. Throws std::invalid_argument for a plan that the kernels cannot run.
  Eagle3(const Eagle3Plan& plan, Context& context, int model_vocab, std::span<const int> first_residuals,
         const Buffer<float>& fused, Embed embed);

  void allocate(int max_sequences) override;
  bool reads_behind(int residual) const override { return watched_.back().first > residual; }
  void watch(Worker& worker, const Step& step, int residual, const float* hidden) const override;
  void remember(Worker& worker, const Step& step, const float* hidden, const Norm& final_norm) const override;
  bool takes_prefixes() const override { return false; }  // they need tokens whose windows begin at the same place
  Rows predict(Worker& worker, const Step& step) const override;
  bool has_head() const override { return true; }
  void head(Worker& worker, const Rows& rows, float* logits) const override;

 private:
  float* fused() const { return context_.workspace.rows(fused_); }
  float* hidden() const { return context_.workspace.rows(hidden_); }
  Rows inputs(const Step& step) const;
  void embed(Worker& worker, const Step& step, int64_t token, float* row) const;
  // Computes the attention's inputs of all tokens. If it `predicts`, also the rows that attention's output is added to.
  void prepare(Worker& worker, const Step& step, bool predicts) const;

  Context own_;  // with this layer's hidden size
  const int model_size_, model_vocab_, vocab_;
  const Embed embed_;
  const bool adds_normed_;
  const std::vector<int32_t> token_ids_;
  Linear embedding_;        // if this layer has its own
  std::deque<Linear> fuse_;
  std::vector<std::pair<int, const Linear*>> watched_;  // ascending by the model's residual block
  Norm embedding_norm_, hidden_norm_, final_norm_;
  std::unique_ptr<const Mixer> attention_;
  std::unique_ptr<const ResidualBlock> mlp_;
  Linear head_;
  const Buffer<float> fused_;
  Buffer<float> hidden_;  // [T, hidden]
  Buffer<float> inputs_;  // [T, 2 * hidden]: the embedding and the hidden row, normalized
  Arena own_logits_;      // [max sequences, vocab], if its vocabulary is not the model's
};

}  // namespace tidewheel
