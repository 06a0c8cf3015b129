// Packs weights of a checkpoint into panels, and quantizes them if the format says so. Quantization has one column in
// each lane. The sequence of operations for a column does not depend on the vector length, so every ISA level stores
// the same integers and scales.
#include "kernels/lanes.h"
#include "kernels/table.h"
#include "kernels/widened.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kLargestGroup = 128;
constexpr int kAheadBytes = 4 * kLineBytes;

// The step sizes that int4 quantization tries, relative to the one that exactly spans a group's values.
constexpr float kInt4Steps[] = {1.03f, 0.96f, 0.89f, 0.82f};

// Units of four bytes are transposed in vectors, whatever their type.
template <typename T>
constexpr bool kFourBytes = sizeof(T) * kFloatUnit<T> == 4;

// The offset of a packed column of floats, in elements. Consecutive units of a column are kPanel units apart.
template <typename T>
TW_INLINE size_t float_column(int k, int column) {
  const size_t panel = size_t(round_up_to(k, kFloatRun<T>)) * kPanel;
  return column / kPanel * panel + column % kPanel * kFloatUnit<T>;
}

// Prefetches the cache lines of rows that are read side by side.
TW_INLINE void prefetch_row(const void* row) { prefetch(static_cast<const char*>(row) + kAheadBytes); }

template <typename T, typename S>
void pack_floats(const PackWeightsArgs& args) {
  constexpr int kUnit = kFloatUnit<T>, kFour = 4 * kUnit;
  const S* source = static_cast<const S*>(args.source);
  for (int begin = args.row_begin; begin < args.row_end;) {
    // Rows that become neighbours in a panel are packed together, so that panel rows are written whole.
    const int column = packed_column(args, begin), count = run_length(args, begin, kPanel);
    T* weight = static_cast<T*>(args.weight) + float_column<T>(args.k, column);
    const S* rows = source + (begin - args.row_begin) * args.row_stride;
    int k = 0;
    if constexpr (__is_same(S, T) && kFourBytes<T>) {
      for (; args.col_stride == 1 && count % 4 == 0 && k + kFour <= args.cols; k += kFour) {
        for (int r = 0; r < count; r += 4) {
          const S* in = rows + r * args.row_stride + k;
          if (k * sizeof(S) % kLineBytes == 0) {
            for (int i = 0; i < 4; ++i) prefetch_row(in + i * args.row_stride);
          }
          transpose_four(in, args.row_stride * sizeof(S), weight + (size_t(k) * kPanel + r * kUnit), kPanel * 4);
        }
      }
    } else if constexpr (__is_same(S, T) && kUnit > 1) {
      for (; args.col_stride == 1 && k + kUnit <= args.cols; k += kUnit) {
        for (int r = 0; r < count; ++r) {
          std::memcpy(weight + (size_t(k) * kPanel + r * kUnit), rows + r * args.row_stride + k, sizeof(T) * kUnit);
        }
      }
    }
    for (; k < args.cols; k += kUnit) {
      T* line = weight + size_t(k) * kPanel;
      for (int j = 0; j < kUnit && k + j < args.cols; ++j) {
        const S* element = rows + (k + j) * args.col_stride;
        for (int r = 0; r < count; ++r) {
          if constexpr (__is_same(S, T)) {
            line[r * kUnit + j] = element[r * args.row_stride];
          } else {
            line[r * kUnit + j] = from_float<T>(to_float(element[r * args.row_stride]));
          }
        }
      }
    }
    begin += count;
  }
}

// Reads up to kLargestGroup consecutive inputs of a source row, with zeros after the row's end.
template <typename S>
void read_group(const PackWeightsArgs& args, int row, int begin, int size, float* out) {
  const S* x = static_cast<const S*>(args.source) + (row - args.row_begin) * args.row_stride + begin * args.col_stride;
  const int count = args.cols - begin < size ? args.cols - begin : size;
  if (args.col_stride == 1) {
    for (int i = 0; i < count; i += kLineBytes / static_cast<int>(sizeof(S))) prefetch_row(x + i);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i));
    for (; i < count; ++i) out[i] = to_float(x[i]);
  } else {
    for (int i = 0; i < count; ++i) out[i] = to_float(x[i * args.col_stride]);
  }
  for (int i = count; i < size; ++i) out[i] = 0.0f;
}

