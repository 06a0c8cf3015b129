// Runs a model on batches with a paged KV cache: forward pass and sampling in one parallel region.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "model/residual_block.h"
#include "model/context.h"
#include "model/plan.h"
#include "model/draft_head.h"
#include "model/sampler.h"
#include "model/step.h"
#include "model/streams.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

struct ExecutorShape {
  std::vector<int> num_blocks;  // of each cache group
  int max_num_seqs = 0, max_num_batched_tokens = 0;
  int num_states = 0;           // slots of recurrent state; at least 1 if a layer is recurrent
  int max_lora_rank = 0;        // of adapters; 0: no adapters
  int max_draft_tokens = 0;          // per sequence and step; for models with recurrent layers
};

class Executor {
 public:
  // Starts a thread on each processor of each group. A group owns panels of every weight and some KV heads. They are in
  // its node's memory, and only this group computes with them. The division into groups does not change a bit of the
  // results. Throws std::invalid_argument for a plan that the kernels cannot run, and std::bad_alloc if memory runs
  // out.
  Executor(DecoderPlan plan, const Kernels& kernels, CacheType cache_type, ExecutorShape shape,
           const std::vector<std::vector<int>>& groups)
      : Executor(std::move(plan), kernels, cache_type, std::move(shape), std::make_shared<ThreadPool>(groups)) {}
  // Uses the threads of another executor. The two must not run at the same time.
  Executor(DecoderPlan plan, const Kernels& kernels, CacheType cache_type, ExecutorShape shape,
           std::shared_ptr<ThreadPool> pool);

  // The system gives a thread memory of its own NUMA node. The caller is worker 0, so it is moved to worker 0's
  // processor while it loads, and moved back afterwards.
  bool set_weights(std::span<const Source> sources) {
    const Pinned pinned = pool_->pinned_caller();
    return weights_.set(sources, *pool_, loading_stopped_);
  }
  void check_complete() const { weights_.check_complete(); }
  bool read_weights(int file, int64_t offset, uint64_t checksum) {
    const Pinned pinned = pool_->pinned_caller();
    return weights_.read_packed(file, offset, checksum, *pool_, loading_stopped_);
  }
  // May be called from any thread: makes `set_weights` and `read_weights` end soon, by throwing Stopped.
  void stop_loading() { loading_stopped_ = true; }
  const Weights& weights() const { return weights_; }
  const KvCache& cache(int group = 0) const { return attention_.caches[group]; }

  // Throws std::invalid_argument if an array does not fit the model, the cache or the other arrays. Then nothing is
  // changed. `before_sampling`, if given, is called on this thread after the logits are computed. It waits for the
  // masks, which may be written until then. Its exceptions are passed on.
  void step(const Step& step, const std::function<void()>& before_sampling = {});
  // Samples from the draft head's predictions after the one token that each sequence of the step has: see
  // DraftHead::begin_prediction. The step's rows are its tokens. Throws std::invalid_argument as `step` does.
  void predict(const Step& step, std::span<const int> from);
  bool predicts() const { return draft_head_ != nullptr; }
  // Whether the draft head knows what the model left of the token before the sequence's first one.
  bool can_predict(const Step& step, int sequence) const { return draft_head_->knows(step, sequence); }
  // Throws std::invalid_argument unless `context` tokens of a sequence fit the model and the step's block tables.
  void check_room(const Step& step, int sequence, int context) const;
  void copy_blocks(std::span<const int32_t> pairs, int group = 0);  // in one cache group
  // Copy blocks of the first cache group out of the cache or into it: [blocks, a whole block's bytes]. See KvCache.
  // Throw std::invalid_argument for a block that does not exist, or another number of bytes.
  void read_blocks(std::span<const int32_t> blocks, std::span<char> to);
  void write_blocks(std::span<const int32_t> blocks, std::span<const char> from);
  // Copies recurrent state for pairs (from, to), one after the other. Throws std::invalid_argument for a slot that does
  // not exist.
  void copy_states(std::span<const int32_t> pairs);

  // Gives memory that only steps need back to the system, until the next step. Call it between steps, like all above.
  void release_scratch();

  // May be called from any thread, even during a step. Throws what Adapter throws.
  std::shared_ptr<const Adapter> pack_adapter(DType type, AdapterContent content) const;
  void set_adapter(int number, std::shared_ptr<const Adapter> adapter) { adapters_.set(number, std::move(adapter)); }

