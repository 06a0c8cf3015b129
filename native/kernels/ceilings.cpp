// This level's peak rates on this machine: only the instructions of its micro-kernels, and plain memory reads.
#include "kernels/table.h"
#include "micro_kernels.h"

namespace tidewheel::TW_ISA {

double peak_float32(int rounds) { return FloatRows<float>::peak(rounds); }

double peak_bfloat16(int rounds) { return FloatRows<bf16>::peak(rounds); }

double peak_int8(int rounds) { return Int8ChannelRows::peak(rounds); }

double read_memory(const void* data, size_t bytes) {
  const float* p = static_cast<const float*>(data);
  const size_t count = bytes / sizeof(float) / (8 * kLanes) * (8 * kLanes);
  F acc[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) acc[j] = zero();
  for (size_t i = 0; i < count; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      acc[j] = add(acc[j], load(p + i + j * kLanes));
    }
    prefetch(reinterpret_cast<const char*>(p + i) + 4096);
  }
  F sum = zero();
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) sum = add(sum, acc[j]);
  return static_cast<double>(count * sizeof(float)) + kPeakTrace * hsum(sum);
}

}  // namespace tidewheel::TW_ISA