// Reads `size` consecutive inputs of `count` source rows, one row a lane: `out` [size][kLanes], with zeros in lanes
// without a row.
template <typename S>
void read_lanes(const PackWeightsArgs& args, int row, int count, int begin, int size, float* out) {
  float rows[kLanes * kLargestGroup];
  for (int r = 0; r < count; ++r) read_group<S>(args, row + r, begin, size, rows + r * size);
  for (int i = count * size; i < kLanes * size; ++i) rows[i] = 0.0f;
  for (int r = 0; r < kLanes; r += 4) {
    for (int i = 0; i < size; i += 4) transpose_four(rows + r * size + i, size * 4, out + i * kLanes + r, kLanes * 4);
  }
}

TW_INLINE F clamp(F x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

// 1 / x, or 0 for 0.
TW_INLINE F inverse_of(F x) { return select_less(zero(), abs(x), div(set1(1.0f), x), zero()); }

template <typename S>
float largest_in_row(const PackWeightsArgs& args, int row) {
  float x[kRowGroup];
  F largest = zero();
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_group<S>(args, row, i, kRowGroup, x);
    for (int j = 0; j < kRowGroup; j += kLanes) largest = max(abs(load(x + j)), largest);
  }
  return hmax(largest);
}

// The q from 0 to 15 with scale * q + shift nearest to x.
TW_INLINE F int4_level(F x, F inverse, F shift) { return round(clamp(mul(sub(x, shift), inverse), 0.0f, 15.0f)); }

// A group's values as a line, with one column in each lane: the slope, and the value at the middle of q, 7.5. Without
// zero points, the line passes through 0 at q = 8, and the middle is not used.
struct Int4Line {
  F scale, middle;
};

// Tries a few step sizes around the one that exactly spans the values, and takes the best. Clipping the extremes a
// little often costs less than a coarse step for all other values. For each step size it chooses the integers, and then
// the line that fits the values best. With y = q - centre, the slope is sum(x y) / sum(y y), which reduces the sum of
// squares by sum(x y)^2 / sum(y y). With zero points the line need not pass through 0: x and y are then relative to
// their means.
Int4Line find_int4_line(const float* x, int size, bool zero_points) {
  F low = load(x), high = low, total = zero();
  for (int i = 0; i < size; ++i) {
    const F value = load(x + i * kLanes);
    low = min(value, low);
    high = max(value, high);
    total = add(total, value);
  }
  // Without zero points, 16 levels reach from -8 to 7. The longer side gets the 8, with a negative scale if necessary.
  const F longer = select_less(high, sub(zero(), low), low, high);
  const F span = zero_points ? div(sub(high, low), set1(15.0f)) : div(longer, set1(-8.0f));
  const F middle = zero_points ? mul(add(low, high), set1(0.5f)) : zero();
  const F centre = set1(zero_points ? 7.5f : kNibbleZero);
  const F mean = zero_points ? mul(total, set1(1.0f / static_cast<float>(size))) : zero();
  Int4Line best{zero(), mean};
  F most = set1(-1.0f);
  for (const float part : kInt4Steps) {
    const F step = mul(span, set1(part)), inverse = inverse_of(step), shift = sub(middle, mul(centre, step));
    F products = zero(), squares = zero(), levels = zero();
    for (int i = 0; i < size; ++i) {
      const F value = load(x + i * kLanes), y = sub(int4_level(value, inverse, shift), centre);
      products = add(products, mul(sub(value, mean), y));
      squares = add(squares, mul(y, y));
      levels = add(levels, y);
    }
    const F mean_level = zero_points ? mul(levels, set1(1.0f / static_cast<float>(size))) : zero();
    const F scale = mul(products, inverse_of(sub(squares, mul(levels, mean_level)))), gain = mul(products, scale);
    best.scale = select_less(most, gain, scale, best.scale);
    best.middle = select_less(most, gain, sub(mean, mul(scale, mean_level)), best.middle);
    most = max(gain, most);
  }
  return best;
}

// The byte of input i of a column stored in units. With nibbles, one unit holds the inputs of two.
TW_INLINE uint8_t& byte_at(char* values, int lane, int i) {
  constexpr int kUnit = kIntegerUnit;
  return reinterpret_cast<uint8_t*>(values)[(size_t(i / kUnit) * kLanes + lane) * kUnit + i % kUnit];
}
TW_INLINE int nibble_at(char* values, int lane, int i) {
  constexpr int kUnit = kIntegerUnit;
  const uint8_t both = byte_at(values, lane, i / (2 * kUnit) * kUnit + i % kUnit);
  return i / kUnit % 2 ? both >> 4 : both & 15;
}

