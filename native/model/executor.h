// Runs a model over paged batches: forward pass and sampling in one parallel region.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "model/attention_plan.h"
#include "model/config.h"
#include "model/kv_cache.h"
#include "model/profile.h"
#include "model/sampler.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// The arrays of engine/devices/batch.py's StepBatch.
struct Step {
  std::span<const int32_t> token_ids, positions;  // [T]
  std::span<const int32_t> query_start;           // [S + 1]
  std::span<const int32_t> context_len;           // [S]
  const int32_t* block_tables = nullptr;          // [S, block_table_stride]
  int64_t block_table_stride = 0;
  std::span<const int32_t> logits_rows;           // [any number]
  Sampling sampling;
  float* out_logits = nullptr;                    // [R, vocab] if wanted
};

struct ExecutorShape {
  int num_blocks = 0, max_num_seqs = 0, max_num_batched_tokens = 0;
};

class Executor {
 public:
  // A thread on each processor of each group. A group owns panels of every weight and some KV heads: it alone computes
  // with them, in memory of its own node. The results are the same to the bit whatever the groups are.
  // Throws std::invalid_argument for a config that the kernels cannot run, std::bad_alloc for want of memory.
  Executor(ModelConfig config, const Kernels& kernels, const WeightFormats& formats, CacheType cache_type,
           ExecutorShape shape, const std::vector<std::vector<int>>& groups);

  // Memory comes from the node of the thread that touches it first: worker 0 is where it belongs while it loads, and
  // then again where the caller was.
  void set_weights(std::span<const Source> sources) {
    const Pinned pinned = pool_.pinned_caller();
    weights_.set(sources, pool_, loading_stopped_);
  }
  void check_complete() const { weights_.check_complete(); }
  bool read_weights(int file, int64_t offset, uint64_t checksum) {
    const Pinned pinned = pool_.pinned_caller();
    return weights_.read_packed(file, offset, checksum, pool_, loading_stopped_);
  }
  // From any thread: lets `set_weights` and `read_weights` end soon, by throwing Stopped.
  void stop_loading() { loading_stopped_ = true; }
  const Weights& weights() const { return weights_; }
  const KvCache& cache() const { return cache_; }

  // Throws std::invalid_argument before anything is touched if an array does not fit the model, the cache or the others.
  // `before_sampling`, if given, is called on this thread when the logits are there: it waits for the masks, which may
  // be written until then. What it throws is passed on.
  void step(const Step& step, const std::function<void()>& before_sampling = {});
  void copy_blocks(std::span<const int32_t> pairs);

  int vocab_size() const { return config_.vocab_size; }
  Profile& profile() { return profile_; }
  size_t weight_bytes() const { return weights_.packed().bytes(); }
  size_t cache_bytes() const { return cache_.bytes(); }
  int num_threads() const { return pool_.size(); }
  void pin_caller() const { pool_.pin_caller(); }
  // See ThreadPool.
  void lend_core() { pool_.lend(); }
  void take_back_core() { pool_.take_back(); }
  const Kernels& kernels() const { return kernels_; }

 private:
  // Rows of floats, of which GEMM makes its inputs: x, or norm(x).
  struct Rows {
    const float* x;
    size_t stride;
    int count;
    const int32_t* gather = nullptr;  // which of x's rows; null: the first ones
    Norm norm = {};
  };
  struct GemmOutput {
    Epilogue epilogue;
    float* y;
    size_t stride;
    Activation activation = Activation::kSilu;
  };

  void check(const Step& step) const;
  void forward(Worker& worker, const Step& step);
  void look_up(const Linear& linear, int row, float* out) const;
  void embed(Worker& worker, const Step& step);
  void attend(Worker& worker, const Step& step, int layer);
  void prepare(const Worker& worker, const Step& step, int layer, const AttentionTask& task, int token, Range kv_heads);
  void attend_to_cache(Worker& worker, const Step& step, int layer);
  void mlp(Worker& worker, int tokens, int layer);
  // Of the rows from `first` on, as many as there is room for.
  void logits(Worker& worker, const Step& step, size_t first);
  // Of all rows: `forward` has computed the first ones' logits.
  void sample(Worker& worker, const Step& step);
  void normalize(Worker& worker, const Norm& norm, int rows);
  void gemm(Worker& worker, const Linear& linear, const Rows& rows, const GemmOutput& output);
  const char* pack_rows(Worker& worker, const Linear& linear, const Rows& rows);

  size_t query_bytes() const { return kernels_.query_bytes[static_cast<int>(cache_type_)]; }
  float* angles(int rope, int token) const {
    return reinterpret_cast<float*>(angles_.data()) + (size_t(rope) * shape_.max_num_batched_tokens + token) * angle_stride_;
  }
  char* scratch(const Worker& worker) const {
    return scratch_[worker.group()].data() + worker.index_in_group() * scratch_stride_;
  }

  const ModelConfig config_;
  const Kernels& kernels_;
  const CacheType cache_type_;
  const ExecutorShape shape_;
  ThreadPool pool_;
  Weights weights_;
  std::atomic<bool> loading_stopped_ = false;
  const Sampler sampler_;
  KvCache cache_;
  struct Rope {
    std::vector<float> inv_freq;
    float factor;
    bool operator==(const Rope&) const = default;
  };
  std::vector<Rope> ropes_;
  std::vector<int> layer_rope_;  // [layers]: which of the ropes

  // Buffers of a step, sized for the largest one. T tokens, R rows: as many as there may be sequences, so that a step
  // which wants more logits computes and samples them in turns.
  size_t qkv_stride_ = 0, query_stride_ = 0, mlp_stride_ = 0;
  size_t angle_stride_ = 0;
  float* hidden() const { return reinterpret_cast<float*>(hidden_.data()); }

  Arena hidden_;     // [T, hidden] float: the residual stream
  Arena packed_;     // inputs of one GEMM, packed by the whole team
  Arena projected_;  // [T, embedding size] float, for models that project their embedding
  Arena qkv_;        // [T, qkv_stride_] float; then what attention gives
  Arena queries_;    // [T, query_stride_] queries
  Arena mlp_;        // [T, mlp_stride_] float
  Arena angles_;     // [ropes, T, angle_stride_] float: cosines, then sines
  Arena logits_;     // [R, vocab] float
  std::vector<Arena> scratch_;  // [groups], one piece a worker: attention, or the inputs of a small GEMM
  size_t scratch_stride_ = 0, row_scratch_bytes_ = 0;
  AttentionPlan attention_plan_;
  Profile profile_;
};

}  // namespace tidewheel
