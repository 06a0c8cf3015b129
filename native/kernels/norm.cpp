// RMSNorm and LayerNorm, row by row, from the float32 residual stream to activations.
#include <cmath>

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

struct Moments {
  float shift, scale;
};

Moments moments(const float* x, const NormArgs& args) {
  float mean = 0.0f;
  int i = 0;
  if (args.layer_norm) {
    F sum = zero();
    for (; i + kLanes <= args.size; i += kLanes) sum = add(sum, load(x + i));
    mean = hsum(sum);
    for (; i < args.size; ++i) mean += x[i];
    mean /= static_cast<float>(args.size);
  }
  F squares = zero();
  for (i = 0; i + kLanes <= args.size; i += kLanes) {
    const F centred = sub(load(x + i), set1(mean));
    squares = fma(centred, centred, squares);
  }
  float variance = hsum(squares);
  for (; i < args.size; ++i) variance += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(variance / static_cast<float>(args.size) + args.eps)};
}

template <typename T>
void norm_typed(const NormArgs& args, int row_begin, int row_end) {
  using A = typename Element<T>::Activation;
  for (int row = row_begin; row < row_end; ++row) {
    float* x = args.x + row * args.x_stride;
    A* out = args.out ? static_cast<A*>(args.out) + row * args.out_stride : nullptr;
    const Moments m = args.weight ? moments(x, args) : Moments{0.0f, 1.0f};
    int i = 0;
    for (; i + kLanes <= args.size; i += kLanes) {
      F y = load(x + i);
      if (args.weight) y = mul(mul(sub(y, set1(m.shift)), set1(m.scale)), load(args.weight + i));
      if (args.bias) y = add(y, load(args.bias + i));
      if (args.in_place) store(x + i, y);
      if (out) store_activations<T>(out + i, y);
    }
    for (; i < args.size; ++i) {
      float y = x[i];
      if (args.weight) y = (y - m.shift) * m.scale * args.weight[i];
      if (args.bias) y += args.bias[i];
      if (args.in_place) x[i] = y;
      if (out) store_activation<T>(out + i, y);
    }
  }
}

}  // namespace

void norm(DType type, const NormArgs& args, int row_begin, int row_end) {
  switch (type) {
    case DType::kFloat32: return norm_typed<float>(args, row_begin, row_end);
    case DType::kBFloat16: return norm_typed<bf16>(args, row_begin, row_end);
    case DType::kFloat16: return norm_typed<f16>(args, row_begin, row_end);
  }
}

}  // namespace tidewheel::TW_ISA
