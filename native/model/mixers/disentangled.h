// What positions add to attention's scores by what tokens contain: DeBERTa's disentangled attention,
// https://arxiv.org/abs/2006.03654.
#pragma once

#include <string>
#include <vector>

#include "model/context.h"
#include "model/step.h"

namespace tidewheel {

// Each head's queries and keys are multiplied with all rows of its tables once. The kernels then take the products that
// count for each pair. The products of a segment's rows are kept while its attention is computed.
class Disentangled {
 public:
  // The names of its weights begin with `prefix`: "pos_k" for queries, and "pos_q" for keys.
  Disentangled(const AttentionPlan& plan, const std::string& prefix, Context& context);

  // Computes the products of a step's tokens. `qkv` are their rows [T, q k ...]. Ends with a barrier.
  void compute(Worker& worker, const Step& step, const Rows& qkv) const;
  // For the kernels: of a task's queries, and of all keys of their sequence.
  PositionScores scores(const Step& step, const AttentionTask& task, int head) const;

 private:
  // [heads, num_rows] products of a query, then as many of a key.
  float* row(int64_t number) const {
    return reinterpret_cast<float*>(context_.attention.positions.data()) + number * context_.attention.position_floats;
  }

  const Context& context_;
  const DisentangledPlan plan_;
  const int heads_, head_dim_;
  std::vector<int32_t> rows_;  // as kernels read them
  Linear of_queries_, of_keys_;
};

}  // namespace tidewheel
