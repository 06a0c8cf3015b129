#include "model/mixers/alt_up.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tidewheel {
namespace {

constexpr int kMaxStreams = 16;
using Numbers = std::array<float, kMaxStreams>;

// For each row, the product of `matrix` [rows, count] with `numbers` [count].
void multiply(const float* matrix, int rows, int count, const float* numbers, float* out) {
  for (int row = 0; row < rows; ++row) {
    float sum = 0;
    for (int i = 0; i < count; ++i) sum += matrix[row * count + i] * numbers[i];
    out[row] = sum;
  }
}

}  // namespace

AltUp::AltUp(const AltUpPlan& plan, const std::string& prefix, Context& context) : context_(context), plan_(plan) {
  const int count = plan.streams, hidden = context.hidden_size;
  require(count >= 2 && count <= kMaxStreams && plan.active >= 0 && plan.active < count,
          "there must be 2 to 16 streams, of which one is active");
  require(plan.passive.size() == 1, "exactly one residual block must update the other streams");
  Weights& weights = context.weights;
  weights.add_linear(prefix + "alt_up.router", router_, count, hidden, false);
  weights.add_norm(prefix + "alt_up.norm", norm_, plan.norm, hidden);
  weights.add_vector(prefix + "alt_up.predict", predict_, count * count * count);
  weights.add_vector(prefix + "alt_up.correct", correct_, count * count);
  if (plan.scaled) weights.add_vector(prefix + "alt_up.scale", scale_, hidden);
  numbers_ = context.workspace.add<float>(kPanel);
  predicted_ = context.workspace.add<float>(hidden);
  active_ = context.workspace.add<float>(hidden);
  passive_input_ = context.workspace.add<float>(hidden);
  passive_ = context.workspace.add<float>(hidden);
  for (const ResidualBlockPlan& residual : plan.residuals) residuals_.emplace_back(residual, prefix, context);
  passive_block_.emplace_back(plan.passive[0], prefix, context);
}

void AltUp::run(Worker& worker, const Step& step, const Rows& input, const Output& output) const {
  require(input.norm.kind == NormKind::kNone && !input.gather, "streams are read as they are");
  const size_t hidden = context_.hidden_size;
  const int rows = input.count;
  route(worker, {input.x + plan_.active * hidden, input.stride, rows, nullptr, norm_, input.turn});
  predict(worker, input, output);
  float* active = context_.workspace.rows(active_);
  const Rows active_rows{active, hidden, rows, nullptr, {}, input.turn};
  for (const ResidualBlock& residual : residuals_) residual.run(worker, step, active_rows, active);
  route(worker, {active, hidden, rows, nullptr, norm_, input.turn});
  correct(worker, rows, output);
  const float* passive = context_.workspace.rows(passive_);
  const Rows passive_rows{context_.workspace.rows(passive_input_), hidden, rows, nullptr, {}, input.turn};
  passive_block_[0].run(worker, step, passive_rows, context_.workspace.rows(passive_));
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int j = 1; j < plan_.streams; ++j) {
        float* y = output.y + row * output.stride + j * hidden;
        for (size_t h = 0; h < hidden; ++h) y[h] += output.scale * passive[row * hidden + h];
      }
    }
  });
  context_.profile.end(worker, Phase::kNorm);
}

void AltUp::route(Worker& worker, const Rows& rows) const {
  Output output{Epilogue::kStore, context_.workspace.rows(numbers_), numbers_.stride};
  output.scale = 1.0f / static_cast<float>(context_.hidden_size);
  context_.gemms.run(worker, router_, rows, output);
}

void AltUp::predict(Worker& worker, const Rows& input, const Output& output) const {
  const int count = plan_.streams, hidden = context_.hidden_size;
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* numbers = context_.workspace.rows(numbers_) + row * numbers_.stride;
      for (int i = 0; i < count; ++i) numbers[i] = std::tanh(numbers[i]);
      std::array<float, kMaxStreams * kMaxStreams> factors;
      multiply(predict_, count * count, count, numbers, factors.data());
      const float* x = input.x + row * input.stride;
      float* y = output.y + row * output.stride;
      float* predicted = context_.workspace.rows(predicted_) + row * hidden;
      float* active = context_.workspace.rows(active_) + row * hidden;
      for (int h = 0; h < hidden; ++h) {
        Numbers old;  // the output may be the input
        for (int i = 0; i < count; ++i) old[i] = x[i * hidden + h];
        for (int j = 0; j < count; ++j) {
          float added = 0;
          for (int i = 0; i < count; ++i) added += factors[j * count + i] * old[i];
          if (j == plan_.active) predicted[h] = active[h] = old[j] + added;
          float& to = y[j * hidden + h];
          to = output.scale * added + (output.epilogue == Epilogue::kAdd ? to : 0.0f);
        }
      }
    }
  });
  context_.profile.end(worker, Phase::kNorm);
}

void AltUp::correct(Worker& worker, int rows, const Output& output) const {
  const int count = plan_.streams, hidden = context_.hidden_size;
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* numbers = context_.workspace.rows(numbers_) + row * numbers_.stride;
      for (int i = 0; i < count; ++i) numbers[i] = std::tanh(numbers[i]);
      Numbers factors;
      multiply(correct_, count, count, numbers, factors.data());
      for (int j = 0; j < count; ++j) factors[j] += 1.0f;
      const float* predicted = context_.workspace.rows(predicted_) + row * hidden;
      const float* active = context_.workspace.rows(active_) + row * hidden;
      float* told_input = context_.workspace.rows(passive_input_) + row * hidden;
      for (int j = 0; j < count; ++j) {
        float* y = output.y + row * output.stride + j * hidden;
        for (int h = 0; h < hidden; ++h) y[h] += output.scale * (factors[j] * (active[h] - predicted[h]));
      }
      for (int h = 0; h < hidden; ++h) {
        told_input[h] = predicted[h] + factors[plan_.active] * (active[h] - predicted[h]);
        if (scale_) told_input[h] *= scale_[h];
      }
      std::fill_n(context_.workspace.rows(passive_) + row * hidden, hidden, 0.0f);
    }
  });
  context_.profile.end(worker, Phase::kNorm);
}

}  // namespace tidewheel
