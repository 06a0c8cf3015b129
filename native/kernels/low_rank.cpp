// h = A x, the first of an adapter's two products. A value depends only on its row of x and its row of A.
#include "kernels/low_rank.h"

#include <type_traits>

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

// So many inputs of rows of A and x that are multiplied at a time.
template <typename T>
struct SingleInputs {
  static constexpr int kCount = kLanes;
  TW_INLINE F weights(const T* a) { return load(a); }
  TW_INLINE F inputs(const float* x) { return load(x); }
  TW_INLINE F multiply(F sum, F weights, F inputs) { return fma(weights, inputs, sum); }
};

// Where products of bfloat16 are sums of pairs: x is rounded to it. `Floats` is a parameter because other levels lack some
// of the functions used here.
template <typename Floats>
struct PairedInputs {
  static constexpr int kCount = 2 * kLanes;
  TW_INLINE Pairs weights(const bf16* a) { return load_pairs(a); }
  TW_INLINE Pairs inputs(const float* x) {
    const Floats low = load(x), high = load(x + kLanes);
    return to_pairs(low, high);
  }
  TW_INLINE Floats multiply(Floats sum, Pairs weights, Pairs inputs) { return dot_pairs(sum, weights, inputs); }
};

template <typename T>
using InputsOf =
    std::conditional_t<sizeof(typename Element<T>::Activation) == sizeof(bf16), PairedInputs<F>, SingleInputs<T>>;

template <typename T, int ROWS, int VALUES>
void project_some(const ProjectArgs& args, int row, int value) {
  using X = InputsOf<T>;
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
  for (; i + X::kCount <= k; i += X::kCount) {
    decltype(X::weights(a)) weights[VALUES];
#pragma GCC unroll 4
    for (int j = 0; j < VALUES; ++j) weights[j] = X::weights(a + size_t(j) * k + i);
    if (i * sizeof(T) % 64 == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) prefetch(next + size_t(j) * k + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const auto x = X::inputs(args.x[row + r] + i);
#pragma GCC unroll 4
      for (int j = 0; j < VALUES; ++j) sums[r][j] = X::multiply(sums[r][j], weights[j], x);
    }
  }
  put_values(args, row, value, a, i, sums);
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
