// Runs a model over paged batches: forward pass and sampling in one parallel region.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "model/attention_plan.h"
#include "model/config.h"
#include "model/sampler.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// The arrays of tidewheel/engine/batch.py's StepBatch.
struct Step {
  std::span<const int32_t> token_ids, positions;  // [T]
  std::span<const int32_t> query_start;           // [S + 1]
  std::span<const int32_t> context_len;           // [S]
  const int32_t* block_tables = nullptr;          // [S, block_table_stride]
  int64_t block_table_stride = 0;
  std::span<const int32_t> logits_rows;           // [R]
  Sampling sampling;
  float* out_logits = nullptr;                    // [R, vocab] if wanted
};

struct ExecutorShape {
  int num_blocks = 0, max_num_seqs = 0, max_num_batched_tokens = 0;
};

class Executor {
 public:
  // Throws std::invalid_argument for a config that the kernels cannot run, std::bad_alloc for want of memory.
  Executor(ModelConfig config, const Kernels& kernels, DType type, CacheType cache_type,
           ExecutorShape shape, std::vector<int> cpus);

  void set_weight(const std::string& name, const Source& source) { weights_.set(name, source, pool_); }
  void check_complete() const { weights_.check_complete(); }

  // Throws std::invalid_argument before anything is touched if an array does not fit the model, the cache or the others.
  void step(const Step& step);
  void copy_blocks(std::span<const int32_t> pairs);

  int vocab_size() const { return config_.vocab_size; }
  size_t weight_bytes() const { return weights_.bytes(); }
  size_t cache_bytes() const { return cache_.bytes(); }
  int num_threads() const { return pool_.size(); }
  void pin_caller() const { pool_.pin_caller(); }
  const Kernels& kernels() const { return kernels_; }

 private:
  struct Rows {
    const void* data;  // activations
    size_t stride;
    int count;
  };
  struct GemmOutput {
    Epilogue epilogue;
    float* y;
    void* out;
    size_t stride;
    Activation activation = Activation::kSilu;
  };

  void check(const Step& step) const;
  void forward(Worker& worker, const Step& step);
  void embed(Worker& worker, const Step& step);
  void angles(const std::vector<float>& inv_freq, float factor, int position, float* cos, float* sin) const;
  void attend(Worker& worker, const Step& step, int layer);
  void attend_to_cache(Worker& worker, const Step& step, int layer);
  void mlp(Worker& worker, int tokens, int layer);
  void logits(Worker& worker, const Step& step);
  void sample(Worker& worker, const Step& step);
  void apply_norm(Worker& worker, const Norm& norm, int rows, bool in_place, void* out);
  void copy_to_activations(Worker& worker, float* x, int rows, int size);
  void gemm(Worker& worker, const Linear& linear, const Rows& x, const GemmOutput& output);
  Rows inputs(int rows) const { return {activations_.data(), activation_stride_, rows}; }

  char* cache_block(int layer, int block) const {
    return cache_.data() + layer_offset_[layer] + size_t(block) * block_bytes_[layer];
  }

  const ModelConfig config_;
  const Kernels& kernels_;
  const DType type_;            // of the weights
  const CacheType cache_type_;  // of K and V
  const ExecutorShape shape_;
  ThreadPool pool_;
  Weights weights_;
  const Sampler sampler_;
  Arena cache_;
  std::vector<size_t> layer_offset_, block_bytes_;

  // Buffers of a step, sized for the largest one. T tokens, R rows.
  size_t activation_stride_ = 0, qkv_stride_ = 0, query_stride_ = 0, mlp_stride_ = 0;
  int max_rotary_pairs_ = 0;
  float* hidden() const { return reinterpret_cast<float*>(hidden_.data()); }

  Arena hidden_;       // [T, hidden] float: the residual stream
  Arena activations_;  // [T, activation_stride_]: inputs of qkv, out, up and head
  Arena projected_;    // [T, embedding size] float, for models that project their embedding
  Arena qkv_;          // [T, qkv_stride_] float
  Arena queries_;      // [T, query_stride_] queries
  Arena mlp_;          // [T, mlp_stride_] activations
  Arena angles_;       // [T, 2, max_rotary_pairs_] float
  Arena logits_;       // [R, vocab] float
  Arena scratch_;      // one piece a worker: attention
  size_t scratch_stride_ = 0;
  std::vector<int> token_sequence_;           // [T]: which sequence a token belongs to
  AttentionPlan attention_plan_;
};

}  // namespace tidewheel
