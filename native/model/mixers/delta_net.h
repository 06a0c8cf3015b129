// The gated delta net.
#pragma once

#include <vector>

#include "model/mixers/recurrent.h"

namespace tidewheel {

class DeltaNet final : public Mixer {
 public:
  DeltaNet(const DeltaNetPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return true; }
  bool selects() const override { return true; }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  TokenRows rows(int token) const { return {context_.workspace.rows(rows_) + token * rows_.stride, rows_.stride}; }
  TokenRows gates(int token) const { return {context_.workspace.rows(gates_) + token * gates_.stride, gates_.stride}; }
  // Convolution and recurrence of some sequences. The results replace the values.
  void recur_all(Worker& worker, std::span<const SequenceTokens> sequences) const;
  // Convolves a key head and an equal part of the values, and normalizes queries and keys.
  void prepare(Worker& worker, const SequenceTokens& tokens, int key_head) const;
  void recur(Worker& worker, const SequenceTokens& tokens, int value_head) const;

  const Context& context_;
  const DeltaNetPlan plan_;
  const int values_;  // the offset of values in a row
  Convolution convolution_;
  Recurrence recurrence_;
  Linear in_, gate_in_, out_;
  float* a_log_ = nullptr;
  float* dt_bias_ = nullptr;
  Norm head_norm_;
  std::vector<float> query_scale_, key_scale_;  // the same in all dimensions
  Buffer<float> rows_;   // [T, q k v z]; v later holds the results
  Buffer<float> gates_;  // [T, b a]; later beta and decay
};

}  // namespace tidewheel
