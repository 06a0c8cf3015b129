// Quantizes to grids. A group's numbers are added up in kGridStep sums and no operation is fused, so that every ISA level
// stores the same bits.
#include <algorithm>
#include <cstring>

#include "kernels/table.h"
#include "quantize/grid.h"
#include "simd.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kVectors = kGridStep / kLanes;
static_assert(kGridStep % kLanes == 0 && kGridStrip % kLanes == 0);

// Parts of a group's range that scales are tried for, evenly from the first to the last. Then the best is fitted to its
// codes, a few times.
constexpr int kParts = 17, kFits = 2;
constexpr float kFirstPart = 1.0f, kLastPart = 0.6f;

// The scale as it is stored: above 0, because all are divided by.
float storable(float scale, DType type) {
  const auto within = [&](float low, float high) { return scale < low ? low : scale > high ? high : scale; };
  switch (type) {
    case DType::kFloat16: return to_float(to_f16(within(0x1p-24f, 65504.0f)));
    case DType::kBFloat16: return to_float(to_bf16(within(0x1p-126f, 3e38f)));
    case DType::kFloat32: break;
  }
  return within(0x1p-126f, 3e38f);
}

struct Sums {
  F v[kVectors];

  float total() const {
    float sums[kGridStep];
    for (int i = 0; i < kVectors; ++i) store(sums + i * kLanes, v[i]);
    for (int width = kGridStep / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    }
    return sums[0];
  }
};

// Calls `body(place, vector)` for all numbers of a group.
template <typename Body>
[[gnu::always_inline]] inline void each_vector(int group, Body&& body) {
  for (int i = 0; i < group; i += kGridStep) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) body(i + v * kLanes, v);
  }
}

TW_INLINE Sums no_sums() {
  Sums sums;
  for (F& sum : sums.v) sum = zero();
  return sums;
}

struct Found {
  float scale, zero;
};

// The search for the scale and the zero of one group.
class GroupSearch {
 public:
  GroupSearch(const Grid& grid, const float* x, const float* importance) : grid_(grid), x_(x), w_(importance) {}

  Found search() {
    F lowest = zero(), highest = zero();
    each_vector(grid_.group, [&](int i, int) {
      const F x = load(x_ + i);
      lowest = min(x, lowest);
      highest = max(x, highest);
    });
    float low = -hmax(sub(zero(), lowest)), high = hmax(highest);
    if (grid_.symmetric) high = std::max(-low, high), low = -high;
    for (int i = 0; i < kParts; ++i) {
      const float part = kFirstPart + (kLastPart - kFirstPart) * static_cast<float>(i) / (kParts - 1);
      const float scale = storable((high - low) * (part / grid_.largest), grid_.scales);
      try_out({scale, grid_.symmetric ? (grid_.largest + 1) / 2 : rounded(-low * part / scale)});
    }
    for (int i = 0; i < kFits; ++i) try_out({fitted(), best_.zero});
    return best_;
  }

 private:
  float rounded(float zero) const {
    float lanes[kLanes];
    store(lanes, round(set1(std::clamp(zero, 0.0f, grid_.largest))));
    return lanes[0];
  }

  // Calls `body(vector, codes less the zero, numbers, weights)` for all.
  template <typename Body>
  [[gnu::always_inline]] void each_step(Found with, Body&& body) const {
    const F inverse = set1(1.0f / with.scale), low = set1(-with.zero), high = set1(grid_.largest - with.zero);
    each_vector(grid_.group, [&](int i, int v) {
      const F x = load(x_ + i);
      body(v, round(min(max(mul(x, inverse), low), high)), x, load(w_ + i));
    });
  }

  void try_out(Found with) {
    Sums sums = no_sums();
    const F scale = set1(with.scale);
    each_step(with, [&](int v, F step, F x, F w) {
      const F error = sub(mul(step, scale), x);
      sums.v[v] = add(sums.v[v], mul(mul(error, error), w));
    });
    const float error = sums.total();
    if (best_.scale == 0 || error < least_) best_ = with, least_ = error;
  }

  // The scale with the least error for the codes that are the best so far.
  float fitted() const {
    Sums squares = no_sums(), products = no_sums();
    each_step(best_, [&](int v, F step, F x, F w) {
      const F weighted = mul(step, w);
      squares.v[v] = add(squares.v[v], mul(weighted, step));
      products.v[v] = add(products.v[v], mul(weighted, x));
    });
    const float all = squares.total();
    return all > 0 ? storable(products.total() / all, grid_.scales) : best_.scale;
  }

