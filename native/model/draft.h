// Draft tokens of the tokens that follow: steps one after the other, each of which runs what the one before has
// sampled. They are those of a small model; or, of a model that has a layer for it, that layer's predictions.
#pragma once

#include <cstdint>
#include <span>

#include "model/executor.h"

namespace tidewheel {

struct DraftTokens {
  std::span<const int32_t> counts;  // [S], most draft tokens of each sequence; 0: its tokens are only computed
  // A greedy sequence gets only draft tokens that are, all together, accepted with this probability, by what the model
  // thinks of each. One that draws its tokens gets one more. 0: both get as many as they want.
  float min_probability = 0;
  std::span<int32_t> tokens;        // [S, stride]: the draft tokens, then -1
  size_t stride = 0;
};

// Runs the tokens of `known`, whose rows are the last tokens of the sequences that want draft tokens, in their order.
// Then samples one draft token after the other with the row's own parameters, at the position of each. They are written
// to the cache, but for the last one of each sequence. Biases are those of the first draft token, and penalties count
// the draft tokens before. Masks are for the first draft token alone; they must be written. A layer that predicts takes
// the last tokens alone, one of each sequence. Where it does not know what the model left of the token before, there is
// no draft token. Its sequences may have adapters. Throws std::invalid_argument for arrays that do not fit, or if a
// sequence has no room for its draft tokens.
void draft(Executor& executor, const Step& known, const DraftTokens& wanted);

}  // namespace tidewheel
