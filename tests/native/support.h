// Random data in every weight type, and activations as a level wants them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "models.h"
#include "runtime/isa.h"

namespace tidewheel::test {

// All levels that this processor has, or the one that TIDEWHEEL_ISA names, and models of some that it may not have.
inline std::vector<const Kernels*> tested_kernels() {
  if (std::getenv("TIDEWHEEL_ISA")) return {&choose_kernels("auto")};
  std::vector<const Kernels*> levels = modelled_kernels();
  for (const Kernels* level : available_kernels()) levels.push_back(level);
  return levels;
}

// Where cases are many and of one kind, an emulated processor is given every fifth.
#ifdef TIDEWHEEL_EMULATED
constexpr int kStride = 5;
#else
constexpr int kStride = 1;
#endif

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

inline const char* name_of(DType type) {
  return type == DType::kFloat32 ? "float32" : type == DType::kBFloat16 ? "bfloat16" : "float16";
}

inline float rounded(DType type, float x) {
  if (type == DType::kBFloat16) return to_float(to_bf16(x));
  if (type == DType::kFloat16) return to_float(to_f16(x));
  return x;
}

struct NamedFormat {
  std::string name;
  WeightFormat format;
};

// Every way to store a weight.
inline const NamedFormat kFormats[] = {
    {"float32", {WeightKind::kFloat32}},
    {"bfloat16", {WeightKind::kBFloat16}},
    {"float16", {WeightKind::kFloat16}},
    {"int8", {WeightKind::kInt8}},
    {"int8-channel", {WeightKind::kInt8Channel}},
    {"int4 32", {WeightKind::kInt4, 32}},
    {"int4 64", {WeightKind::kInt4, 64}},
    {"int4 128", {WeightKind::kInt4, 128}},
    {"int4 32 zero points", {WeightKind::kInt4, 32, true}},
    {"int4 128 zero points", {WeightKind::kInt4, 128, true}},
};

inline bool is_float(const WeightFormat& format) { return format.kind <= WeightKind::kFloat16; }

// What a result may be off by, relative to the sum of the magnitudes that went into it.
inline double tolerance(DType type) { return type == DType::kFloat32 ? 1e-5 : 1e-4; }

class Random {
 public:
  std::vector<float> normals(size_t count, float scale = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = scale * normal_(engine_);
    return values;
  }

 private:
  std::mt19937 engine_{7};
  std::normal_distribution<float> normal_;
};

// A row as a GEMM sees it: rounded, or quantized to int8 with the scale of its group or of the whole row.
inline std::vector<double> as_input(const WeightFormat& format, const float* x, int k) {
  std::vector<double> out(x, x + k);
  if (is_float(format) || format.kind > WeightKind::kGrid) {
    const DType type = format.kind == WeightKind::kE4m3    ? DType::kBFloat16
                       : format.kind == WeightKind::kTable4 ? DType::kFloat32
                                                            : static_cast<DType>(format.kind);
    for (int i = 0; i < k; ++i) out[i] = rounded(type, x[i]);
    return out;
  }
  const int group = format.kind == WeightKind::kInt8Channel ? k : kRowGroup;
  for (int begin = 0; begin < k; begin += group) {
    const int end = std::min(k, begin + group);
    float largest = 0;
    for (int i = begin; i < end; ++i) largest = std::max(largest, std::abs(x[i]));
    for (int i = begin; i < end; ++i) {
      out[i] = largest > 0 ? double(std::nearbyint(x[i] * (127.0f / largest))) * double(largest / 127.0f) : 0.0;
    }
  }
  return out;
}

// A weight [n, k] of floats as one format packs it.
struct PackedWeight {
  const Kernels& kernels;
  WeightFormat format;
  int n, k;
  std::vector<char> bytes;

  // Room for a weight.
  PackedWeight(const Kernels& with, const WeightFormat& as, int rows, int cols)
      : kernels(with), format(as), n(rows), k(cols), bytes(panels() * with.panel_bytes(as, cols)) {}

  PackedWeight(const Kernels& with, const WeightFormat& as, const std::vector<float>& weight, int rows, int cols)
      : PackedWeight(with, as, rows, cols) {
    kernels.pack_weights(format, {weight.data(), DType::kFloat32, k, 1, n, k, bytes.data(), k, n, 0, 0, 0, n});
  }

  int panels() const { return (n + kPanel - 1) / kPanel; }

  // What was stored, as floats [n, k].
  std::vector<float> unpacked() const {
    std::vector<float> weight(size_t(n) * k);
    for (int r = 0; r < n; ++r) kernels.unpack_row(format, bytes.data(), k, r, weight.data() + size_t(r) * k);
    return weight;
  }

  // `epilogue` of x W^T, where x is [m, k].
  void multiply(const std::vector<float>& x, int m, Epilogue epilogue, Activation activation, const float* bias, float* y,
                size_t y_stride, float scale = 1, float softcap = 0) const {
    std::vector<char> rows(size_t(m) * kernels.row_bytes(format, k));
    std::vector<float> scratch(k + kRowGroup);
    kernels.pack_inputs(format, {x.data(), size_t(k), nullptr, m, k, {}, scratch.data(), rows.data()}, 0, m);
    kernels.gemm(format, {rows.data(), 0, m, bytes.data(), k, n, 0, panels(), bias, epilogue, activation, y, y_stride,
                          scale, softcap});
  }

  std::vector<float> multiply(const std::vector<float>& x, int m) const {
    std::vector<float> y(size_t(m) * n);
    multiply(x, m, Epilogue::kStore, Activation::kSilu, nullptr, y.data(), n);
    return y;
  }
};

}  // namespace tidewheel::test
