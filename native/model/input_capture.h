// Copies of the inputs that matrices are multiplied with, for calibrating a quantization.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "model/weights/linear.h"
#include "runtime/thread_pool.h"

namespace tidewheel {

class InputCapture {
 public:
  // From now on, the inputs of these matrices are kept. What was kept before is dropped.
  void choose(const std::vector<const Linear*>& matrices) {
    kept_.clear();
    for (const Linear* matrix : matrices) kept_[matrix];
  }

  bool empty() const { return kept_.empty(); }

  // The inputs of a chosen matrix in the order of its rows, [rows, k]; none for other matrices. They are not kept any
  // longer.
  std::vector<float> take(const Linear& matrix) {
    const auto found = kept_.find(&matrix);
    return found == kept_.end() ? std::vector<float>() : std::exchange(found->second, {});
  }

  // Keeps `count` rows of inputs, if the matrix was chosen. One worker calls `fill(row, out)` for each of them, in
  // order. Ends with a barrier.
  template <typename Fill>
  void keep(Worker& worker, const Linear& matrix, int count, Fill&& fill) {
    const auto found = kept_.find(&matrix);
    if (found == kept_.end()) return;
    worker.share(1, 1, [&](int64_t, int64_t) {
      std::vector<float>& rows = found->second;
      const size_t before = rows.size(), k = matrix.k;
      rows.resize(before + count * k);
      for (int row = 0; row < count; ++row) fill(row, rows.data() + before + row * k);
    });
  }

 private:
  std::map<const Linear*, std::vector<float>> kept_;
};

}  // namespace tidewheel
