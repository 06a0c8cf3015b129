// What recurrent mixers have in common: how the work on a step's sequences is divided, and a convolution with its state.
#pragma once

#include <algorithm>

#include "model/mixers/mixer.h"

namespace tidewheel {

// The tokens of one sequence in a step, and where its state is.
struct SequenceTokens {
  int begin, count, slot;
  bool is_first;  // it begins here: what its slot holds is of another sequence
};

inline SequenceTokens sequence_tokens(const Step& step, int sequence) {
  const int begin = step.query_start[sequence];
  return {begin, step.query_start[sequence + 1] - begin, step.state_slots[sequence], step.positions[begin] == 0};
}

// Calls body(tokens, part) for each sequence and each of `parts`, with a barrier behind them. Parts of a layer do not
// depend on each other: who computes which cannot show in the result.
template <typename Body>
void share_parts(Worker& worker, const Step& step, int parts, Body&& body) {
  const int64_t sequences = static_cast<int64_t>(step.context_len.size());
  worker.share(sequences * parts, 1, [&](int64_t i, int64_t) {
    body(sequence_tokens(step, static_cast<int>(i / parts)), static_cast<int>(i % parts));
  });
}

// A causal depthwise convolution over the channels [0, size) of rows.
class Convolution {
 public:
  // `name` + ".weight" is [taps, size], flat; `name` + ".bias" is [size].
  Convolution(const std::string& name, int size, int taps, bool bias, bool silu, Context& context)
      : context_(context), size_(size), taps_(taps), silu_(silu) {
    if (taps < 1 || taps > kMaxConvTaps) {
      fail("a convolution may be over 1 to " + std::to_string(kMaxConvTaps) + " tokens, not " + std::to_string(taps));
    }
    context.weights.add_vector(name + ".weight", weight_, taps * size);
    if (bias) context.weights.add_vector(name + ".bias", bias_, size);
    state_ = context.states.add(size_t(taps - 1) * size);
  }
  Convolution(const Convolution&) = delete;
  Convolution& operator=(const Convolution&) = delete;

  // Of some of the channels. `x` is the first token's row from the first channel on; gates are as in ConvolveArgs.
  void run(const SequenceTokens& tokens, Range channels, float* x, size_t stride, const float* input_gate = nullptr,
           const float* output_gate = nullptr) const {
    float* const state = context_.states.at(tokens.slot, state_) + channels.begin;
    if (tokens.is_first) {
      for (int tap = 0; tap + 1 < taps_; ++tap) std::fill_n(state + size_t(tap) * size_, channels.size(), 0.0f);
    }
    context_.kernels.convolve({x, stride, tokens.count, channels.size(), taps_, weight_ + channels.begin,
                               bias_ ? bias_ + channels.begin : nullptr, size_t(size_), state, silu_, input_gate,
                               output_gate});
  }

 private:
  const Context& context_;
  const int size_, taps_;
  const bool silu_;
  float* weight_ = nullptr;
  float* bias_ = nullptr;
  size_t state_ = 0;  // [taps - 1, size] of a slot
};

}  // namespace tidewheel