  int vocab_size() const { return plan_.vocab_size; }
  bool has_states() const { return !states_.empty(); }
  // The size of a token's row between two pipeline stages: its hidden row, or those of all streams, and its per-layer
  // embeddings.
  size_t row_floats() const { return row_width() + per_layer_width(); }
  Profile& profile() { return profile_; }
  // The packed matrix that has this tensor. Throws std::invalid_argument if there is none.
  const Linear& matrix_of(const std::string& name) const;
  // Between steps: keeps the inputs of the matrices that have these tensors, from the next step on. Throws as
  // `matrix_of` does.
  void capture_inputs(const std::vector<std::string>& names);
  // The inputs of one of them in the steps since they were taken last, [rows, inputs].
  std::vector<float> take_inputs(const std::string& name);
  size_t weight_bytes() const { return weights_.packed().bytes(); }
  size_t cache_bytes() const;
  const std::shared_ptr<ThreadPool>& pool() const { return pool_; }
  // Uses the threads of another pool from now on, between two steps. False if it has others than as many in each group:
  // the weights lie where their group reads them.
  bool use_threads(std::shared_ptr<ThreadPool> pool);
  int num_threads() const { return pool_->size(); }
  void pin_caller() const { pool_->pin_caller(); }
  const Kernels& kernels() const { return kernels_; }

 private:
  void check(const Step& step, bool with_states = true) const;
  void run(const Step& step, const std::function<void()>& before_sampling);
  // Finds the tokens whose rows are read after the layers. False if all are to be computed.
  bool find_read_rows(const Step& step);
  void check_media(const Step& step) const;
  void check_visible(const Step& step) const;
  void check_block(int block, size_t group) const;
  void check_whole_blocks(std::span<const int32_t> blocks, size_t num_bytes) const;
  void forward(Worker& worker, const Step& step);
  // Runs the residual block from which on only `read_rows` are computed.
  void select_rows(Worker& worker, const Step& step);
  void look_up(const Linear& linear, int row, float* out) const;
  // Writes a token's embedding row, with its adapter's update.
  void embed_token(const Worker& worker, const Step& step, int64_t token, float* row) const;
  void embed(Worker& worker, const Step& step);
  // Copies part 0 of the media's rows to their tokens' rows, or adds another part.
  void take_media(Worker& worker, const Step& step, size_t part);
  void make_draft_head(const Buffer<float>& fused);
  // For stages that do not embed or do not have the head: use the step's rows instead.
  void take_rows(Worker& worker, const Step& step);
  void give_rows(Worker& worker, const Step& step);
  // Computes the per-layer embeddings of the tokens, in models that have them.
  void tell_layers(Worker& worker, const Step& step);
  // Computes logits of the rows from `first` on, as many as there is room for.
  void logits(Worker& worker, const Step& step, size_t first);
  // Computes logits of rows that are ready for the head.
  void head(Worker& worker, const Rows& rows);
  // Samples all rows. `forward` has already computed the logits of the first ones.
  void sample(Worker& worker, const Step& step);

  bool projects() const { return plan_.embedding.size != plan_.hidden_size; }
  size_t row_width() const { return streams_ ? streams_->width() : plan_.hidden_size; }
  size_t per_layer_width() const { return size_t(context_.per_layer.layers) * context_.per_layer.size; }
  float* hidden() const { return workspace_.rows(hidden_); }
  float* embedded() const { return streams_ ? workspace_.rows(embedded_) : hidden(); }
  float* read() const { return reinterpret_cast<float*>(read_.data()); }
  float* logits_row(size_t row) const { return reinterpret_cast<float*>(logits_.data()) + row * plan_.vocab_size; }

  const DecoderPlan plan_;
  const Kernels& kernels_;
  const ExecutorShape shape_;
  std::shared_ptr<ThreadPool> pool_;
  Weights weights_;
  std::atomic<bool> loading_stopped_ = false;
  // Its rows are tokens, or rows that want logits: at most max_num_seqs of these at a time. A step that wants more
  // logits computes and samples them in several turns.
  Workspace workspace_;
  StepAdapters adapters_;
  InputCapture capture_;
  Gemms gemms_;
  AttentionState attention_;
  StateSlots states_;
  Profile profile_;
  Context context_;
  const Sampler sampler_;

  Linear embed_, positions_, project_in_, project_out_, untied_head_;
  Linear per_layer_, per_layer_projection_;  // with per-layer embeddings
  Norm embedding_norm_, final_norm_, per_layer_norm_;
  std::optional<Streams> streams_;
  std::deque<ResidualBlock> residuals_;  // of all layers, in order
  // The last residual block that keeps something of every token, and its layer; -1: none. What is behind it is needed
  // only of the rows that are read.
  int last_keeping_ = -1, last_keeping_layer_ = -1;
  std::unique_ptr<DraftHead> draft_head_;  // or null

  Buffer<float> hidden_;     // [T, hidden]: the residual stream; with several streams, all in one row
  Buffer<float> embedded_;   // [T, hidden], with several streams: the row before widening and after narrowing
  Buffer<float> projected_;  // [T, embedding size], for models that project their embedding
  Arena logits_;             // [max_num_seqs, vocab] float
  Arena read_;               // [max_num_seqs, as `hidden_`] float: the rows that are read

  // Of the current step, if only some rows are read: their tokens, and the place of each of the step's logits_rows there.
  bool reads_some_ = false;
  std::vector<int32_t> read_rows_, read_places_;
};

}  // namespace tidewheel
