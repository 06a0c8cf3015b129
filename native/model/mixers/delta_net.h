// The gated delta net.
#pragma once

#include <vector>

#include "model/mixers/recurrent.h"

namespace tidewheel {

class DeltaNet final : public Mixer {
 public:
  DeltaNet(const DeltaNetPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  TokenRows rows(int token) const { return {context_.workspace.rows(rows_) + token * rows_.stride, rows_.stride}; }
  TokenRows gates(int token) const { return {context_.workspace.rows(gates_) + token * gates_.stride, gates_.stride}; }
  // Convolution and recurrence of some sequences; values become results.
  void recur_all(Worker& worker, std::span<const SequenceTokens> sequences) const;
  // A key head, with as many value heads: convolution, and the lengths of queries and keys.
  void prepare(Worker& worker, const SequenceTokens& tokens, int key_head) const;
  void recur(Worker& worker, const SequenceTokens& tokens, int value_head) const;

  const Context& context_;
  const DeltaNetPlan plan_;
  const int values_;  // where values begin in a row
  Convolution convolution_;
  Recurrence recurrence_;
  Linear in_, gate_in_, out_;
  float* a_log_ = nullptr;
  float* dt_bias_ = nullptr;
  Norm head_norm_;
  std::vector<float> query_scale_, key_scale_;  // of all dimensions alike
  Buffer<float> rows_;   // [T, q k v z]; v later holds the results
  Buffer<float> gates_;  // [T, b a]; later beta and decay
};

}  // namespace tidewheel
