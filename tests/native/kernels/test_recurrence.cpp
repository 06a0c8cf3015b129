#include <doctest/doctest.h>

#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

float sigmoid(double x) { return static_cast<float>(1 / (1 + std::exp(-x))); }

// A state as the kernel keeps it.
float& at(std::vector<float>& state, int key_dim, int row, int column) {
  return state[(size_t(column / kStateColumns) * key_dim + row) * kStateColumns + column % kStateColumns];
}

}  // namespace

TEST_CASE("recurrences agree with their definitions, whatever the sizes, at once or token by token") {
  Random random;
  constexpr int kTokens = 5, kGateStride = 3;
  for (const Kernels* kernels : tested_kernels()) {
    for (const bool delta : {true, false}) {
      for (const auto& [keys, values] : {std::pair{1, 1}, {9, 37}, {16, 16}, {24, 48}, {65, 100}}) {
        CAPTURE(kernels->name);
        CAPTURE(delta);
        CAPTURE(keys);
        CAPTURE(values);
        const int stride = 2 * keys + values + 3;
        const float skip = delta ? 0.0f : 0.6f;
        auto rows = random.normals(kTokens * stride, 0.4f);
        std::vector<float> decay(kTokens * kGateStride), beta(kTokens * kGateStride);
        for (float& gate : decay) gate = sigmoid(random.normals(1)[0]);
        for (float& gate : beta) gate = sigmoid(random.normals(1)[0]);
        std::vector<float> state(recurrence_state_floats(keys, values));
        std::vector<double> expected(size_t(keys) * values);
        for (int row = 0; row < keys; ++row) {
          for (int column = 0; column < values; ++column) {
            at(state, keys, row, column) = random.normals(1)[0];
            expected[row * values + column] = at(state, keys, row, column);
          }
        }
        const auto original = rows;
        auto single = rows, single_state = state;
        const auto recur = [&](std::vector<float>& x, std::vector<float>& s, int begin, int count) {
          float* const first = x.data() + begin * stride;
          kernels->recur({first, first + keys, first + 2 * keys, size_t(stride), count, keys, values,
                          decay.data() + begin * kGateStride, beta.data() + begin * kGateStride, kGateStride, s.data(), delta,
                          skip});
        };
        recur(rows, state, 0, kTokens);
        for (int t = 0; t < kTokens; ++t) recur(single, single_state, t, 1);
        CHECK(single == rows);
        CHECK(single_state == state);
        for (int t = 0; t < kTokens; ++t) {
          const float* const q = original.data() + t * stride;
          const float* const k = q + keys;
          const float* const v = k + keys;
          for (int column = 0; column < values; ++column) {
            double held = 0, out = skip * double{v[column]};
            for (int row = 0; row < keys; ++row) {
              expected[row * values + column] *= decay[t * kGateStride];
              held += expected[row * values + column] * k[row];
            }
            const double added = double{beta[t * kGateStride]} * (v[column] - (delta ? held : 0.0));
            for (int row = 0; row < keys; ++row) {
              expected[row * values + column] += k[row] * added;
              out += expected[row * values + column] * q[row];
            }
            CHECK(rows[t * stride + 2 * keys + column] == doctest::Approx(out).epsilon(1e-4).scale(1.0));
          }
          // Nothing but the values is written.
          for (int i = 0; i < 2 * keys; ++i) CHECK(rows[t * stride + i] == original[t * stride + i]);
          for (int i = 2 * keys + values; i < stride; ++i) CHECK(rows[t * stride + i] == original[t * stride + i]);
        }
        for (int row = 0; row < keys; ++row) {
          for (int column = 0; column < values; ++column) {
            CHECK(at(state, keys, row, column) == doctest::Approx(expected[row * values + column]).epsilon(1e-4).scale(1.0));
          }
        }
      }
    }
  }
}

TEST_CASE("convolutions agree with their definition, whatever the sizes and gates, at once or token by token") {
  Random random;
  constexpr int kTokens = 37;  // more than pass together
  for (const Kernels* kernels : tested_kernels()) {
    for (const int taps : {1, 3, 4, kMaxConvTaps}) {
      for (const int channels : {1, 15, 16, 40}) {
        for (const bool gated : {false, true}) {
          CAPTURE(kernels->name);
          CAPTURE(taps);
          CAPTURE(channels);
          CAPTURE(gated);
          const int stride = channels + 5, weight_stride = channels + 2, before = taps - 1;
          const auto weight = random.normals(taps * weight_stride), bias = random.normals(channels);
          const auto input_gate = random.normals(kTokens * stride), output_gate = random.normals(kTokens * stride);
          auto x = random.normals(kTokens * stride), state = random.normals(std::max(before, 1) * weight_stride);
          const auto original = x, past = state;
          auto single = x, single_state = state;
          const auto convolve = [&](std::vector<float>& rows, std::vector<float>& kept, int begin, int count) {
            const size_t offset = size_t(begin) * stride;
            kernels->convolve({rows.data() + offset, size_t(stride), count, channels, taps, weight.data(),
                               gated ? nullptr : bias.data(), size_t(weight_stride), kept.data(), !gated,
                               gated ? input_gate.data() + offset : nullptr, gated ? output_gate.data() + offset : nullptr});
          };
          convolve(x, state, 0, kTokens);
          for (int t = 0; t < kTokens; ++t) convolve(single, single_state, t, 1);
          CHECK(single == x);
          CHECK(single_state == state);
          const auto input = [&](int t, int c) {
            if (t < 0) return double{past[(before + t) * weight_stride + c]};
            return double{original[t * stride + c]} * (gated ? input_gate[t * stride + c] : 1.0f);
          };
          for (int t = 0; t < kTokens; ++t) {
            for (int c = 0; c < channels; ++c) {
              double y = gated ? 0.0 : bias[c];
              for (int j = 0; j < taps; ++j) y += input(t - before + j, c) * weight[j * weight_stride + c];
              y *= gated ? double{output_gate[t * stride + c]} : 1 / (1 + std::exp(-y));
              CHECK(x[t * stride + c] == doctest::Approx(y).epsilon(1e-4).scale(1.0));
            }
            for (int c = channels; c < stride; ++c) CHECK(x[t * stride + c] == original[t * stride + c]);
          }
          for (int j = 0; j < before; ++j) {
            for (int c = 0; c < channels; ++c) {
              CHECK(state[j * weight_stride + c] == doctest::Approx(input(kTokens - before + j, c)).epsilon(1e-6).scale(1.0));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("gates multiply what they are beside") {
  Random random;
  for (const Kernels* kernels : tested_kernels()) {
    for (const Gate gate : {Gate::kSigmoid, Gate::kSilu}) {
      for (const int size : {1, 16, 37}) {
        CAPTURE(kernels->name);
        CAPTURE(size);
        const auto by = random.normals(size), original = random.normals(size);
        auto x = original;
        kernels->multiply_gate(gate, by.data(), size, x.data());
        for (int i = 0; i < size; ++i) {
          const double factor = sigmoid(by[i]) * (gate == Gate::kSilu ? double{by[i]} : 1.0);
          CHECK(x[i] == doctest::Approx(original[i] * factor).epsilon(1e-4).scale(1.0));
        }
      }
    }
  }
}
