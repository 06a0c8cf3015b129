// y = x W^T over packed panels. One accumulator an output, K in order: an output depends on its row and its column
// alone, never on how many rows came along or on which thread computed it.
#include <cmath>

#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kHalf = kPanel / 2;
// Far enough ahead of the loads that a panel streamed from memory arrives in time at one row.
constexpr int kPrefetchBytes = 4096;

// Accumulate ROWS x (VECTORS * kLanes) outputs. Weights advance by one panel row of kPanel * kStep elements.
template <typename T, int ROWS, int VECTORS>
TW_INLINE void micro_tile(const typename Element<T>::Activation* x, size_t x_stride, const T* weight, int steps,
                          float* tile) {
  using E = Element<T>;
  F acc[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
  }
  for (int s = 0; s < steps; ++s) {
    typename E::Vector w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = E::load_weights(weight + v * kLanes * E::kStep);
    if constexpr (ROWS <= 2) {
      prefetch(reinterpret_cast<const char*>(weight) + kPrefetchBytes);
      if constexpr (VECTORS * kLanes * E::kStep * sizeof(T) > 64) {
        prefetch(reinterpret_cast<const char*>(weight) + kPrefetchBytes + 64);
      }
    }
    weight += kPanel * E::kStep;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = E::dot(acc[r][v], w[v], x + r * x_stride);
    }
    x += E::kStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(tile + r * kPanel + v * kLanes, acc[r][v]);
  }
}

template <typename T>
using MicroTile = void (*)(const typename Element<T>::Activation*, size_t, const T*, int, float*);

template <typename T, int ROWS>
void panel_tile(const typename Element<T>::Activation* x, size_t x_stride, const T* weight, int steps, float* tile) {
  for (int column = 0; column < kPanel; column += kTileVectors * kLanes) {
    micro_tile<T, ROWS, kTileVectors>(x, x_stride, weight + column * Element<T>::kStep, steps, tile + column);
  }
}

template <typename T, int... I>
MicroTile<T> pick_tile(int rows, std::integer_sequence<int, I...>) {
  static constexpr MicroTile<T> kTiles[] = {panel_tile<T, I + 1>...};
  return kTiles[rows - 1];
}

TW_INLINE F activate(F x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return div(x, add(set1(1.0f), exp(sub(zero(), x))));
    case Activation::kGelu: {  // x Phi(x)
      float values[kLanes];
      store(values, x);
      for (float& value : values) value = 0.5f * value * (1.0f + std::erf(value * 0.70710678f));
      return load(values);
    }
    case Activation::kGeluTanh: {  // https://arxiv.org/abs/1606.08415, tanh y = 1 - 2 / (e^2y + 1)
      const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
      const F e = exp(mul(cubic, set1(2.0f * 0.7978845608f)));
      const F tanh = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
      return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh));
    }
    case Activation::kRelu:
      return max(x, zero());
  }
  return x;
}

template <typename T>
void finish_tile(const GemmArgs& args, int panel, int row, int rows, float* tile) {
  using A = typename Element<T>::Activation;
  const int column = panel * kPanel;
  if (args.bias) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kPanel; c += kLanes) {
        store(tile + r * kPanel + c, add(load(tile + r * kPanel + c), load(args.bias + column + c)));
      }
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
        A* out = static_cast<A*>(args.out) + (row + r) * args.y_stride + column;
        for (int c = 0; c < kPanel; c += kLanes) {
          store_activations<T>(out + c, activate(load(tile + r * kPanel + c), args.activation));
        }
      }
      break;
    case Epilogue::kGated:
      for (int r = 0; r < rows; ++r) {
        A* out = static_cast<A*>(args.out) + (row + r) * args.y_stride + column / 2;
        for (int c = 0; c < kHalf; c += kLanes) {
          const F gate = activate(load(tile + r * kPanel + c), args.activation);
          store_activations<T>(out + c, mul(gate, load(tile + r * kPanel + kHalf + c)));
        }
      }
      break;
  }
}

