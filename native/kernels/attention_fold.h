// The last part of attention: combines KV splits of the context into the result.
#pragma once

#include <algorithm>

#include "kernels/attention_parts.h"

namespace tidewheel::TW_ISA {
namespace {

// Combines KV splits one after the other, in ascending order.
class Fold {
 public:
  Fold(const AttentionArgs& args, Scratch& scratch)
      : rows_(args), result_(scratch.take<float>(args.heads.partial_floats(args.num_tokens)), rows_.count, rows_.values) {
    result_.clear(rows_.count, rows_.values);
  }

  void add(const Partial& split) {
    for (int row = 0; row < rows_.count; row += kLanes) {
      const int count = std::min(rows_.count - row, kLanes);
      float old_factors[kLanes] = {}, factors[kLanes] = {};
      for (int i = 0; i < count; ++i) {
        float& last = result_.maximum[row + i];
        const float maximum = std::max(last, split.maximum[row + i]);
        old_factors[i] = last - maximum, factors[i] = split.maximum[row + i] - maximum;
        last = maximum;
      }
      store(old_factors, exp2(load(old_factors)));
      store(factors, exp2(load(factors)));
      for (int i = 0; i < count; ++i) {
        const int r = row + i;
        if (split.maximum[r] == -kInfinity) continue;
        result_.total[r] = result_.total[r] * old_factors[i] + split.total[r] * factors[i];
        float* sums = result_.sums + size_t(r) * rows_.values;
        const float* more = split.sums + size_t(r) * rows_.values;
        const F old_factor = set1(old_factors[i]), factor = set1(factors[i]);
        for (int d = 0; d < rows_.values; d += kLanes) {
          store(sums + d, fma(load(sums + d), old_factor, mul(load(more + d), factor)));
        }
      }
    }
  }

  void write() {
    const AttentionArgs& args = rows_.args;
    const int size = args.heads.values();
    for (int r = 0; r < rows_.count; ++r) {
      const F inverse = set1((args.sinks ? share_with_sink(r) : 1.0f / result_.total[r]) * args.value_scale);
      float* out = args.out + r / rows_.group * args.out_stride + size_t(rows_.head(r)) * size;
      float* sums = result_.sums + size_t(r) * rows_.values;
      for (int d = 0; d < rows_.values; d += kLanes) store(sums + d, mul(load(sums + d), inverse));
      std::memcpy(out, sums, sizeof(float) * size);
    }
  }

 private:
  // The factor for the sums if the softmax has an attention sink as one more score. It is applied here, once a row, so
  // that the result does not depend on how the rest was divided into KV splits.
  float share_with_sink(int row) const {
    const float sink = rows_.args.sinks[rows_.head(row)] * kLog2E, maximum = std::max(result_.maximum[row], sink);
    const float factor = exp2(result_.maximum[row] - maximum);
    return factor / (result_.total[row] * factor + exp2(sink - maximum));
  }

  const Rows rows_;
  Partial result_;
};

}  // namespace
}  // namespace tidewheel::TW_ISA
