// Linear recurrences: the gated delta rule, and Mamba2's recurrence, which is the same without the correction.
#include <cstring>

#include "kernels/table.h"
#include "simd.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kVectors = kStateColumns / kLanes;  // in a block of the state's columns
static_assert(kStateColumns % kLanes == 0);
constexpr int kChains = 2;  // separate sums over rows, because a single one would be latency-bound

// Computes `Blocks` blocks of the state's columns, from column c on. Columns do not depend on each other, so they stay
// in the L1 cache while all tokens are computed. A sum over rows has the same order for every token, in every batch.
template <int Blocks>
void recur_columns(const RecurrenceArgs& args, int c) {
  constexpr int kWidth = Blocks * kStateColumns, kAll = Blocks * kVectors;
  const int rows = args.key_dim;
  const int count = args.value_dim - c < kWidth ? args.value_dim - c : kWidth;
  float* const state = args.state + size_t(c) * rows;
  const auto at = [&](int row, int i) {
    return state + (size_t(i / kVectors) * rows + row) * kStateColumns + i % kVectors * kLanes;
  };
  for (int t = 0; t < args.num_tokens; ++t) {
    const float* const q = args.q + t * args.stride;
    const float* const k = args.k + t * args.stride;
    float* const v = args.v + t * args.stride + c;
    const F decay = set1(args.decay[t * args.gate_stride]), beta = set1(args.beta[t * args.gate_stride]);
    float lanes[kWidth] = {};
    std::memcpy(lanes, v, count * sizeof(float));
    F value[kAll], added[kAll];
    for (int i = 0; i < kAll; ++i) value[i] = load(lanes + i * kLanes);
    if (args.delta) {
      F sums[kChains][kAll];
      for (int j = 0; j < kChains; ++j) {
        for (int i = 0; i < kAll; ++i) sums[j][i] = zero();
      }
      int row = 0;
      for (; row + kChains <= rows; row += kChains) {
        for (int j = 0; j < kChains; ++j) {
          const F key = set1(k[row + j]);
          for (int i = 0; i < kAll; ++i) sums[j][i] = fma(load(at(row + j, i)), key, sums[j][i]);
        }
      }
      for (; row < rows; ++row) {
        const F key = set1(k[row]);
        for (int i = 0; i < kAll; ++i) sums[0][i] = fma(load(at(row, i)), key, sums[0][i]);
      }
      for (int i = 0; i < kAll; ++i) {
        added[i] = mul(beta, sub(value[i], mul(decay, add(sums[0][i], sums[1][i]))));
      }
    } else {
      for (int i = 0; i < kAll; ++i) added[i] = mul(beta, value[i]);
    }
    F out[kChains][kAll];
    for (int i = 0; i < kAll; ++i) {
      out[0][i] = mul(set1(args.skip), value[i]);
      for (int j = 1; j < kChains; ++j) out[j][i] = zero();
    }
    const auto update = [&](int row, F (&sum)[kAll]) {
      const F key = set1(k[row]), query = set1(q[row]);
      for (int i = 0; i < kAll; ++i) {
        const F next = fma(added[i], key, mul(decay, load(at(row, i))));
        store(at(row, i), next);
        sum[i] = fma(next, query, sum[i]);
      }
    };
    int row = 0;
    for (; row + kChains <= rows; row += kChains) {
      for (int j = 0; j < kChains; ++j) update(row + j, out[j]);
    }
    for (; row < rows; ++row) update(row, out[0]);
    for (int i = 0; i < kAll; ++i) store(lanes + i * kLanes, add(out[0][i], out[1][i]));
    std::memcpy(v, lanes, count * sizeof(float));
  }
}

}  // namespace

void recur(const RecurrenceArgs& args) {
  int c = 0;
  for (; c + kStateColumns < args.value_dim; c += 2 * kStateColumns) recur_columns<2>(args, c);
  if (c < args.value_dim) recur_columns<1>(args, c);
}

}  // namespace tidewheel::TW_ISA