float get_half(const char* halves, int lane) {
  f16 half;
  std::memcpy(&half, halves + lane * sizeof(f16), sizeof(f16));
  return to_float(half);
}

// Writes numbers with one column in each lane.
struct NumberLanes : Lanes {
  // Stores numbers as float16, and returns the rounded numbers, for which the integers are then chosen.
  F put_halves(char* to, F numbers) const {
    f16 halves[kLanes];
    store(halves, numbers);
    put(to, halves);
    return load(halves);
  }

  // `bytes` [kIntegerUnit][kLanes]: integers from 0 to 255. The bits of `flip` are inverted in each stored byte.
  void put_units(char* to, const float* bytes, uint8_t flip = 0) const {
    struct Unit {
      uint32_t quads[kIntegerUnit / kQuad];
    };
    Unit units[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      for (int q = 0; q < kIntegerUnit / kQuad; ++q) {
        const auto byte = [&](int j) {
          const int shift = 8 * (kLittleEndian ? j : kQuad - 1 - j);
          return static_cast<uint32_t>(static_cast<int>(bytes[(q * kQuad + j) * kLanes + i])) << shift;
        };
        units[i].quads[q] = (byte(0) | byte(1) | byte(2) | byte(3)) ^ flip * 0x01010101u;
      }
    }
    put(to, units);
  }

  // Stores `x` [kRowGroup][kLanes] as units.
  void put_int8(char* to, const float* x, F scale) const {
    const F inverse = inverse_of(scale);
    float q[kIntegerUnit * kLanes];
    for (int i = 0; i < kRowGroup; i += kIntegerUnit) {
      for (int b = 0; b < kIntegerUnit; ++b) {
        const F rounded = round(clamp(mul(load(x + (i + b) * kLanes), inverse), -127.0f, 127.0f));
        store(q + b * kLanes, add(rounded, set1(128.0f)));
      }
      put_units(to + i * kLanes, q, kInt8Flip);
    }
  }

  // Stores `x` [size][kLanes] as nibbles.
  void put_int4(char* to, const float* x, int size, F scale, F shift) const {
    const F inverse = inverse_of(scale);
    float q[kIntegerUnit * kLanes];
    for (int i = 0; i < size; i += 2 * kIntegerUnit) {
      for (int b = 0; b < kIntegerUnit; ++b) {
        const float* low = x + (i + b) * kLanes;
        const F high = int4_level(load(low + kIntegerUnit * kLanes), inverse, shift);
        store(q + b * kLanes, add(int4_level(load(low), inverse, shift), mul(high, set1(16.0f))));
      }
      put_units(to + i / 2 * kLanes, q);
    }
  }
};

template <typename S>
void pack_int8_channel(const PackWeightsArgs& args, int row, const NumberLanes& lanes) {
  float x[kRowGroup * kLanes], scales[kLanes] = {};
  for (int r = 0; r < lanes.count; ++r) scales[r] = largest_in_row<S>(args, row + r) / 127.0f;
  lanes.put(lanes.first.strip + size_t(channel_inputs(args.k)) * kLanes, scales);
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_lanes<S>(args, row, lanes.count, i, kRowGroup, x);
    lanes.put_int8(lanes.first.strip + size_t(i) * kLanes, x, load(scales));
  }
}

template <typename S>
void pack_groups(const WeightFormat& format, const PackWeightsArgs& args, int row, const NumberLanes& lanes) {
  const GroupLayout layout = GroupLayout::of(format, args.k);
  float x[kLargestGroup * kLanes];
  for (int g = 0; g < layout.groups; ++g) {
    read_lanes<S>(args, row, lanes.count, g * format.group, format.group, x);
    char* scales = lanes.first.strip + layout.scale_at(g);
    char* values = lanes.first.strip + layout.values_at(g);
    if (format.kind == WeightKind::kInt8) {
      F largest = zero();
      for (int j = 0; j < kRowGroup; ++j) largest = max(abs(load(x + j * kLanes)), largest);
      lanes.put_int8(values, x, lanes.put_halves(scales, div(largest, set1(127.0f))));
      continue;
    }
    const Int4Line line = find_int4_line(x, format.group, format.zero_points);
    const F scale = lanes.put_halves(scales, line.scale);
    F shift = mul(set1(-kNibbleZero), scale);
    if (format.zero_points) {
      shift = lanes.put_halves(scales + layout.shift_bytes, sub(line.middle, mul(set1(7.5f), scale)));
    }
    lanes.put_int4(values, x, format.group, scale, shift);
  }
}

