// y = x W^T over packed panels. An output depends only on its row and its column, never on the number of rows or on the
// thread that computes it.
#include "kernels/blocks.h"
#include "kernels/gemm_widened.h"
#include "kernels/low_rank.h"
#include "kernels/table.h"
#include "micro_kernels.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kHalf = kPanel / 2;

template <typename V>
TW_INLINE V inverted(V a) {
  if constexpr (requires { reciprocal(a); }) {
    return reciprocal(a);
  } else {
    return div(set1(1.0f), a);
  }
}

TW_INLINE F activate(F x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return div(x, add(set1(1.0f), exp(sub(zero(), x))));
    case Activation::kGelu: {  // x Phi(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2)
      const F size = abs(x);
      // Formula 7.1.26 of Abramowitz and Stegun's handbook, which is exact to 1.5e-7.
      const F t = inverted(fma(size, set1(0.3275911f * 0.70710678f), set1(1.0f)));
      F p = set1(1.061405429f);
      for (const float coefficient : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, set1(coefficient));
      const F erfc = mul(mul(p, t), exp(mul(mul(x, x), set1(-0.5f))));
      return sub(max(x, zero()), mul(mul(size, set1(0.5f)), erfc));
    }
    case Activation::kGeluTanh: {  // https://arxiv.org/abs/1606.08415, (1 + tanh y) / 2 = 1 / (1 + e^-2y)
      const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
      return div(x, add(set1(1.0f), exp(mul(cubic, set1(-2.0f * 0.7978845608f)))));
    }
    case Activation::kGeluQuick:
      return div(x, add(set1(1.0f), exp(mul(set1(-1.702f), x))));
    case Activation::kRelu:
      return max(x, zero());
    case Activation::kRelu2: {
      const F positive = max(x, zero());
      return mul(positive, positive);
    }
  }
  return x;
}

// gpt-oss's, https://arxiv.org/abs/2508.10925. `min` and `max` give their second argument for NaN, which stays one.
TW_INLINE F clipped_swiglu(F gate, F up, float limit) {
  const F g = min(set1(limit), gate), u = min(set1(limit), max(set1(-limit), up));
  const F sigmoid = div(set1(1.0f), add(set1(1.0f), exp(mul(set1(-1.702f), g))));
  return mul(mul(add(u, set1(1.0f)), g), sigmoid);
}

// Calls `put` with each vector of a tile's outputs, biases added, and its place in `y`.
template <typename Put>
TW_INLINE void put_each(const float* bias, int rows, const float* tile, float* y, size_t stride, Put&& put) {
  F added[kPanel / kLanes];
#pragma GCC unroll 8
  for (int v = 0; v < kPanel / kLanes; ++v) added[v] = bias ? load(bias + v * kLanes) : zero();
  for (int r = 0; r < rows; ++r, tile += kPanel, y += stride) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanel / kLanes; ++v) {
      const F x = load(tile + v * kLanes);
      put(y + v * kLanes, bias ? add(x, added[v]) : x);
    }
  }
}

// The most frequent kinds of outputs, in one pass. False for others, whose tile is as it was.
bool put_tile(const GemmArgs& args, int panel, int row, int rows, const float* tile) {
  const int column = panel * kPanel;
  if (args.low_rank || args.scale != 1 || args.softcap != 0 || args.epilogue == Epilogue::kGated) return false;
  if (args.epilogue != Epilogue::kActivation && args.n - column < kPanel) return false;
  const float* const bias = args.bias ? args.bias + column : nullptr;
  float* const y = args.y + row * args.y_stride + column;
  const auto each = [&](auto&& put) __attribute__((always_inline)) { put_each(bias, rows, tile, y, args.y_stride, put); };
  if (args.epilogue == Epilogue::kStore) {
    each([](float* to, F x) __attribute__((always_inline)) { store(to, x); });
  } else if (args.epilogue == Epilogue::kAdd) {
    each([](float* to, F x) __attribute__((always_inline)) { store(to, add(load(to), x)); });
  } else if (args.activation == Activation::kGelu) {
    each([](float* to, F x) __attribute__((always_inline)) { store(to, activate(x, Activation::kGelu)); });
  } else {
    const Activation activation = args.activation;
    each([=](float* to, F x) __attribute__((always_inline)) { store(to, activate(x, activation)); });
  }
  return true;
}

