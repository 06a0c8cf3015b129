// Products of rows with packed weights, computed by the whole team.
#pragma once

#include <map>
#include <string>

#include "model/input_capture.h"
#include "model/step_adapters.h"
#include "model/weights/linear.h"
#include "model/workspace.h"
#include "runtime/arena.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

// Rows of floats: x, or norm(x).
struct Rows {
  const float* x;
  size_t stride;
  int count;
  const int32_t* gather = nullptr;  // which of x's rows; null: the first ones
  Norm norm = {};
  // The turn of logits that these rows belong to, or one of the numbers below.
  int turn = kTokens;
  // Of a mixer's input, which has all tokens' rows: only the results of Step::read_rows are wanted.
  bool selects = false;

  static constexpr int kTokens = -1;  // they are the step's tokens
  static constexpr int kRead = -2;    // they are Step::read_rows

  const float* row(int64_t index) const { return x + (gather ? gather[index] : index) * stride; }
};

// Where results go, and what is applied to them: see GemmArgs.
struct Output {
  Epilogue epilogue;
  float* y;
  size_t stride;
  float scale = 1;
  Activation activation = Activation::kSilu;
  float softcap = 0;
};

// How a matrix is divided among heads. Each head has its own columns, which begin with a new panel, and its own inputs.
struct HeadLayout {
  int heads, columns;         // columns per head
  size_t input_step, output_step;  // distances between heads in a row of inputs, and of outputs

  int panels() const { return (columns + kPanel - 1) / kPanel; }
};

class Gemms {
 public:
  Gemms(const Kernels& kernels, Workspace& workspace, StepAdapters& adapters, InputCapture& capture)
      : kernels_(kernels), workspace_(workspace), adapters_(adapters), capture_(capture) {}

  // Allocates memory for the inputs of any of these matrices. Throws std::bad_alloc.
  void allocate(const std::map<const Linear*, std::string>& matrices);
  // Gives that memory back until it is used again.
  void forget() { packed_.forget(); }
  size_t bytes() const { return packed_.bytes(); }

  // Computes the product, including the updates of the step's adapters. Ends with a barrier. The output must not
  // overlap the rows. A matrix in several parts can be stored or added, but not activated.
  void run(Worker& worker, const Linear& linear, const Rows& rows, const Output& output) const;

  // The same, head by head: rows.x and output.y belong to the first head. Can only store. Needs `heads_scratch_bytes`.
  void run_heads(Worker& worker, const Linear& linear, const HeadLayout& layout, const Rows& rows, const Output& output) const;
  size_t heads_scratch_bytes(const Linear& linear) const;

 private:
  // The prepared inputs of a product.
  struct Inputs {
    const char* packed;
    const LowRankRow* low_rank;
  };

  void capture(Worker& worker, const Linear& linear, const Rows& rows) const;
  // Packs rows, and computes their products with the adapters' A matrices.
  Inputs prepare(Worker& worker, const Linear& linear, const Rows& rows) const;
  void multiply(Worker& worker, const Linear& part, const Inputs& inputs, int num_rows, const Output& output) const;
  void pack_in_order(const Linear& linear, const PackInputsArgs& args, char* room, int begin, int end) const;
  int heads_block_rows(const Linear& linear) const;
  size_t room_for_row() const { return round_up((max_inputs_ + kRowGroup) * sizeof(float), 64); }

  const Kernels& kernels_;
  Workspace& workspace_;
  StepAdapters& adapters_;
  InputCapture& capture_;
  Arena packed_;  // inputs of one GEMM, packed by the whole team
  int max_inputs_ = 0;
  size_t row_scratch_bytes_ = 0;
};

}  // namespace tidewheel
