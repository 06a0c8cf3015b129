#include "model/ropes.h"

#include <algorithm>
#include <cmath>

namespace tidewheel {

int Ropes::add(const RopePlan& rope) {
  const Table table{rope.inv_freq, rope.factor};
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

void Ropes::compute(int token, int position, float factor) const {
  for (size_t i = 0; i < tables_.size(); ++i) {
    const Table& table = tables_[i];
    float* cos = entries(static_cast<int>(i), token);
    float* sin = cos + table.inv_freq.size();
    for (const float frequency : table.inv_freq) {
      const float angle = static_cast<float>(position) * (frequency / factor);  // in float, as in training
      *cos++ = std::cos(angle) * table.factor;
      *sin++ = std::sin(angle) * table.factor;
    }
  }
}

}  // namespace tidewheel