  const Grid& grid_;
  const float *x_, *w_;
  Found best_{};  // no scale is 0
  float least_ = 0;
};

// The nearest code, less its zero.
TW_INLINE F nearest(F x, F scale, F low, F high) { return round(min(max(div(x, scale), low), high)); }

TW_INLINE void put_codes(F codes, uint8_t* to) {
  float lanes[kLanes];
  store(lanes, codes);
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(lanes[i]);
}

}  // namespace

void search_grid(const SearchGridArgs& args) {
  const Grid& grid = args.grid;
  const int groups = args.cols / grid.group;
  for (int64_t row = args.row_begin; row < args.row_end; ++row) {
    double error = 0, square = 0;
    for (int g = 0; g < groups; ++g) {
      const float *x = args.x + row * args.cols + g * grid.group, *importance = args.importance + g * grid.group;
      uint8_t* codes = args.codes + row * args.cols + g * grid.group;
      const Found found = GroupSearch(grid, x, importance).search();
      args.scales[row * groups + g] = found.scale;
      args.zeros[row * groups + g] = static_cast<uint8_t>(found.zero);
      const F scale = set1(found.scale), middle = set1(found.zero), low = set1(-found.zero);
      const F high = set1(grid.largest - found.zero);
      Sums errors = no_sums(), squares = no_sums();
      each_vector(grid.group, [&](int i, int v) {
        const F value = load(x + i), w = load(importance + i), step = nearest(value, scale, low, high);
        const F lost = sub(mul(step, scale), value);
        errors.v[v] = add(errors.v[v], mul(mul(lost, lost), w));
        squares.v[v] = add(squares.v[v], mul(mul(value, value), w));
        put_codes(add(step, middle), codes + i);
      });
      error += errors.total();
      square += squares.total();
    }
    args.errors[row] = error;
    args.squares[row] = square;
  }
}

void round_inputs(const RoundInputsArgs& args) {
  struct Line {
    float v[kGridStrip];
  };
  alignas(64) Line errors[kGridBlock];
  for (int64_t strip = args.strip_begin; strip < args.strip_end; ++strip) {
    const int64_t first = strip * kGridStrip;
    const int count = static_cast<int>(std::min<int64_t>(kGridStrip, args.columns - first));
    // Columns behind the last one are rounded to 0.
    const auto read = [&](const float* from, int row, float rest, Line& to) {
      std::memcpy(to.v, from + int64_t{row} * args.columns + first, sizeof(float) * count);
      std::fill(to.v + count, to.v + kGridStrip, rest);
    };
    for (int i = 0; i < args.inputs; ++i) {
      alignas(64) Line wanted, original, scales, zeros, codes;
      read(args.x, i, 0.0f, wanted);
      read(args.originals, i, 0.0f, original);
      read(args.scales, args.groups[i], 1.0f, scales);
      read(args.zeros, args.groups[i], 0.0f, zeros);
      F left[kGridStrip / kLanes];
#pragma GCC unroll 16
      for (int v = 0; v < kGridStrip / kLanes; ++v) left[v] = load(wanted.v + v * kLanes);
      for (int j = 0; j < i; ++j) {
        const F factor = set1(args.factor[j * args.inputs + i]);
#pragma GCC unroll 16
        for (int v = 0; v < kGridStrip / kLanes; ++v) {
          left[v] = add(left[v], mul(factor, load(errors[j].v + v * kLanes)));
        }
      }
      double residual = 0;
      for (int v = 0; v < kGridStrip / kLanes; ++v) {
        const int at = v * kLanes;
        const F scale = load(scales.v + at), middle = load(zeros.v + at), low = sub(zero(), middle);
        const F step = nearest(left[v], scale, low, add(set1(args.largest), low)), rounded = mul(step, scale);
        store(errors[i].v + at, sub(load(original.v + at), rounded));
        store(codes.v + at, add(step, middle));
        store(wanted.v + at, sub(left[v], rounded));
      }
      for (int c = 0; c < count; ++c) {
        const int64_t at = int64_t{i} * args.columns + first + c;
        args.x[at] = errors[i].v[c];
        args.codes[at] = static_cast<uint8_t>(codes.v[c]);
        residual += double{wanted.v[c]} * wanted.v[c];
      }
      args.residuals[strip * args.inputs + i] = residual;
    }
  }
}

}  // namespace tidewheel::TW_ISA
