// Routed experts, and a shared expert that computes every token.
#pragma once

#include <deque>
#include <memory>

#include "model/mixers/mixer.h"
#include "model/routing.h"

namespace tidewheel {

// Tokens are gathered by expert. So a step reads each expert's weights once, and only those of chosen experts. All
// products of one kind are divided among the workers together. Experts are added to an output in ascending order, and
// the shared expert last, independent of the other tokens in the batch.
class Experts final : public Mixer {
 public:
  Experts(const ExpertsPlan& plan, const std::string& prefix, Context& context);
  void run(Worker& worker, const Step& step, const Rows& input, const Output& output) const override;

 private:
  struct Expert {
    Linear up;  // gate and up, interleaved by 16 columns, or up alone
    Linear down;
    int size = 0;  // the intermediate size
  };
  // The packed inputs of one of the two products.
  struct Packing {
    size_t routed_bytes = 0, shared_bytes = 0;  // per row
    // Up to this number of tokens, every worker packs all inputs for itself. That takes less time than a barrier.
    int max_alone = 0;

    size_t token_bytes(int per_token) const { return per_token * routed_bytes + shared_bytes; }
  };
  // The rows that one expert computes.
  struct Block {
    const Expert* expert;
    int begin, count;       // among the rows of all experts
    const int32_t* tokens;  // [count]; null: all, in order
    const float* weights;   // [count]
    float* activated;       // [count, stride]
    size_t stride;
    char* packed;
  };

  void add_expert(const std::string& prefix, Expert& expert, int size, bool bias, bool unpacked);
  Packing packing(Linear Expert::*linear, int routed_inputs, int shared_inputs) const;
  // A panel that the worker's group owns, packed for its GEMM.
  const char* panel(const Worker& worker, const Linear& linear, int index) const;
  static size_t activated_stride(int size) { return round_up(size, kPanel); }

  void copy_inputs(Worker& worker, const Rows& input, const Output& output) const;
  void compute_logits(Worker& worker, Rows rows) const;
  // If `adapted`, also passes the experts' rows to the step's adapters.
  void choose(Worker& worker, const Rows& input, bool adapted) const;
  void assign_adapters(const Worker& worker, const Rows& input) const;
  void route_token(int token, int tokens) const;
  // The number of a step's blocks. They are ordered as their results are added.
  int num_blocks() const;
  Block block(const Worker& worker, const Packing& packing, int index, int tokens) const;

  void capture_up(Worker& worker, int tokens) const;
  void capture_down(Worker& worker, int tokens) const;
  template <typename PackRows>
  void pack(Worker& worker, const Packing& packing, int tokens, PackRows&& pack_rows) const;
  // The inputs of row `row` of a block, which `out` has room for if they have to be weighed.
  const float* input_row(const Block& block, int row, float* out) const;
  template <typename Fill>
  void pack_tiles(Worker& worker, const Linear& linear, const Block& block, PackInputsArgs args, int begin, int end,
                  bool as_it_lies, Fill&& fill) const;
  void pack_input(Worker& worker, const Block& block, int begin, int end) const;
  void pack_activated(Worker& worker, const Block& block, int begin, int end) const;
  // `low_rank` has the adapters' updates to the rows of all experts; null: none.
  void multiply_up(Worker& worker, int tokens, const LowRankRow* low_rank) const;
  void multiply_down(Worker& worker, int tokens, const LowRankRow* low_rank, const Output& output) const;
  void add_down(Worker& worker, const Block& rows, int panel_begin, int panel_end, const LowRankRow* low_rank,
                const Output& output) const;

  float* inputs(int token) const { return context_.workspace.rows(inputs_) + token * inputs_.stride; }

  const Context& context_;
  const ExpertsPlan plan_;
  Linear router_;  // [experts], then the shared expert's gate
  float *correction_ = nullptr, *scales_ = nullptr;  // [experts], or null
  float* sum_bias_ = nullptr;                         // [hidden], or null
  Norm input_norm_, router_norm_;
  std::deque<Expert> experts_;
  std::unique_ptr<Expert> shared_;
  const std::unique_ptr<RowsByExpert> rows_;  // the current step's rows
  Packing up_packing_, down_packing_;
  size_t row_scratch_bytes_ = 0;
  size_t panel_scratch_ = 0;  // offset of the memory where a worker packs panels of unpacked matrices
  Buffer<float> inputs_;     // [T, hidden]
  Buffer<float> logits_;     // [T, experts and the shared expert's gate]
  Buffer<float> choice_;     // [T, experts + groups]
  Buffer<int32_t> chosen_;   // [T, per token]
  Buffer<float> weights_;    // [T, per token]
  Buffer<int32_t> token_of_; // [T x per token] sorted by expert
  Buffer<float> weight_of_;  // [T x per token], then the weights of the shared expert's rows [T]
  Buffer<float> activated_;  // [T x per token] of the routed experts, then [T] of the shared one
  Buffer<char> packed_;
};

}  // namespace tidewheel
