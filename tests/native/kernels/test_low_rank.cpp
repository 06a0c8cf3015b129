#include <doctest/doctest.h>

#include "kernels/kernels.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// A matrix [outputs, inputs] in LoRA panels.
std::vector<char> packed(DType type, const std::vector<float>& values, int outputs, int inputs) {
  const int lora_panels = (outputs + kLoraPanel - 1) / kLoraPanel, step = lora_panel_step(type);
  std::vector<char> bytes(lora_panels * lora_panel_bytes(inputs, type));
  for (int o = 0; o < outputs; ++o) {
    for (int i = 0; i < inputs; ++i) {
      const size_t place = size_t(i / step * kLoraPanel + o % kLoraPanel) * step + i % step;
      char* const to = bytes.data() + o / kLoraPanel * lora_panel_bytes(inputs, type) + place * dtype_bytes(type);
      const float value = values[size_t(o) * inputs + i];
      const uint16_t bits = type == DType::kBFloat16 ? to_bf16(value).bits : to_f16(value).bits;
      std::memcpy(to, type == DType::kFloat32 ? static_cast<const void*>(&value) : &bits, dtype_bytes(type));
    }
  }
  return bytes;
}

bool rounds(const Kernels& kernels, DType type) {
  return type == DType::kBFloat16 && kernels.query_bytes[static_cast<int>(CacheType::kBFloat16)] == sizeof(bf16);
}

}  // namespace

TEST_CASE("a projection is the product, and each value has the same bits alone as among others") {
  constexpr int kMaxRows = 5, kMaxLoraPanels = 3, kMaxValues = kMaxLoraPanels * kLoraPanel;
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const DType type : kTypes) {
      for (const int k : {1, 7, 16, 33, 96, 131}) {
        CAPTURE(kernels->name);
        CAPTURE(name_of(type));
        CAPTURE(k);
        const std::vector<float> x = random.normals(kMaxRows * k), w = random.normals(kMaxValues * k);
        const std::vector<char> bytes = packed(type, w, kMaxValues, k);
        const size_t row_floats = k + kLoraPanelInputs;
        std::vector<float> packed_rows(kMaxRows * row_floats);
        for (const auto& [rows, lora_panels] : {std::pair{1, 1}, std::pair{2, 3}, std::pair{3, 1}, std::pair{kMaxRows, kMaxLoraPanels}}) {
          std::vector<float> y(kMaxRows * kMaxValues, -1);
          std::vector<const void*> inputs;
          std::vector<float*> outputs;
          for (int r = 0; r < rows; ++r) {
            float* const row = &packed_rows[r * row_floats];
            // In two pieces, as their values are computed.
            const int first = k / kLoraPanelInputs * kLoraPanelInputs;
            kernels->pack_lora_panel_inputs(type, &x[r * k], 0, first, 0, row);
            kernels->pack_lora_panel_inputs(type, &x[r * k] + first, first, k - first, kLoraPanelInputs, row);
            inputs.push_back(row), outputs.push_back(&y[r * kMaxValues]);
          }
          kernels->project({inputs.data(), rows, k, bytes.data(), type, lora_panels, outputs.data()});
          for (int r = 0; r < rows; ++r) {
            for (int lora_panel = 0; lora_panel < lora_panels; ++lora_panel) {
              float alone[kLoraPanel];
              float* const out = alone;
              kernels->project({&inputs[r], 1, k, bytes.data() + lora_panel * lora_panel_bytes(k, type), type, 1, &out});
              for (int j = 0; j < kLoraPanel; ++j) {
                const int value = lora_panel * kLoraPanel + j;
                double expected = 0, size = 0;
                for (int i = 0; i < k; ++i) {
                  const double product = double{rounded(type, w[value * k + i])} * x[r * k + i];
                  expected += product, size += std::abs(product);
                }
                // Where pairs of bfloat16 are multiplied, x is rounded to it: to 8 bits.
                CHECK(std::abs(y[r * kMaxValues + value] - expected) <= size * (rounds(*kernels, type) ? 0x1p-8 : 1e-5));
                CHECK(y[r * kMaxValues + value] == alone[j]);
              }
            }
            for (int j = lora_panels * kLoraPanel; j < kMaxValues; ++j) CHECK(y[r * kMaxValues + j] == -1);
          }
        }
      }
    }
  }
}
