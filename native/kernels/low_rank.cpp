// h = A x, the first of an adapter's two products. A value depends only on its row of x and its row of A.
#include "kernels/low_rank.h"

#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

// As many as have sums in registers at once. They share what is loaded, and do not change each other's bits.
constexpr int kMostRows = kTileRows < 8 ? 2 : 4, kMostValues = 4;

template <typename T, int ROWS, int VALUES>
void project_some(const ProjectArgs& args, int row, int value) {
  const int k = args.k;
  const T* a = static_cast<const T*>(args.a) + size_t(value) * k;
  F sums[ROWS][VALUES];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) sums[r][j] = zero();
  }
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    F weights[VALUES];
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) weights[j] = load(a + size_t(j) * k + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const F x = load(args.x[row + r] + i);
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) sums[r][j] = fma(weights[j], x, sums[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < VALUES; ++j) {
      float sum = hsum(sums[r][j]);
      for (int rest = i; rest < k; ++rest) sum += to_float(a[size_t(j) * k + rest]) * args.x[row + r][rest];
      args.h[row + r][value + j] = sum;
    }
  }
}

template <typename T, int ROWS>
void project_rows(const ProjectArgs& args, int row) {
  int value = 0;
  for (; value + kMostValues <= args.count; value += kMostValues) project_some<T, ROWS, kMostValues>(args, row, value);
  for (; value < args.count; ++value) project_some<T, ROWS, 1>(args, row, value);
}

template <typename T>
void project_all(const ProjectArgs& args) {
  int row = 0;
  for (; row + kMostRows <= args.rows; row += kMostRows) project_rows<T, kMostRows>(args, row);
  for (; row < args.rows; ++row) project_rows<T, 1>(args, row);
}

}  // namespace

void project(const ProjectArgs& args) {
  switch (args.type) {
    case DType::kFloat32: return project_all<float>(args);
    case DType::kBFloat16: return project_all<bf16>(args);
    case DType::kFloat16: return project_all<f16>(args);
  }
}

}  // namespace tidewheel::TW_ISA
