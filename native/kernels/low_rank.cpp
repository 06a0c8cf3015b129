// Products with adapters' LoRA panels. A value depends only on its row of x and its row of W.
#include "kernels/low_rank.h"

#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

template <typename T, int ROWS>
void project_rows(const ProjectArgs& args, int row) {
  using Activation = typename Element<T>::Activation;
  const Activation* x[ROWS];
  for (int r = 0; r < ROWS; ++r) x[r] = static_cast<const Activation*>(args.x[row + r]);
  const char* w = static_cast<const char*>(args.w);
  for (int s = 0; s < args.lora_panels; ++s, w += lora_panel_bytes(args.inputs, args.type)) {
    F products[ROWS][kLoraPanelVectors];
    multiply_lora_panel<T, ROWS>(reinterpret_cast<const T*>(w), args.inputs, x, products);
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < kLoraPanelVectors; ++v) store(args.y[row + r] + s * kLoraPanel + v * kLanes, products[r][v]);
    }
  }
}

template <typename T>
void project_all(const ProjectArgs& args) {
  for (int row = 0; row < args.rows; row += kLoraPanelRows) {
    const int rows = args.rows - row < kLoraPanelRows ? args.rows - row : kLoraPanelRows;
    with_rows(rows, [&]<int ROWS>() { project_rows<T, ROWS>(args, row); });
  }
}

template <typename T>
void pack_inputs(const float* x, int first, int count, int zeros, void* row) {
  using Activation = typename Element<T>::Activation;
  Activation* const to = static_cast<Activation*>(row) + first;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(x + i));
  for (; i < count; ++i) {
    if constexpr (sizeof(Activation) == sizeof(float)) {
      to[i] = x[i];
    } else {
      to[i] = to_bf16(x[i]);
    }
  }
  for (; i < count + zeros; ++i) to[i] = {};
}

}  // namespace

void project(const ProjectArgs& args) {
  switch (args.type) {
    case DType::kFloat32: return project_all<float>(args);
    case DType::kBFloat16: return project_all<bf16>(args);
    case DType::kFloat16: return project_all<f16>(args);
  }
}

void pack_lora_panel_inputs(DType type, const float* x, int first, int count, int zeros, void* row) {
  switch (type) {
    case DType::kFloat32: return pack_inputs<float>(x, first, count, zeros, row);
    case DType::kBFloat16: return pack_inputs<bf16>(x, first, count, zeros, row);
    case DType::kFloat16: return pack_inputs<f16>(x, first, count, zeros, row);
  }
}

}  // namespace tidewheel::TW_ISA
