// What recurrent mixers have in common: how the work on sequences is divided, and a convolution and a linear recurrence
// with their states. Draft tokens change a copy of a state, which is then discarded: see StateSlots.
#pragma once

#include <algorithm>
#include <cmath>

#include "model/mixers/mixer.h"

namespace tidewheel {

// Calls body(tokens, part) for each of `sequences` and each of `parts`, and ends with a barrier. Parts of a layer do
// not depend on each other, so the result does not depend on which worker computes which part.
template <typename Body>
void share_parts(Worker& worker, std::span<const SequenceTokens> sequences, int parts, Body&& body) {
  worker.share(static_cast<int64_t>(sequences.size()) * parts, 1,
               [&](int64_t i, int64_t) { body(sequences[i / parts], static_cast<int>(i % parts)); });
}

// Of the rows of all tokens, those whose results a mixer with this input computes.
inline Rows results_of(const Step& step, const Rows& input, const float* rows, size_t stride) {
  if (!input.selects) return {rows, stride, input.count, nullptr, {}, input.turn};
  return {rows, stride, static_cast<int>(step.read_rows.size()), step.read_rows.data(), {}, Rows::kRead};
}

constexpr int kPartChannels = 128;  // channels that a worker convolves at a time

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Rows of consecutive tokens.
struct TokenRows {
  float* first;
  size_t stride;

  float* operator[](int token) const { return first + token * stride; }
  TokenRows from(int token, int column = 0) const { return {first + token * stride + column, stride}; }
};

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
    log_ = context.states.add_to_log(size);
    context.workspace.need_scratch(size_t(taps - 1) * size * sizeof(float));
  }
  Convolution(const Convolution&) = delete;
  Convolution& operator=(const Convolution&) = delete;

  // The rows of a slot's log, [draft tokens, size]: the convolution's inputs, multiplied by input gates.
  TokenRows log(int slot) const { return {context_.states.log_at(slot, log_), context_.states.log_stride()}; }

  // Convolves some of the channels. `x` has the tokens' rows, starting at the first of these channels. Gates are as in
  // ConvolveArgs.
  void run(Worker& worker, const SequenceTokens& tokens, Range channels, TokenRows x, const float* input_gate = nullptr,
           const float* output_gate = nullptr) const {
    float* const state = context_.states.at(tokens.slot, state_) + channels.begin;
    if (tokens.is_first) {
      for (int tap = 0; tap + 1 < taps_; ++tap) std::fill_n(state + size_t(tap) * size_, channels.size(), 0.0f);
    }
    const int sure = tokens.count - tokens.draft_tokens;
    convolve(sure, channels, x, state, input_gate, output_gate);
    if (!tokens.draft_tokens) return;
    x = x.from(sure);
    if (input_gate) input_gate += sure * x.stride;
    if (output_gate) output_gate += sure * x.stride;
    const TokenRows logged = log(tokens.slot).from(0, channels.begin);
    for (int t = 0; t < tokens.draft_tokens; ++t) {
      for (int i = 0; i < channels.size(); ++i) {
        logged[t][i] = input_gate ? x[t][i] * input_gate[t * x.stride + i] : x[t][i];
      }
    }
    float* const kept = reinterpret_cast<float*>(context_.workspace.scratch(worker));
    copy_state(state, size_, kept, channels.size(), channels.size());
    convolve(tokens.draft_tokens, channels, x, state, input_gate, output_gate);
    copy_state(kept, channels.size(), state, size_, channels.size());
  }

 private:
  void convolve(int count, Range channels, TokenRows x, float* state, const float* input_gate, const float* output_gate) const {
    context_.kernels.convolve({x.first, x.stride, count, channels.size(), taps_, weight_ + channels.begin,
                               bias_ ? bias_ + channels.begin : nullptr, size_t(size_), state, silu_, input_gate,
                               output_gate});
  }
  void copy_state(const float* from, int from_stride, float* to, int to_stride, int channels) const {
    for (int tap = 0; tap + 1 < taps_; ++tap) {
      std::copy_n(from + size_t(tap) * from_stride, channels, to + size_t(tap) * to_stride);
    }
  }

  const Context& context_;
  const int size_, taps_;
  const bool silu_;
  float* weight_ = nullptr;
  float* bias_ = nullptr;
  size_t state_ = 0;  // [taps - 1, size] in a slot
  size_t log_ = 0;    // [size]
};

// The states of all heads of a linear recurrence, and the log of its gates. Keys and values are in the convolution's
// log.
class Recurrence {
 public:
  // `gates` is the number of gate values in a token's log.
  Recurrence(int heads, int key_dim, int value_dim, int gates, Context& context)
      : context_(context), floats_(recurrence_state_floats(key_dim, value_dim)), state_(context.states.add(heads * floats_)),
        log_(context.states.add_to_log(gates)) {
    context.workspace.need_scratch(floats_ * sizeof(float));
  }

  // The rows of a slot's log, [draft tokens, gates].
  TokenRows log(int slot) const { return {context_.states.log_at(slot, log_), context_.states.log_stride()}; }

  // Runs all tokens of a sequence. `args` are for its first token; its number of tokens and its state are ignored.
  void run(Worker& worker, const SequenceTokens& tokens, int head, RecurrenceArgs args) const {
    float* const state = context_.states.at(tokens.slot, state_) + head * floats_;
    if (tokens.is_first) std::fill_n(state, floats_, 0.0f);
    args.num_tokens = tokens.count - tokens.draft_tokens;
    args.state = state;
    context_.kernels.recur(args);
    if (!tokens.draft_tokens) return;
    const size_t rows = args.num_tokens * args.stride, gates = args.num_tokens * args.gate_stride;
    args.q += rows, args.k += rows, args.v += rows, args.decay += gates, args.beta += gates;
    args.num_tokens = tokens.draft_tokens;
    args.state = reinterpret_cast<float*>(context_.workspace.scratch(worker));
    std::copy_n(state, floats_, args.state);
    context_.kernels.recur(args);
  }

 private:
  const Context& context_;
  const size_t floats_;  // per head
  const size_t state_, log_;
};

}  // namespace tidewheel
