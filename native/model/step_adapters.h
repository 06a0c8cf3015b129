// The updates that the adapters of a step's sequences add to its products.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "model/adapter.h"
#include "model/workspace.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

struct Rows;
struct Output;

// Rows of a mixture of experts that one expert computes.
struct ExpertRows {
  const Linear *up, *down;
  int begin, count;        // among the rows of all experts
  const int32_t* tokens;   // [count]: rows of the mixture's input; null: all, in order
  const float* weights;    // [count], factors for the input of `up`; null: none
  const float* activated;  // [count, stride], the input of `down`
  size_t stride;
};

class StepAdapters {
  static constexpr int kBlockRows = 4;

  // Rows with the same adapter and the same expert. Its A is read once for all of them.
  struct Block {
    const Adapter* adapter = nullptr;
    int rows[kBlockRows] = {};
    int count = 0;
    int expert = 0;  // of a mixture: index in `experts_`
  };

  // The rows of a product, grouped by adapter.
  struct Assignment {
    std::vector<Block> blocks;
    std::vector<LowRankRow> rows;
    int own_heads = 0;

    void clear() { blocks.clear(), rows.clear(), own_heads = 0; }
  };

 public:
  StepAdapters(const Kernels& kernels, Workspace& workspace) : kernels_(kernels), workspace_(workspace) {}

  // Called before `allocate`: a mixture has `experts` experts, and `rows_per_token` rows for each token.
  void need_experts(int experts, int rows_per_token) {
    max_experts_ = std::max(max_experts_, experts);
    rows_per_token_ = std::max(rows_per_token_, rows_per_token);
  }

  // Allocates memory for adapters of these matrices and of an embedding of this size, with ranks up to `max_rank`; 0:
  // no adapters. Throws std::bad_alloc.
  void allocate(const std::map<const Linear*, std::string>& matrices, int embedding_size, int max_rank, int workers);
  int values_limit() const { return max_values_; }

  // May be called from any thread: sets the adapter that sequences refer to by this number from the next step on. Null
  // removes it.
  void set(int number, std::shared_ptr<const Adapter> adapter);

  // Called before a step. `numbers` has the sequences' adapter numbers, -1 for none; empty if no sequence has one.
  // Logits are computed in turns of at most `room` rows. `read_rows` are those of Step. Throws std::invalid_argument for
  // an unknown number.
  void begin(std::span<const int32_t> numbers, std::span<const int32_t> query_start, std::span<const int32_t> logits_rows,
             size_t room, std::span<const int32_t> read_rows = {});

  // The adapter of one of the step's tokens; null if it has none.
  const Adapter* of_token(size_t token) const { return used_.empty() ? nullptr : of_token_[token]; }

  // What has to be computed of h before a product: `pieces` calls of `project`, in any order.
  struct Projection {
    const LowRankRow* rows = nullptr;  // for `GemmArgs::low_rank`; null: nothing is added to this matrix
    int64_t pieces = 0;
    Assignment* assigned = nullptr;
    int chunk = 1, chunks = 1;  // LoRA panels of h per piece, and pieces per block
  };
  Projection projection(const Linear& linear, const Rows& rows);
  void project(Worker& worker, const Projection& projection, int64_t piece, const Linear& linear, const Rows& rows);

  // Whether an adapter of the step changes one of the matrices from `first` to `last`, in the order of Linear::id.
  bool changes(const Linear& first, const Linear& last) const;
  // Set the rows of a mixture, expert by expert, when they are known: of all tokens, or of those that are read. One
  // worker makes these calls, and the others wait for it.
  void begin_experts(bool of_read) {
    experts_.clear(), mixture_.clear(), max_up_ = max_down_ = 0;
    of_mixture_ = of_read ? &of_read_ : &of_token_;
  }
  void add_expert(const ExpertRows& rows);
  // Compute h of all rows of the mixture, for products with `up`, which reads rows of x, and with `down`. End with a
  // barrier.
  const LowRankRow* project_up(Worker& worker, const float* x, size_t stride);
  const LowRankRow* project_down(Worker& worker);

  // The number of rows in a turn of logits whose adapters have a head of their own.
  int rows_with_own_head(int turn) const { return used_.empty() ? 0 : turns_[turn].own_heads; }
  // Computes the logits of those rows. Ends with a barrier.
  void own_logits(Worker& worker, const Linear& head, const Rows& rows, const Output& output);

 private:
  void assign(std::span<const Adapter* const> adapters, Assignment& to) const;
  // The projection for all matrices whose h has at most `max_values` values.
  Projection projection(Assignment& assigned, int max_values) const;
  // Packs the block's rows of x for its adapter, normalized if there is a norm.
  void pack_rows(Worker& worker, const Block& block, int k, const Rows& rows, const void** packed) const;
  // Packs a row x as row r of a block.
  const void* pack_row(Worker& worker, const Block& block, int r, const float* x, int k) const;
  float* row_scratch(Worker& worker) const;  // memory for one row of x
  // Computes a piece of h. `pack(block, packed)` packs the block's rows of x.
  template <typename Pack>
  void project_piece(const Projection& projection, int64_t piece, const Linear& linear, Pack&& pack);
  // Computes h of a mixture's rows. `row_of(expert, row)` returns a row of x. Ends with a barrier.
  template <typename LinearOf, typename RowOf>
  const LowRankRow* project_mixture(Worker& worker, int max_values, LinearOf&& linear_of, RowOf&& row_of);
  char* h(int row) const { return values_.data() + row * stride_ * sizeof(float); }

  const Kernels& kernels_;
  Workspace& workspace_;
  int max_values_ = 0, workers_ = 1;
  int max_experts_ = 0, rows_per_token_ = 1;
  size_t stride_ = 0, scratch_stride_ = 0;  // floats
  Arena values_;  // [rows, stride]: h of one matrix, or of a mixture's matrices of one kind
  std::vector<std::shared_ptr<const Adapter>> used_;  // in this step; if empty, the members below are out of date
  std::vector<const Adapter*> of_token_, of_logits_, of_read_;
  Assignment tokens_, read_;
  std::vector<Assignment> turns_;  // of logits
  // The members below belong to a mixture. They have room for every step.
  std::vector<ExpertRows> experts_;
  Assignment mixture_;
  const std::vector<const Adapter*>* of_mixture_ = &of_token_;
  int max_up_ = 0, max_down_ = 0;  // values of h
  std::mutex mutex_;  // guards `adapters_`
  std::map<int, std::shared_ptr<const Adapter>> adapters_;
};

}  // namespace tidewheel
