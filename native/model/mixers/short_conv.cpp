#include "model/mixers/short_conv.h"

namespace tidewheel {
ShortConv::ShortConv(const ShortConvPlan& plan, const std::string& prefix, Context& context)
    : context_(context), plan_(plan),
      convolution_(prefix + "conv_taps", plan.size, plan.conv_kernel, plan.bias, false, context) {
  const int size = plan.size, hidden = context.hidden_size;
  require(size > 0, "a convolution needs at least one channel");
  require(plan.conv_kernel > 1, "a short convolution over one token has no state to keep");
  Weights& weights = context.weights;
  weights.add_linear(prefix + "conv_b", in_, size, hidden, plan.bias, {3 * size, size, 0, 0});
  weights.add_linear(prefix + "conv_c", in_, size, hidden, plan.bias, {3 * size, size, 0, size});
  weights.add_linear(prefix + "conv_x", in_, size, hidden, plan.bias, {3 * size, size, 0, 2 * size});
  weights.add_linear(prefix + "conv_out", out_, hidden, size, plan.bias);
  rows_ = context.workspace.add<float>(round_up(3 * size, 16));
}

void ShortConv::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  const int size = plan_.size;
  float* const rows = context_.workspace.rows(rows_);
  context_.gemms.run(worker, in_, input, {Epilogue::kStore, rows, rows_.stride});
  context_.profile.end(worker, Phase::kQkv);
  const int parts = (size + kPartChannels - 1) / kPartChannels;
  const auto convolve = [&](const SequenceTokens& tokens, int part) {
    const Range channels{part * kPartChannels, std::min((part + 1) * kPartChannels, size)};
    if (tokens.logged) {
      convolution_.run(worker, tokens, channels, convolution_.log(tokens.slot).from(0, channels.begin));
      return;
    }
    float* const b = rows + tokens.begin * rows_.stride + channels.begin;
    convolution_.run(worker, tokens, channels, {b + 2 * size, rows_.stride}, b, b + size);
  };
  if (!context_.states.replayed().empty()) share_parts(worker, context_.states.replayed(), parts, convolve);
  share_parts(worker, context_.states.running(), parts, convolve);
  context_.profile.end(worker, Phase::kConvolution);
  const Rows results = results_of(step, input, rows + 2 * size, rows_.stride);
  if (results.count == 0) return;
  context_.gemms.run(worker, out_, results, output);
  context_.profile.end(worker, Phase::kOut);
}

}  // namespace tidewheel
