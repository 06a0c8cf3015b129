// Runs the parts of a tower on rows: its projections and its layers, each for a piece of an image's rows at a time.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/context.h"
#include "model/mixers/attention.h"
#include "model/residual_block.h"
#include "model/step.h"
#include "model/tower_plan.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

struct TowerShape {
  int max_rows = 0;    // of a segment
  int piece_rows = 0;  // of a call
  int max_lora_rank = 0;  // of adapters; 0: there are none
};

// Rows of a layer that are computed together. A segment's rows see nothing but rows of their segment that are seen.
// Either all segments are whole, or there is one, of which the piece has the rows from `first` on.
struct TowerPiece {
  std::span<const int32_t> query_start;     // [S + 1]: the rows of each segment here
  std::span<const int32_t> lengths;         // [S]: of the whole segments
  int first = 0;
  std::span<const int32_t> rope_positions;  // [axes, rows]; empty without rope
  std::span<const int32_t> seen = {};       // [S]: how many rows of each segment are seen, from its first on; empty: all
  // Of the last layer of a `run`, only these rows are computed, in ascending order; empty: all.
  std::span<const int32_t> read = {};
  std::span<const int32_t> adapters = {};   // [S]: the numbers of the segments' adapters, -1: none; empty: none has one
};

class Tower {
 public:
  // Uses the threads of `pool`, which may be an executor's. The two must not run at the same time. Throws std::invalid_argument for a plan
  // that the kernels cannot run, and std::bad_alloc if memory runs out.
  Tower(TowerPlan plan, const Kernels& kernels, CacheType cache_type, TowerShape shape, std::shared_ptr<ThreadPool> pool);

  // See Executor.
  bool set_weights(std::span<const Source> sources) {
    const Pinned pinned = pool_->pinned_caller();
    return weights_.set(sources, *pool_, loading_stopped_);
  }
  void check_complete() const { weights_.check_complete(); }
  bool read_weights(int file, int64_t offset, uint64_t checksum) {
    const Pinned pinned = pool_->pinned_caller();
    return weights_.read_packed(file, offset, checksum, *pool_, loading_stopped_);
  }
  void stop_loading() { loading_stopped_ = true; }
  // See Executor.
  bool use_threads(std::shared_ptr<ThreadPool> pool);
  const Weights& weights() const { return weights_; }

  // See Executor.
  std::shared_ptr<const Adapter> pack_adapter(DType type, const AdapterContent& content) const {
    return std::make_shared<const Adapter>(weights_, type, content, adapters_.values_limit());
  }
  void set_adapter(int number, std::shared_ptr<const Adapter> adapter) { adapters_.set(number, std::move(adapter)); }

  // All of these throw std::invalid_argument for arrays that do not fit, before anything is changed.
  //
  // The projection of `rows` [T, inputs] to `out` [T, outputs].
  void project(const std::string& name, std::span<const float> rows, std::span<float> out);
  // The layers of `rows` [T, hidden] from `layer` to `end`, in place. All segments of the piece must be whole. Rows that
  // are not read are left as they were before the last layer.
  void run(int layer, int end, const TowerPiece& piece, std::span<float> rows);
  // For a segment that is longer than a piece: `remember` all of its rows, piece by piece, then `finish` them. Between
  // the two, no other layer may run. Neither computes anything twice.
  void remember(int layer, const TowerPiece& piece, std::span<const float> rows);
  void finish(int layer, const TowerPiece& piece, std::span<float> rows);

  // Cross attention of rows [T, q k v], each as wide as the heads together. First all keys and values are remembered,
  // piece by piece: of `length` rows those from `first` on. Then other rows' q attend to them: `out` is [T, q]. Between
  // the two, nothing else may run.
  void remember_keys(const std::string& name, int length, int first, std::span<const float> rows);
  void attend(const std::string& name, int length, std::span<const float> rows, std::span<float> out);

  // Gives memory that only these calls need back to the system, until the next one.
  void release_scratch();

  // How many KV blocks the segments of a piece may take together. A block is of one segment.
  int num_blocks() const { return num_blocks_; }
  size_t weight_bytes() const { return weights_.packed().bytes(); }
  // What a call may need beside the weights.
  size_t scratch_bytes() const;
  const Kernels& kernels() const { return kernels_; }

 private:
  struct Projection {
    ProjectionPlan plan;
    Linear linear;
    Norm norm;
    Buffer<float> input, output;
  };

  void add_projection(const std::string& name, const ProjectionPlan& plan);
  void add_layer(const std::vector<ResidualBlockPlan>& layer, const std::string& prefix);
  // Looks at a residual block of the last layer, which may be the first of it, or beside others.
  void add_part(const ResidualBlockPlan& residual, bool is_first);
  void add_cross_attention(const std::string& name, const CrossAttentionPlan& plan);
  size_t check(int layer, const TowerPiece& piece, size_t num_floats, bool whole) const;
  // The piece as a step of layers with this reach, whose arrays are members.
  Step step_of(const TowerPiece& piece, size_t num_rows, int reach);
  void compute_ropes(Worker& worker, const Step& step) const;
  void run_blocks(int layer, int end, const Step& step, float* rows);
  // A layer of the rows that are read, in place.
  void run_read(Worker& worker, int layer, const Step& step, float* rows);

  const TowerPlan plan_;
  const Kernels& kernels_;
  const TowerShape shape_;
  const int num_blocks_;
  std::shared_ptr<ThreadPool> pool_;
  Weights weights_;
  std::atomic<bool> loading_stopped_ = false;
  Workspace workspace_;
  StepAdapters adapters_;
  InputCapture capture_;
  Gemms gemms_;
  AttentionState attention_;
  StateSlots states_;      // there are none
  Profile profile_;
  Context context_;

  struct CrossAttention {
    int width;  // of all heads
    std::unique_ptr<const Attention> attention;
  };

  // The cross attention, and how many rows there are.
  std::pair<const CrossAttention&, int> cross_attention(const std::string& name, int length, size_t num_floats) const;

  std::map<std::string, Projection> projections_;
  std::map<std::string, CrossAttention> cross_attentions_;
  std::vector<std::deque<ResidualBlock>> layers_;
  Arena read_;  // [piece rows, hidden] float: the rows that are read
  std::vector<int> reaches_;  // of each layer: a row sees itself and what is less far ahead; 0: to its segment's end

  // The arrays of a step.
  std::vector<int32_t> token_ids_, positions_, visible_until_, block_tables_;
};

}  // namespace tidewheel
