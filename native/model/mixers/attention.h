// Attention over the paged KV cache.
#pragma once

#include <optional>

#include "model/clipped_linear.h"
#include "model/mixers/disentangled.h"
#include "model/mixers/mixer.h"

namespace tidewheel {

class Attention final : public Mixer {
 public:
  Attention(const AttentionPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return !shares(); }
  bool selects() const override { return !shares(); }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;
  void remember(Worker& worker, const Step& step, const Rows& input) const override;

 private:
  bool shares() const { return plan_.shared_layer >= 0; }
  const KvCache& cache() const { return context_.attention.caches[plan_.cache_group]; }
  const int32_t* block_table(const Step& step, int sequence) const { return step.block_tables[plan_.cache_group].of(sequence); }
  float* qkv(int row) const { return context_.workspace.rows(qkv_rows_) + row * qkv_rows_.stride; }
  char* queries(const Step& step, int token) const {
    const AttentionState& state = context_.attention;
    char* const first = state.is_tower ? state.queries.data() + step.first_query * query_rows_.stride
                                       : context_.workspace.rows(query_rows_);
    return first + token * query_rows_.stride;
  }
  // To hide only the first token of its sequence from a single token: a window that begins after it.
  int window(const Step& step, const AttentionTask& task) const {
    return plan_.skips_first ? step.positions[task.token_begin] : plan_.sliding_window;
  }
  // [num_tokens], or null.
  const int32_t* visible_until(const Step& step, const AttentionTask& task) const {
    return plan_.two_way && !step.visible_until.empty() ? step.visible_until.data() + task.token_begin : nullptr;
  }
  void add_clipped(const std::string& prefix, Context& context);
  // Computes q, k and v, and what positions add to their scores.
  void project(Worker& worker, const Step& step, const Rows& input) const;
  void normalize_whole(Worker& worker, int tokens) const;
  // Multiplies results by the gates of all tokens, or of those that are read.
  void gate(Worker& worker, const Step& step, int results, bool selects) const;
  // Normalizes and rotates the q, k and v of one of the task's tokens. Stores q as a query, and k and v in the cache.
  void store(const Worker& worker, const Step& step, const AttentionTask& task, int index, Range kv_heads) const;
  void attend(Worker& worker, const Step& step, const AttentionTasks& tasks) const;
  void attend_to_prefixes(Worker& worker, const Step& step, const AttentionTasks& tasks) const;
  NextBlocks blocks_of(const Step& step, const AttentionTasks& tasks, const AttentionTasks::Unit& unit) const;
  AttentionArgs arguments(const Worker& worker, const Step& step, const AttentionTasks& tasks, const AttentionTask& task,
                          int kv_head) const;

  const Context& context_;
  const AttentionPlan plan_;
  const Heads heads_;
  const KvScales scales_;
  int layer_;         // in its group's cache: its own layer, or the one that it shares
  int rope_table_ = -1;
  Linear qkv_, out_;
  ClippedLinear clipped_q_, clipped_k_, clipped_v_, clipped_out_;  // instead of these, if it is clipped
  Buffer<float> clipped_;                                          // [T, inputs of any of them]
  Norm q_norm_, k_norm_, v_norm_;
  float* sinks_ = nullptr;
  float* distance_bias_ = nullptr;
  std::optional<Disentangled> disentangled_;
  Buffer<float> qkv_rows_;   // [T, q k v gate]; later attention's result replaces q
  Buffer<char> query_rows_;  // [T, heads, padded_dim] queries; in a tower they lie elsewhere
};

}  // namespace tidewheel
