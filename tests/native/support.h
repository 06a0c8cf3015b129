// Random data in every weight type, and activations as a level wants them.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace tidewheel::test {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

inline const char* name_of(DType type) {
  return type == DType::kFloat32 ? "float32" : type == DType::kBFloat16 ? "bfloat16" : "float16";
}

inline float rounded(DType type, float x) {
  if (type == DType::kBFloat16) return to_float(to_bf16(x));
  if (type == DType::kFloat16) return to_float(to_f16(x));
  return x;
}

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

// Rows of `values` [rows, cols] as activations with a stride.
inline std::vector<char> activations(const Kernels& kernels, DType type, const std::vector<float>& values, size_t rows,
                                     size_t cols, size_t stride) {
  const int unit = kernels.activation_bytes[static_cast<int>(type)];
  std::vector<char> out(rows * stride * unit);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < cols; ++c) {
      const float value = rounded(type, values[r * cols + c]);
      char* place = out.data() + (r * stride + c) * unit;
      if (unit == 4) {
        std::memcpy(place, &value, 4);
      } else {
        const bf16 half = to_bf16(value);
        std::memcpy(place, &half, 2);
      }
    }
  }
  return out;
}

inline float read_activation(const Kernels& kernels, DType type, const void* data, size_t index) {
  if (kernels.activation_bytes[static_cast<int>(type)] == 4) return static_cast<const float*>(data)[index];
  return to_float(static_cast<const bf16*>(data)[index]);
}

}  // namespace tidewheel::test
