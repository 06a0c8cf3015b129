// Sub-blocks side by side, a lane for each, so that a search does the same for all. A lane's results depend on its own
// sub-block alone: not on the vectors' width, nor on what is beside it.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/block_formats.h"
#include "quantize/quantize.h"
#include "simd.h"

namespace tidewheel::TW_ISA {

constexpr int kBatch = 16;  // sub-blocks
static_assert(kBatch % kLanes == 0);

// Larger numbers are beyond all scales, and their squares beyond float32.
constexpr float kLargestInput = 1e9f;

// Step sizes that are tried, evenly from the first to the last, relative to the one that exactly spans the values:
// clipping the extremes a little often costs less than a coarse step for all others. `turned` more have the other sign,
// so that the other code with the largest magnitude is at the extreme. `rounds` is how often codes and scale are fitted
// to each other, and `turns` how often those of a block are. The figures are those with which real weights have the least
// error for the time.
struct Starts {
  int count;
  float first, last;
  int turned;
  float turned_first, turned_last;
  int rounds, turns;

  float part(int i) const {
    if (i < count) return between(first, last, i, count);
    return -between(turned_first, turned_last, i - count, turned);
  }
  int all() const { return count + turned; }

 private:
  static float between(float from, float to, int i, int number) {
    return number > 1 ? from + (to - from) * static_cast<float>(i) / static_cast<float>(number - 1) : from;
  }
};

// A number for each lane.
struct alignas(64) PerLane {
  float v[kBatch];
};

// Sub-blocks of SIZE elements, SUBS of which are a block, element by element: [SIZE][kBatch].
template <int SIZE, int SUBS>
struct Batch {
  static constexpr int kSize = SIZE, kSubs = SUBS, kBlocks = kBatch / SUBS;

  PerLane x[SIZE], w[SIZE];  // elements, and how much their errors count
  PerLane q[SIZE];           // the codes that were chosen

  // Takes `count` blocks from number `first` on; the other lanes are 0.
  void read(const QuantizeArgs& args, int64_t first, int count) {
    const int row_blocks = args.cols / (SIZE * SUBS);
    float values[SIZE * SUBS];
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t block = first + b;
      const int begin = static_cast<int>(block % row_blocks) * SIZE * SUBS;
      if (b < count) {
        read_values(args, static_cast<size_t>(block / row_blocks) * args.row_bytes, begin, values);
      } else {
        for (float& value : values) value = 0;
      }
      for (int s = 0; s < SUBS; ++s) {
        for (int i = 0; i < SIZE; ++i) x[i].v[b * SUBS + s] = values[s * SIZE + i];
      }
      for (int s = 0; s < SUBS; ++s) {
        for (int i = 0; i < SIZE; ++i) {
          w[i].v[b * SUBS + s] = args.importance && b < count ? args.importance[begin + s * SIZE + i] : 1.0f;
        }
      }
    }
    weigh();
  }

 private:
  static void read_values(const QuantizeArgs& args, size_t row, int begin, float* values) {
    const char* from = args.x + row + size_t(begin) * dtype_bytes(args.source_type);
    const auto convert = [&](auto element) {
      for (int i = 0; i < SIZE * SUBS; ++i) {
        std::memcpy(&element, from + i * sizeof element, sizeof element);
        const float value = to_float(element);
        values[i] = value < -kLargestInput ? -kLargestInput : value > kLargestInput ? kLargestInput : value;
      }
    };
    switch (args.source_type) {
      case DType::kFloat32: return convert(float{});
      case DType::kBFloat16: return convert(bf16{});
      case DType::kFloat16: return convert(f16{});
    }
  }

  // An error counts more where numbers are large: as 1 + |x| / sqrt(mean(x^2)). Of real weights these matter most, and
  // the plain sum of squares stays almost as small.
  void weigh() {
    for (int lane = 0; lane < kBatch; lane += kLanes) {
      F squares = zero();
      for (int i = 0; i < SIZE; ++i) {
        const F value = load(x[i].v + lane);
        squares = add(squares, mul(value, value));
      }
      float root[kLanes];
      store(root, mul(squares, set1(1.0f / SIZE)));
      for (float& mean : root) mean = std::sqrt(mean > 1e-30f ? mean : 1e-30f);
      const F inverse = div(set1(1.0f), load(root));
      for (int i = 0; i < SIZE; ++i) {
        const F size = mul(abs(load(x[i].v + lane)), inverse);
        store(w[i].v + lane, mul(load(w[i].v + lane), add(set1(1.0f), size)));
      }
    }
  }
};

// 1 / x, and 0 of what has no inverse.
TW_INLINE F inverse_or_zero(F x) { return select_less(abs(x), set1(1e-37f), zero(), div(set1(1.0f), x)); }

// As binary16 has it, and not above its largest number.
TW_INLINE float half_of(float x) {
  const float limited = x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
  return to_float(to_f16(limited));
}

TW_INLINE F half_of(F x) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = half_of(lane);
  return load(lanes);
}

TW_INLINE F clamp(F x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

}  // namespace tidewheel::TW_ISA
