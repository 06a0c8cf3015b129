// RMS norm and LayerNorm of a row.
#include <cmath>

#include "kernels/table.h"
#include "simd.h"

namespace tidewheel::TW_ISA {
namespace {

struct Moments {
  float shift, scale;
};

Moments moments(const Norm& norm, const float* x, int size) {
  float mean = 0.0f;
  int i = 0;
  if (norm.kind == NormKind::kLayer) {
    F sum = zero();
    for (; i + kLanes <= size; i += kLanes) sum = add(sum, load(x + i));
    mean = hsum(sum);
    for (; i < size; ++i) mean += x[i];
    mean /= static_cast<float>(size);
  }
  F squares = zero();
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const F centred = sub(load(x + i), set1(mean));
    squares = fma(centred, centred, squares);
  }
  float variance = hsum(squares);
  for (; i < size; ++i) variance += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(variance / static_cast<float>(size) + norm.eps)};
}

}  // namespace

void normalize_to(const Norm& norm, const float* x, int size, float* out) {
  const Moments m = moments(norm, x, size);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    F y = mul(sub(load(x + i), set1(m.shift)), set1(m.scale));
    if (norm.weight) y = mul(y, load(norm.weight + i));
    if (norm.bias) y = add(y, load(norm.bias + i));
    store(out + i, y);
  }
  for (; i < size; ++i) {
    out[i] = (x[i] - m.shift) * m.scale;
    if (norm.weight) out[i] *= norm.weight[i];
    if (norm.bias) out[i] += norm.bias[i];
  }
}

void normalize(const Norm& norm, float* x, int size) { normalize_to(norm, x, size, x); }

void add_normalized(const Norm& norm, float* x, int size, float scale, float* y) {
  normalize(norm, x, size);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(y + i, add(load(y + i), mul(load(x + i), set1(scale))));
  for (; i < size; ++i) y[i] += x[i] * scale;
}

}  // namespace tidewheel::TW_ISA
