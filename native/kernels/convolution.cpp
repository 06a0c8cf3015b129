// Causal depthwise convolution of a sequence's tokens, and the gates that multiply rows.
#include <cstring>

#include "kernels/element.h"
#include "kernels/table.h"
#include "simd.h"

namespace tidewheel::TW_ISA {
namespace {

// Tokens that are convolved together, so that a tile of them stays in the L1 cache while all channels are computed.
constexpr int kTileTokens = 16;

TW_INLINE F sigmoid(F x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Loads the first `count` lanes; the others are 0.
TW_INLINE F load_first(const float* p, int count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}

TW_INLINE void store_first(float* p, F a, int count) {
  if (count >= kLanes) {
    store(p, a);
    return;
  }
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, count * sizeof(float));
}

// Convolves one vector of channels, from channel c on, over `tokens` tokens.
TW_INLINE void convolve_vector(const ConvolveArgs& args, int first_token, int tokens, int c) {
  const int count = args.channels - c, before = args.taps - 1;
  F weight[kMaxConvTaps], past[kMaxConvTaps];
  for (int j = 0; j < args.taps; ++j) weight[j] = load_first(args.weight + j * args.weight_stride + c, count);
  for (int j = 0; j < before; ++j) past[j] = load_first(args.state + j * args.weight_stride + c, count);
  const F bias = args.bias ? load_first(args.bias + c, count) : zero();
  for (int t = first_token; t < first_token + tokens; ++t) {
    const size_t at = t * args.stride + c;
    past[before] = load_first(args.x + at, count);
    if (args.input_gate) past[before] = mul(past[before], load_first(args.input_gate + at, count));
    F y = bias;
    for (int j = 0; j <= before; ++j) y = fma(past[j], weight[j], y);
    if (args.silu) y = mul(y, sigmoid(y));
    if (args.output_gate) y = mul(y, load_first(args.output_gate + at, count));
    store_first(args.x + at, y, count);
    for (int j = 0; j < before; ++j) past[j] = past[j + 1];
  }
  for (int j = 0; j < before; ++j) store_first(args.state + j * args.weight_stride + c, past[j], count);
}

}  // namespace

void convolve(const ConvolveArgs& args) {
  for (int t = 0; t < args.num_tokens; t += kTileTokens) {
    const int tokens = args.num_tokens - t < kTileTokens ? args.num_tokens - t : kTileTokens;
    for (int c = 0; c < args.channels; c += kLanes) convolve_vector(args, t, tokens, c);
  }
}

void multiply_gate(Gate gate, const float* by, int size, float* x) {
  for (int i = 0; i < size; i += kLanes) {
    const F g = load_first(by + i, size - i), s = sigmoid(g);
    store_first(x + i, mul(load_first(x + i, size - i), gate == Gate::kSilu ? mul(g, s) : s), size - i);
  }
}

}  // namespace tidewheel::TW_ISA
