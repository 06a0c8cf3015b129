// Mamba2's state space layer.
#pragma once

#include "model/mixers/recurrent.h"

namespace tidewheel {

class Mamba2 final : public Mixer {
 public:
  Mamba2(const Mamba2Plan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return true; }
  bool selects() const override { return true; }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  int conv_size() const { return plan_.size() + 2 * plan_.group_size(); }
  TokenRows rows(int token) const { return {context_.workspace.rows(rows_) + token * rows_.stride, rows_.stride}; }
  TokenRows gates(int token) const { return {context_.workspace.rows(gates_) + token * gates_.stride, gates_.stride}; }
  void scale_inputs(Worker& worker, int tokens) const;
  // Convolution and recurrence of some sequences. The results replace x.
  void recur_all(Worker& worker, std::span<const SequenceTokens> sequences) const;
  void recur(Worker& worker, const SequenceTokens& tokens, int head) const;
  void gate(int token) const;

  const Context& context_;
  const Mamba2Plan plan_;
  const bool scales_;  // whether any input has a scale
  Convolution convolution_;
  Recurrence recurrence_;
  Linear in_, out_;
  float* a_log_ = nullptr;
  float* skip_ = nullptr;
  float* dt_bias_ = nullptr;
  Norm norm_;
  Buffer<float> rows_;   // [T, x B C z dt]; x later holds the results
  Buffer<float> gates_;  // [T, time steps and decays of all heads]
};

}  // namespace tidewheel
