#include "model/ropes.h"

#include <algorithm>
#include <cmath>

#include "model/require.h"

namespace tidewheel {
namespace {

constexpr int kMaxAxes = 3;

}  // namespace

int Ropes::add(const RopePlan& rope) {
  require(rope.axes.empty() || rope.axes.size() == rope.inv_freq.size(), "rope by axes needs an axis for each pair");
  for (const int axis : rope.axes) {
    require(axis >= 0 && axis < kMaxAxes, "rope has at most three axes");
    axes_ = std::max(axes_, axis + 1);
  }
  const Table table{rope.inv_freq, rope.factor, rope.axes};
  const auto found = std::find(tables_.begin(), tables_.end(), table);
  const int number = static_cast<int>(found - tables_.begin());
  if (found == tables_.end()) tables_.push_back(table);
  stride_ = std::max(stride_, 2 * rope.inv_freq.size());
  return number;
}

void Ropes::allocate(int max_tokens) {
  max_tokens_ = max_tokens;
  angles_ = Arena(tables_.size() * max_tokens * stride_ * sizeof(float));
}

void Ropes::compute(const Step& step, int token, float factor) const {
  const size_t tokens = step.token_ids.size();
  for (size_t i = 0; i < tables_.size(); ++i) {
    const Table& table = tables_[i];
    float* cos = entries(static_cast<int>(i), token);
    float* sin = cos + table.inv_freq.size();
    const bool by_axes = !table.axes.empty() && !step.rope_positions.empty();
    for (size_t pair = 0; pair < table.inv_freq.size(); ++pair) {
      const int position = by_axes ? step.rope_positions[table.axes[pair] * tokens + token] : step.positions[token];
      const float angle = static_cast<float>(position) * (table.inv_freq[pair] / factor);  // in float, as in training
      *cos++ = std::cos(angle) * table.factor;
      *sin++ = std::sin(angle) * table.factor;
    }
  }
}

}  // namespace tidewheel
