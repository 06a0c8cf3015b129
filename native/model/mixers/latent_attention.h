// Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434). The cache has one latent and one rotated key for
// each token, shared by all heads. One matrix per head projects queries into the latents' space, and another one
// projects attention's results out of it.
#pragma once

#include "model/mixers/mixer.h"

namespace tidewheel {

class LatentAttention final : public Mixer {
 public:
  LatentAttention(const LatentAttentionPlan& plan, const std::string& prefix, Context& context);
  bool keeps() const override { return true; }
  bool selects() const override { return true; }
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;
  void remember(Worker& worker, const Step& step, const Rows& input) const override;

 private:
  const KvCache& cache() const { return context_.attention.caches[plan_.cache_group]; }
  const int32_t* block_table(const Step& step, int sequence) const { return step.block_tables[plan_.cache_group].of(sequence); }
  template <typename T>
  T* row(const Buffer<T>& buffer, int token) const { return context_.workspace.rows(buffer) + token * buffer.stride; }
  int head_dim() const { return plan_.nope_dim + plan_.rope_dim; }
  int wide_dim() const { return plan_.rope_dim + plan_.kv_rank; }

  // Copies the rotated parts of the queries, the key and the latent to where `store` reads them.
  void arrange(Worker& worker, int tokens) const;
  // Rotates tokens' queries and keys. Stores the queries, and stores keys and latents in the cache.
  void store(Worker& worker, const Step& step) const;
  void attend(Worker& worker, const Step& step, const AttentionTasks& tasks) const;
  void attend_to_prefixes(Worker& worker, const Step& step, const AttentionTasks& tasks) const;
  AttentionArgs arguments(const Worker& worker, const Step& step, const AttentionTasks& tasks, const AttentionTask& task,
                          int part) const;

  const Context& context_;
  const LatentAttentionPlan plan_;
  const Heads heads_;    // as the cache has them: one KV head
  const Heads divided_;  // the same KV head several times, each time for some of the query heads
  const float kv_scale_;
  int layer_, rope_table_;
  Linear in_, q_up_, k_up_, v_up_, out_;
  Norm q_norm_, kv_norm_;
  Buffer<float> in_rows_;     // [T, q or its latent, latent, key]
  Buffer<float> q_rows_;      // [T, heads, nope + rope]; later the values of all heads
  Buffer<float> wide_rows_;   // [T, heads * (rope + latent), key, latent]; later attention's result, [T, heads, latent]
  Buffer<char> query_rows_;   // [T, heads, padded_dim] queries
};

}  // namespace tidewheel