template <typename S>
void pack_integers(const WeightFormat& format, const PackWeightsArgs& args) {
  for (int row = args.row_begin; row < args.row_end;) {
    const Column first = find_column(format, args.weight, args.k, packed_column(args, row));
    const NumberLanes lanes{{first, run_length(args, row, kLanes)}};
    if (format.kind == WeightKind::kInt8Channel) {
      pack_int8_channel<S>(args, row, lanes);
    } else {
      pack_groups<S>(format, args, row, lanes);
    }
    row += lanes.count;
  }
}

template <typename S>
void pack_from(const WeightFormat& format, const PackWeightsArgs& args) {
  switch (format.kind) {
    case WeightKind::kFloat32: return pack_floats<float, S>(args);
    case WeightKind::kBFloat16: return pack_floats<bf16, S>(args);
    case WeightKind::kFloat16: return pack_floats<f16, S>(args);
    default: return pack_integers<S>(format, args);
  }
}

template <typename T>
void unpack_floats(const void* weight, int k, int row, float* out) {
  constexpr int kUnit = kFloatUnit<T>;
  const T* column = static_cast<const T*>(weight) + float_column<T>(k, row);
  for (int i = 0; i < k; ++i) out[i] = to_float(column[size_t(i / kUnit) * kPanel * kUnit + i % kUnit]);
}

void unpack_integers(const WeightFormat& format, const void* weight, int k, int row, float* out) {
  const Column column = find_column(format, const_cast<void*>(weight), k, row);
  if (format.kind == WeightKind::kInt8Channel) {
    const char* scales = column.strip + size_t(channel_inputs(k)) * kLanes;
    float scale;
    std::memcpy(&scale, scales + column.lane * sizeof(float), sizeof(float));
    for (int i = 0; i < k; ++i) {
      out[i] = scale * static_cast<float>((byte_at(column.strip, column.lane, i) ^ kInt8Flip) - 128);
    }
    return;
  }
  const GroupLayout layout = GroupLayout::of(format, k);
  for (int i = 0; i < k; ++i) {
    const int g = i / format.group, j = i % format.group;
    const char* scales = column.strip + layout.scale_at(g);
    char* values = column.strip + layout.values_at(g);
    const float scale = get_half(scales, column.lane);
    if (format.kind == WeightKind::kInt8) {
      out[i] = scale * static_cast<float>((byte_at(values, column.lane, j) ^ kInt8Flip) - 128);
      continue;
    }
    const float q = static_cast<float>(nibble_at(values, column.lane, j));
    out[i] = format.zero_points ? scale * q + get_half(scales + layout.shift_bytes, column.lane)
                                : scale * (q - static_cast<float>(kNibbleZero));
  }
}

}  // namespace

size_t panel_bytes(const WeightFormat& format, int k) {
  switch (format.kind) {
    case WeightKind::kFloat32: return sizeof(float) * kPanel * k;
    case WeightKind::kBFloat16: return sizeof(bf16) * kPanel * float_steps<bf16>(k) * Element<bf16>::kStep;
    case WeightKind::kFloat16: return sizeof(f16) * kPanel * k;
    case WeightKind::kE4m3:
    case WeightKind::kTable4: return widened_panel_bytes(format, k);
    default: return kStrips * strip_bytes(format, k);
  }
}

void pack_weights(const WeightFormat& format, const PackWeightsArgs& args) {
  switch (args.source_type) {
    case DType::kFloat32: return pack_from<float>(format, args);
    case DType::kBFloat16: return pack_from<bf16>(format, args);
    case DType::kFloat16: return pack_from<f16>(format, args);
  }
}

void unpack_row(const WeightFormat& format, const void* weight, int k, int row, float* out) {
  switch (format.kind) {
    case WeightKind::kFloat32: return unpack_floats<float>(weight, k, row, out);
    case WeightKind::kBFloat16: return unpack_floats<bf16>(weight, k, row, out);
    case WeightKind::kFloat16: return unpack_floats<f16>(weight, k, row, out);
    case WeightKind::kInt8:
    case WeightKind::kInt8Channel:
    case WeightKind::kInt4: return unpack_integers(format, weight, k, row, out);
    case WeightKind::kE4m3:
    case WeightKind::kTable4: return unpack_widened_row(format, weight, k, row, out);
    default: return unpack_blocks_row(format, weight, k, row, out);
  }
}

}  // namespace tidewheel::TW_ISA