template <typename T>
void gemm_typed(const GemmArgs& args) {
  using E = Element<T>;
  const auto* x = static_cast<const typename E::Activation*>(args.x);
  const int steps = (args.k + E::kStep - 1) / E::kStep;
  alignas(64) float tile[kTileRows * kPanel];
  for (int panel = args.panel_begin; panel < args.panel_end; ++panel) {
    const T* weight = static_cast<const T*>(args.weight) + size_t(panel) * steps * kPanel * E::kStep;
    for (int row = args.row_begin; row < args.row_end; row += kTileRows) {
      const int rows = args.row_end - row < kTileRows ? args.row_end - row : kTileRows;
      pick_tile<T>(rows, std::make_integer_sequence<int, kTileRows>{})(x + row * args.x_stride, args.x_stride, weight,
                                                                       steps, tile);
      finish_tile<T>(args, panel, row, rows, tile);
    }
  }
}

template <typename T, typename S>
void pack_typed(const PackArgs& args) {
  constexpr int kStep = Element<T>::kStep;
  const size_t steps = (args.k + kStep - 1) / kStep;
  const S* source = static_cast<const S*>(args.source);
  for (int begin = args.row_begin; begin < args.row_end;) {
    // Rows that land side by side in one panel are packed together, so that panel rows are written whole.
    const int column = begin / args.group * args.group_stride + begin % args.group + args.offset;
    int count = kPanel - column % kPanel;
    if (args.group - begin % args.group < count) count = args.group - begin % args.group;
    if (args.row_end - begin < count) count = args.row_end - begin;
    T* weight = static_cast<T*>(args.weight) + (column / kPanel * steps * kPanel + column % kPanel) * kStep;
    const S* rows = source + begin * args.row_stride;
    for (int k = 0; k < args.cols; k += kStep) {
      T* line = weight + size_t(k / kStep) * kPanel * kStep;
      for (int j = 0; j < kStep && k + j < args.cols; ++j) {
        const S* element = rows + (k + j) * args.col_stride;
        for (int r = 0; r < count; ++r) {
          if constexpr (__is_same(S, T)) {
            line[r * kStep + j] = element[r * args.row_stride];
          } else {
            line[r * kStep + j] = from_float<T>(to_float(element[r * args.row_stride]));
          }
        }
      }
    }
    begin += count;
  }
}

template <typename T>
void pack_to(const PackArgs& args) {
  switch (args.source_type) {
    case DType::kFloat32: return pack_typed<T, float>(args);
    case DType::kBFloat16: return pack_typed<T, bf16>(args);
    case DType::kFloat16: return pack_typed<T, f16>(args);
  }
}

template <typename T>
void unpack_typed(const void* weight, int k, int row, float* out) {
  constexpr int kStep = Element<T>::kStep;
  const size_t steps = (k + kStep - 1) / kStep;
  const T* line = static_cast<const T*>(weight) + (row / kPanel * steps * kPanel + row % kPanel) * kStep;
  for (int i = 0; i < k; ++i) out[i] = to_float(line[size_t(i / kStep) * kPanel * kStep + i % kStep]);
}

}  // namespace

void gemm(DType type, const GemmArgs& args) {
  switch (type) {
    case DType::kFloat32: return gemm_typed<float>(args);
    case DType::kBFloat16: return gemm_typed<bf16>(args);
    case DType::kFloat16: return gemm_typed<f16>(args);
  }
}

void pack(DType type, const PackArgs& args) {
  switch (type) {
    case DType::kFloat32: return pack_to<float>(args);
    case DType::kBFloat16: return pack_to<bf16>(args);
    case DType::kFloat16: return pack_to<f16>(args);
  }
}

void unpack_row(DType type, const void* weight, int k, int row, float* out) {
  switch (type) {
    case DType::kFloat32: return unpack_typed<float>(weight, k, row, out);
    case DType::kBFloat16: return unpack_typed<bf16>(weight, k, row, out);
    case DType::kFloat16: return unpack_typed<f16>(weight, k, row, out);
  }
}

}  // namespace tidewheel::TW_ISA
