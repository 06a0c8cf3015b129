// Guesses of the tokens that follow: steps one after the other, each of which runs what the one before has sampled. They
// are those of a small model; or, of a model that has a layer for it, that layer's predictions.
#pragma once

#include <cstdint>
#include <span>

#include "model/executor.h"

namespace tidewheel {

struct Guesses {
  std::span<const int32_t> counts;  // [S], most guesses of each sequence; 0: its tokens are only computed
  // A greedy sequence gets only guesses that are, all together, right with this probability, by what the model thinks of
  // each. One that draws its tokens gets one more. 0: both get as many as they want.
  float least_probability = 0;
  std::span<int32_t> tokens;        // [S, stride]: the guesses, then -1
  size_t stride = 0;
};

// Runs the tokens of `known`, whose rows are the last tokens of the sequences that want guesses, in their order. Then
// samples guess after guess with the row's own parameters, at the position of each. They are written to the cache, but
// for the last one of each sequence. Biases are those of the first guess, and penalties count the guesses before. Masks
// are for the first guess alone; they must be written.
// A layer that predicts takes the last tokens alone, one of each sequence. Where it does not know what the model left of
// the token before, there is no guess. Its sequences may have adapters.
// Throws std::invalid_argument for arrays that do not fit, or if a sequence has no room for its guesses.
void guess(Executor& executor, const Step& known, const Guesses& wanted);

}  // namespace tidewheel
