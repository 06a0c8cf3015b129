// Computes draft tokens in consecutive steps, each of which runs the token that the previous step sampled. They come
// from a small model, or from a model's own layer for predicting tokens.
#pragma once

#include <cstdint>
#include <span>

#include "model/executor.h"

namespace tidewheel {

struct DraftTokens {
  std::span<const int32_t> counts;  // [S], the maximum of draft tokens for each sequence; 0: only its tokens are run
  // A greedy sequence gets draft tokens only while the probability that all of them are accepted is at least this,
  // judged by the probabilities that the model gives them. A sequence that samples randomly gets one more. 0: no limit.
  float min_probability = 0;
  std::span<int32_t> tokens;        // [S, stride]: the draft tokens, then -1
  size_t stride = 0;
};

// Runs the tokens of `known`. Its rows are the last tokens of the sequences that want draft tokens, in their order.
// Then samples draft tokens one after the other with each row's own parameters, each at its own position. All but the
// last one of each sequence are written to the cache. Biases are those of the first draft token, and penalties count
// the draft tokens before. Masks apply only to the first draft token, and must already be written.
//
// A layer that predicts tokens takes only the last token of each sequence. If it does not know what the model left of
// the token before, there is no draft token. Its sequences may have adapters.
//
// Throws std::invalid_argument for arrays that do not fit, or if a sequence has no room for its draft tokens.
void draft(Executor& executor, const Step& known, const DraftTokens& wanted);

}  // namespace tidewheel