void finish_tile(const GemmArgs& args, int panel, int row, int rows, float* tile) {
  if (put_tile(args, panel, row, rows, tile)) return;
  const int column = panel * kPanel;
  if (args.bias) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kPanel; c += kLanes) {
        store(tile + r * kPanel + c, add(load(tile + r * kPanel + c), load(args.bias + column + c)));
      }
    }
  }
  if (args.low_rank) add_low_rank(args.low_rank + row, rows, args.low_rank_panel + panel, tile);
  if (args.scale != 1) {
    const int scaled = args.epilogue == Epilogue::kGated ? kHalf : kPanel;
    for (int r = 0; r < rows; ++r) {
      float* t = tile + r * kPanel;
      for (int c = 0; c < scaled; c += kLanes) store(t + c, mul(load(t + c), set1(args.scale)));
    }
  }
  if (args.softcap != 0) {
    const F cap = set1(args.softcap), least = set1(-args.softcap), inverse = set1(1.0f / args.softcap);
    for (int i = 0; i < rows * kPanel; i += kLanes) {
      const F x = load(tile + i);
      // tanh makes a number of NaN, which has to stay one. `min` and `max` give their second argument for it.
      store(tile + i, fma(min(cap, max(least, x)), zero(), mul(cap, tanh(mul(x, inverse)))));
    }
  }
  switch (args.epilogue) {
    case Epilogue::kStore:
    case Epilogue::kAdd: {
      const int columns = args.n - column < kPanel ? args.n - column : kPanel;
      const bool accumulate = args.epilogue == Epilogue::kAdd;
      for (int r = 0; r < rows; ++r) {
        float* y = args.y + (row + r) * args.y_stride + column;
        const float* t = tile + r * kPanel;
        int c = 0;
        for (; c + kLanes <= columns; c += kLanes) store(y + c, accumulate ? add(load(y + c), load(t + c)) : load(t + c));
        for (; c < columns; ++c) y[c] = accumulate ? y[c] + t[c] : t[c];
      }
      break;
    }
    case Epilogue::kActivation:
      for (int r = 0; r < rows; ++r) {
        float* y = args.y + (row + r) * args.y_stride + column;
        for (int c = 0; c < kPanel; c += kLanes) store(y + c, activate(load(tile + r * kPanel + c), args.activation));
      }
      break;
    case Epilogue::kGated:
      for (int r = 0; r < rows; ++r) {
        float* y = args.y + (row + r) * args.y_stride + column / 2;
        for (int c = 0; c < kHalf; c += kLanes) {
          const F gate = load(tile + r * kPanel + c), up = load(tile + r * kPanel + kHalf + c);
          store(y + c, args.swiglu_limit > 0 ? clipped_swiglu(gate, up, args.swiglu_limit)
                                             : mul(activate(gate, args.activation), up));
        }
      }
      break;
  }
}

// Prefetches the outputs of a tile while it is computed. They are in different rows, which the hardware does not
// predict.
void prefetch_outputs(const GemmArgs& args, int panel, int row, int rows) {
  const bool gated = args.epilogue == Epilogue::kGated;
  const float* y = args.y + row * args.y_stride + panel * (gated ? kHalf : kPanel);
  for (int r = 0; r < rows; ++r, y += args.y_stride) {
    prefetch(y);
    if (!gated) prefetch(y + kHalf);
  }
}

template <typename Micro>
void gemm_with(Micro& kernel, const WeightFormat& format, const GemmArgs& args) {
  const size_t x_bytes = row_bytes(format, args.k), weight_bytes = panel_bytes(format, args.k);
  alignas(64) float tile[Micro::kRows * kPanel];
  if (args.low_rank) {
    prefetch_lora_panels(args.low_rank + args.row_begin, args.row_end - args.row_begin, args.low_rank_panel + args.panel_begin);
  }
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    const char* weight = static_cast<const char*>(args.weight) + panel * weight_bytes;
    for (int row = args.row_begin; row < args.row_end; row += Micro::kRows) {
      const int rows = args.row_end - row < Micro::kRows ? args.row_end - row : Micro::kRows;
      prefetch_outputs(args, panel, row, rows);
      if (args.low_rank) prefetch_low_rank(args.low_rank + row, rows, args.low_rank_panel + panel);
      if constexpr (requires { kernel.bring(weight, weight_bytes); }) {  // a part of the next panel with each tile
        const size_t count = args.row_end - args.row_begin, first = row - args.row_begin;
        const size_t begin = weight_bytes * first / count, end = weight_bytes * (first + rows) / count;
        kernel.bring(weight + weight_bytes + begin, end - begin);
      }
      kernel.multiply(format, static_cast<const char*>(args.x) + row * x_bytes, weight, args.k, rows, tile);
      finish_tile(args, panel, row, rows, tile);
    }
  }
}

// Calls `body` with the micro-kernel for a format.
template <typename Body>
void with_micro_kernel(const WeightFormat& format, Body&& body) {
  const auto call = [&]<typename Micro>(Micro&& kernel) { body(kernel); };
  switch (format.kind) {
    case WeightKind::kFloat32: return call(FloatRows<float>());
    case WeightKind::kBFloat16: return call(FloatRows<bf16>());
    case WeightKind::kFloat16: return call(FloatRows<f16>());
    case WeightKind::kInt8: return call(GroupRows<false, false>());
    case WeightKind::kInt8Channel: return call(Int8ChannelRows());
    case WeightKind::kInt4:
      if (format.zero_points) return call(GroupRows<true, true>());
      return call(GroupRows<true, false>());
    case WeightKind::kE4m3: return call(WidenedRows<bf16, FloatRows<bf16>>());
    case WeightKind::kTable4: return call(WidenedRows<float, FloatRows<float>>());
    default: break;
  }
  with_kind(format, [&]<WeightKind KIND, BlockTraits TRAITS>() {
    call(ExpandedRows<ChunkTraits::of(TRAITS)>());
  });
}

}  // namespace

int tile_rows(const WeightFormat& format) { return packed_rows(format.kind); }

int row_block(const WeightFormat& format, int k) {
  int rows = 0;
  with_micro_kernel(format, [&]<typename Micro>(Micro&) {
    const size_t blocks = kRowBlockBytes / (row_bytes(format, k) * Micro::kRows);
    rows = Micro::kRows * static_cast<int>(blocks > 1 ? blocks : 1);
  });
  return rows;
}

void gemm(const WeightFormat& format, const GemmArgs& args) {
  with_micro_kernel(format, [&](auto& kernel) { gemm_with(kernel, format, args); });
}

}  // namespace tidewheel::TW_ISA
