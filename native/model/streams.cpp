#include "model/streams.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tidewheel {
namespace {

// Sums in a fixed order that lets the compiler use vectors.
float mean_square(const float* x, int size) {
  std::array<float, 16> sums{};
  int i = 0;
  for (; i + 16 <= size; i += 16) {
    for (int lane = 0; lane < 16; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  }
  float sum = 0;
  for (const float lane : sums) sum += lane;
  for (; i < size; ++i) sum += x[i] * x[i];
  return sum / static_cast<float>(size);
}

}  // namespace

Streams::Streams(const StreamsPlan& plan, Context& context, bool widens, bool narrows) : context_(context), plan_(plan) {
  require(plan.count >= 2 && plan.min_square > 0, "there must be two streams or more, whose least square is above 0");
  const int size = context.hidden_size;
  for (int i = 1; i < plan.count; ++i) {
    const std::string name = ".stream." + std::to_string(i);
    if (widens) context.weights.add_linear("embed" + name, in_.emplace_back(), size, size, false);
    if (narrows) context.weights.add_linear("final" + name, out_.emplace_back(), size, size, false);
  }
  projected_ = context.workspace.add<float>(size_t(plan.count - 1) * size);
}

void Streams::widen(Worker& worker, const float* x, int rows, float* streams) const {
  const size_t size = context_.hidden_size, stride = width();
  for (int i = 1; i < plan_.count; ++i) {
    context_.gemms.run(worker, in_[i - 1], {x, size, rows}, {Epilogue::kStore, streams + i * size, stride});
  }
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * size;
      float* to = streams + row * stride;
      std::copy_n(from, size, to);
      const float large = std::sqrt(mean_square(from, static_cast<int>(size)));
      for (int i = 1; i < plan_.count; ++i) {
        float* other = to + i * size;
        const float factor = large / std::sqrt(std::max(mean_square(other, static_cast<int>(size)), plan_.min_square));
        for (size_t h = 0; h < size; ++h) other[h] *= factor;
      }
    }
  });
}

void Streams::narrow(Worker& worker, const float* streams, const int32_t* gather, int rows, float* x) const {
  const size_t size = context_.hidden_size, stride = width();
  float* projected = context_.workspace.rows(projected_);
  for (int i = 1; i < plan_.count; ++i) {
    context_.gemms.run(worker, out_[i - 1], {streams + i * size, stride, rows, gather},
                       {Epilogue::kStore, projected + (i - 1) * size, projected_.stride});
  }
  worker.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* first = streams + gather[row] * stride;
      float* to = x + row * size;
      std::copy_n(first, size, to);
      const float large = std::sqrt(mean_square(first, static_cast<int>(size)));
      for (int i = 1; i < plan_.count; ++i) {
        const float* other = projected + row * projected_.stride + (i - 1) * size;
        const float factor = large / std::sqrt(std::max(mean_square(other, static_cast<int>(size)), plan_.min_square));
        for (size_t h = 0; h < size; ++h) to[h] += factor * other[h];
      }
      for (size_t h = 0; h < size; ++h) to[h] /= static_cast<float>(plan_.count);
    }
  });
}

}  // namespace tidewheel
