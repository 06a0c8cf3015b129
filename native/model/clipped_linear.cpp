#include "model/clipped_linear.h"

#include <algorithm>

namespace tidewheel {
namespace {

// As torch.clamp, also where the least is above the greatest.
void clamp(float* values, int count, const float* bounds) {
  const float least = bounds[0], greatest = bounds[1];
  for (int i = 0; i < count; ++i) values[i] = std::min(std::max(values[i], least), greatest);
}

}  // namespace

void ClippedLinear::add(const std::string& name, int outputs, int inputs, Context& context) {
  context_ = &context, outputs_ = outputs, inputs_ = inputs;
  context.weights.add_linear(name, linear_, outputs, inputs, false);
  context.weights.add_vector(name + ".bounds", bounds_, 4);
}

void ClippedLinear::run(Worker& worker, const Rows& input, const Buffer<float>& room, const Output& output) const {
  float* const clipped = context_->workspace.rows(room);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* const to = clipped + row * room.stride;
      std::copy_n(input.x + row * input.stride, inputs_, to);
      if (input.norm.kind != NormKind::kNone) context_->kernels.normalize(input.norm, to, inputs_);
      clamp(to, inputs_, bounds_);
    }
  });
  context_->gemms.run(worker, linear_, {clipped, room.stride, input.count}, output);
  worker.share(input.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) clamp(output.y + row * output.stride, outputs_, bounds_ + 2);
  });
}

}  // namespace tidewheel
