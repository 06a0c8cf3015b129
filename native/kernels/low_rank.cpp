// h = A x, the first of an adapter's two products. A value depends only on its row of x and its row of A.
#include "kernels/low_rank.h"

#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

// As many as have sums in registers at once. They share what is loaded, and do not change each other's bits.
constexpr int kMostRows = kTileRows < 8 ? 2 : 4, kMostValues = 4;

// What is fetched while rows of A are read from `value` on: the rows behind them. They are short streams, each of which a
// processor would find out about anew.
template <typename T, int VALUES>
TW_INLINE const T* next_rows(const ProjectArgs& args, int row, int value) {
  const T* const a = static_cast<const T*>(args.a) + size_t(value) * args.k;
  if (row > 0) return a;
  if (value + VALUES < args.count) return a + size_t(VALUES) * args.k;
  return args.next ? static_cast<const T*>(args.next) : a;
}

// Values of h, with what is behind the `done` inputs that vectors have taken.
template <typename T, int ROWS, int VALUES>
TW_INLINE void put_values(const ProjectArgs& args, int row, int value, const T* a, int done, const F (&sums)[ROWS][VALUES]) {
  // Unrolled, as the compiler would else keep all sums in memory.
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) {
      float sum = hsum(sums[r][j]);
      for (int i = done; i < args.k; ++i) sum += to_float(a[size_t(j) * args.k + i]) * args.x[row + r][i];
      args.h[row + r][value + j] = sum;
    }
  }
}

template <typename T, int ROWS, int VALUES>
void project_some(const ProjectArgs& args, int row, int value) {
  const int k = args.k;
  const T* a = static_cast<const T*>(args.a) + size_t(value) * k;
  const T* next = next_rows<T, VALUES>(args, row, value);
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
    if (i * sizeof(T) % 64 == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) prefetch(next + size_t(j) * k + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const F x = load(args.x[row + r] + i);
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) sums[r][j] = fma(weights[j], x, sums[r][j]);
    }
  }
  put_values(args, row, value, a, i, sums);
}

// The same where products of bfloat16 are sums of pairs: x is rounded to it. `Floats` is a parameter because other levels
// lack some of the functions used here.
template <typename Floats, int ROWS, int VALUES>
void project_pairs(const ProjectArgs& args, int row, int value) {
  const int k = args.k;
  const bf16* a = static_cast<const bf16*>(args.a) + size_t(value) * k;
  const bf16* next = next_rows<bf16, VALUES>(args, row, value);
  Floats sums[ROWS][VALUES];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) sums[r][j] = zero();
  }
  int i = 0;
  for (; i + 2 * kLanes <= k; i += 2 * kLanes) {
    Pairs weights[VALUES];
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) {
      weights[j] = load_pairs(a + size_t(j) * k + i);
      prefetch(next + size_t(j) * k + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const float* const x = args.x[row + r] + i;
      const Floats low = load(x), high = load(x + kLanes);
      const auto pairs = to_pairs(low, high);
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) sums[r][j] = dot_pairs(sums[r][j], weights[j], pairs);
    }
  }
  put_values(args, row, value, a, i, sums);
}

template <typename T, int ROWS, int VALUES>
void project_values(const ProjectArgs& args, int row, int value) {
  if constexpr (sizeof(typename Element<T>::Activation) == sizeof(bf16)) {
    project_pairs<F, ROWS, VALUES>(args, row, value);
  } else {
    project_some<T, ROWS, VALUES>(args, row, value);
  }
}

template <typename T, int ROWS>
void project_rows(const ProjectArgs& args, int row) {
  int value = 0;
  for (; value + kMostValues <= args.count; value += kMostValues) project_values<T, ROWS, kMostValues>(args, row, value);
  for (; value < args.count; ++value) project_values<T, ROWS, 1>(args, row, value);
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

namespace {

template <typename T>
void store_values(const float* h, int first, int count, void* row) {
  using Activation = typename Element<T>::Activation;
  Activation* const to = static_cast<Activation*>(row) + first;
  for (int i = 0; i < count; ++i) {
    if constexpr (sizeof(Activation) == sizeof(float)) {
      to[i] = h[i];
    } else {
      to[i] = to_bf16(h[i]);
    }
  }
}

}  // namespace

void store_low_rank(DType type, const float* h, int first, int count, void* row) {
  switch (type) {
    case DType::kFloat32: return store_values<float>(h, first, count, row);
    case DType::kBFloat16: return store_values<bf16>(h, first, count, row);
    case DType::kFloat16: return store_values<f16>(h, first, count, row);
  }
}

}  // namespace tidewheel::TW_ISA
