// Weights from a checkpoint into panels, quantized on the way if the format says so. Quantization has a column in each
// lane: what it computes for one is the same sequence of operations whatever the vectors, so that every ISA level stores
// the same integers and scales.
#include "kernels/layout.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kLargestGroup = 128;

// The steps of int4 that are tried, in parts of the one that just spans a group's values.
constexpr float kInt4Steps[] = {1.03f, 0.96f, 0.89f, 0.82f};

int packed_column(const PackArgs& args, int row) {
  return row / args.group * args.group_stride + row % args.group + args.offset;
}

// How many rows from `row` on land side by side within one block of `width` packed columns.
int run_length(const PackArgs& args, int row, int width) {
  int count = width - packed_column(args, row) % width;
  if (args.group - row % args.group < count) count = args.group - row % args.group;
  return args.row_end - row < count ? args.row_end - row : count;
}

template <typename T, typename S>
void pack_floats(const PackArgs& args) {
  constexpr int kStep = Element<T>::kStep;
  const size_t steps = float_steps<T>(args.k);
  const S* source = static_cast<const S*>(args.source);
  for (int begin = args.row_begin; begin < args.row_end;) {
    // Rows that land side by side in one panel are packed together, so that panel rows are written whole.
    const int column = packed_column(args, begin), count = run_length(args, begin, kPanel);
    T* weight = static_cast<T*>(args.weight) + (column / kPanel * steps * kPanel + column % kPanel) * kStep;
    const S* rows = source + begin * args.row_stride;
    for (int k = 0; k < args.cols; k += kStep) {
      T* line = weight + size_t(k / kStep) * kPanel * kStep;
      for (int j = 0; j < kStep && k + j < args.cols; ++j) {
        const S* element = rows + (k + j) * args.col_stride;
        for (int r = 0; r < count; ++r) {
          if constexpr (__is_same(S, T)) {
            line[r * kStep + j] = element[r * args.row_stride];
          } else {
            line[r * kStep + j] = from_float<T>(to_float(element[r * args.row_stride]));
          }
        }
      }
    }
    begin += count;
  }
}

// Up to kLargestGroup consecutive inputs of a source row; zeros behind the row's end.
template <typename S>
void read_group(const PackArgs& args, int row, int begin, int size, float* out) {
  const S* x = static_cast<const S*>(args.source) + row * args.row_stride + begin * args.col_stride;
  const int count = args.cols - begin < size ? args.cols - begin : size;
  if (args.col_stride == 1) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(x + i));
    for (; i < count; ++i) out[i] = to_float(x[i]);
  } else {
    for (int i = 0; i < count; ++i) out[i] = to_float(x[i * args.col_stride]);
  }
  for (int i = count; i < size; ++i) out[i] = 0.0f;
}

#if defined(__clang__) || __GNUC__ >= 12
using Four = float __attribute__((vector_size(16)));

// Columns `in` [4][in_stride] become rows `out` [4][kLanes].
TW_INLINE void transpose_four(const float* in, int in_stride, float* out) {
  Four a, b, c, d;
  std::memcpy(&a, in, sizeof a);
  std::memcpy(&b, in + in_stride, sizeof b);
  std::memcpy(&c, in + 2 * in_stride, sizeof c);
  std::memcpy(&d, in + 3 * in_stride, sizeof d);
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Four ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Four rows[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                       __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                       __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(out + i * kLanes, &rows[i], sizeof rows[i]);
}
#else
TW_INLINE void transpose_four(const float* in, int in_stride, float* out) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) out[i * kLanes + j] = in[j * in_stride + i];
  }
}
#endif

// `size` consecutive inputs of `count` source rows, one a lane: `out` [size][kLanes], zeros where there is no source.
template <typename S>
void read_lanes(const PackArgs& args, int row, int count, int begin, int size, float* out) {
  float rows[kLanes * kLargestGroup];
  for (int r = 0; r < count; ++r) read_group<S>(args, row + r, begin, size, rows + r * size);
  for (int i = count * size; i < kLanes * size; ++i) rows[i] = 0.0f;
  for (int r = 0; r < kLanes; r += 4) {
    for (int i = 0; i < size; i += 4) transpose_four(rows + r * size + i, size, out + i * kLanes + r);
  }
}

TW_INLINE F clamp(F x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

// 1 / x, or 0 for 0.
TW_INLINE F inverse_of(F x) { return select_less(zero(), abs(x), div(set1(1.0f), x), zero()); }

template <typename S>
float largest_in_row(const PackArgs& args, int row) {
  float x[kRowGroup];
  F largest = zero();
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_group<S>(args, row, i, kRowGroup, x);
    for (int j = 0; j < kRowGroup; j += kLanes) largest = max(abs(load(x + j)), largest);
  }
  return hmax(largest);
}

struct Int4Scales {
  F scale, zero;
};

TW_INLINE F quantize_int4(F x, F inverse, F zero) { return round(clamp(add(mul(x, inverse), zero), 0.0f, 15.0f)); }

// Scales for `size` inputs a lane. Of a few steps around the one that just spans the values the best is taken, because
// clipping the extremes a little often costs less than a coarse step for all the others. For each the integers are
// chosen, and then the scale that fits them best: with y = q - zero it is sum(x y) / sum(y y), and takes
// sum(x y)^2 / sum(y y) off the sum of squares.
Int4Scales find_int4_scales(const float* x, int size, bool zero_points) {
  F low = zero(), high = zero();
  for (int i = 0; i < size; ++i) {
    low = min(load(x + i * kLanes), low);
    high = max(load(x + i * kLanes), high);
  }
  // Without zero points 16 levels reach from -8 to 7: the longer side gets the 8, with a negative scale if it must.
  const F longer = select_less(high, sub(zero(), low), low, high);
  const F span = zero_points ? div(sub(high, low), set1(15.0f)) : div(longer, set1(-8.0f));
  Int4Scales best{zero(), set1(kNibbleZero)};
  F most = set1(-1.0f);
  for (const float step : kInt4Steps) {
    const F inverse = inverse_of(mul(span, set1(step)));
    const F offset = zero_points ? round(clamp(mul(sub(zero(), low), inverse), 0.0f, 15.0f)) : set1(kNibbleZero);
    F products = zero(), squares = zero();
    for (int i = 0; i < size; ++i) {
      const F value = load(x + i * kLanes), y = sub(quantize_int4(value, inverse, offset), offset);
      products = add(products, mul(value, y));
      squares = add(squares, mul(y, y));
    }
    const F scale = mul(products, inverse_of(squares)), gain = mul(products, scale);
    best.scale = select_less(most, gain, scale, best.scale);
    best.zero = select_less(most, gain, offset, best.zero);
    most = max(gain, most);
  }
  return best;
}

// Where a packed column lies: its strip, and its lane there.
struct Column {
  uint8_t* values;
  char* scales;
  int lane;
};

Column find_column(const WeightFormat& format, void* weight, int k, int column) {
  const int strip = column / kLanes;
  char* base = static_cast<char*>(weight) + size_t(strip) * strip_bytes(format, k);
  return {reinterpret_cast<uint8_t*>(base), base + strip_value_bytes(format, k), column % kLanes};
}

TW_INLINE uint8_t* quad_at(const Column& column, int i) { return column.values + (size_t(i / kQuad) * kLanes + column.lane) * kQuad; }

// Eight inputs share four bytes.
TW_INLINE uint8_t* nibbles_at(const Column& column, int i) {
  return column.values + (size_t(i / (2 * kQuad)) * kLanes + column.lane) * kQuad;
}

float get_scale(const char* scales, size_t index) {
  f16 half;
  std::memcpy(&half, scales + index * sizeof(f16), sizeof(f16));
  return to_float(half);
}

// `count` consecutive columns of a strip, from `first` on, take lanes 0 to `count` - 1 of what is put there.
struct Lanes {
  Column first;
  int count;

  // Element `index` of an array [...][kLanes] at `to`.
  template <typename T>
  void put(void* to, size_t index, const T* from) const {
    T* place = static_cast<T*>(to) + index * kLanes + first.lane;
    if (count == kLanes) {
      std::memcpy(place, from, sizeof(T) * kLanes);
    } else {
      std::memcpy(place, from, sizeof(T) * count);
    }
  }

  // Stores scales as float16 and returns what was stored: integers are chosen for that.
  F put_scales(size_t index, F scales) const {
    f16 halves[kLanes];
    store(halves, scales);
    put(first.scales, index, halves);
    return load(halves);
  }

  // `bytes` [4][kLanes]: whole numbers from 0 to 255.
  void put_quads(size_t index, const float* bytes) const {
    uint32_t quads[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const auto byte = [&](int j) { return static_cast<uint32_t>(static_cast<int>(bytes[j * kLanes + i])) << 8 * j; };
      quads[i] = byte(0) | byte(1) | byte(2) | byte(3);
    }
    put(first.values, index, quads);
  }
};

template <typename S>
void pack_int8(const WeightFormat& format, const PackArgs& args, int row, const Lanes& lanes) {
  float x[kRowGroup * kLanes], q[kQuad * kLanes];
  F scale = zero();
  if (format.kind == WeightKind::kInt8Channel) {
    float scales[kLanes] = {};
    for (int r = 0; r < lanes.count; ++r) scales[r] = largest_in_row<S>(args, row + r) / 127.0f;
    lanes.put(lanes.first.scales, 0, scales);
    scale = load(scales);
  }
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_lanes<S>(args, row, lanes.count, i, kRowGroup, x);
    if (format.kind == WeightKind::kInt8) {
      F largest = zero();
      for (int j = 0; j < kRowGroup; ++j) largest = max(abs(load(x + j * kLanes)), largest);
      scale = lanes.put_scales(i / kRowGroup, div(largest, set1(127.0f)));
    }
    const F inverse = inverse_of(scale);
    for (int j = 0; j < kRowGroup; j += kQuad) {
      for (int b = 0; b < kQuad; ++b) {
        const F rounded = round(clamp(mul(load(x + (j + b) * kLanes), inverse), -127.0f, 127.0f));
        store(q + b * kLanes, add(rounded, set1(128.0f)));
      }
      lanes.put_quads((i + j) / kQuad, q);
    }
  }
}

template <typename S>
void pack_int4(const WeightFormat& format, const PackArgs& args, int row, const Lanes& lanes) {
  char* zeros = lanes.first.scales + sizeof(f16) * weight_groups(format, args.k) * kLanes;
  const int padded = row_groups(args.k) * kRowGroup;
  float x[kLargestGroup * kLanes], q[kQuad * kLanes];
  for (int i = 0; i < args.cols; i += format.group) {
    read_lanes<S>(args, row, lanes.count, i, format.group, x);
    const Int4Scales s = find_int4_scales(x, format.group, format.zero_points);
    const F inverse = inverse_of(lanes.put_scales(i / format.group, s.scale));
    if (format.zero_points) {
      float values[kLanes];
      uint8_t bytes[kLanes];
      store(values, s.zero);
      for (int l = 0; l < kLanes; ++l) bytes[l] = static_cast<uint8_t>(values[l]);
      lanes.put(zeros, i / format.group, bytes);
    }
    const int size = padded - i < format.group ? padded - i : format.group;
    for (int j = 0; j < size; j += 2 * kQuad) {
      for (int b = 0; b < kQuad; ++b) {
        const float* low = x + (j + b) * kLanes;
        const F high = quantize_int4(load(low + kQuad * kLanes), inverse, s.zero);
        store(q + b * kLanes, add(quantize_int4(load(low), inverse, s.zero), mul(high, set1(16.0f))));
      }
      lanes.put_quads((i + j) / (2 * kQuad), q);
    }
  }
}

template <typename S>
void pack_integers(const WeightFormat& format, const PackArgs& args) {
  for (int row = args.row_begin; row < args.row_end;) {
    const Column first = find_column(format, args.weight, args.k, packed_column(args, row));
    const Lanes lanes{first, run_length(args, row, kLanes)};
    if (format.kind == WeightKind::kInt4) {
      pack_int4<S>(format, args, row, lanes);
    } else {
      pack_int8<S>(format, args, row, lanes);
    }
    row += lanes.count;
  }
}

template <typename S>
void pack_from(const WeightFormat& format, const PackArgs& args) {
  switch (format.kind) {
    case WeightKind::kFloat32: return pack_floats<float, S>(args);
    case WeightKind::kBFloat16: return pack_floats<bf16, S>(args);
    case WeightKind::kFloat16: return pack_floats<f16, S>(args);
    default: return pack_integers<S>(format, args);
  }
}

template <typename T>
void unpack_floats(const void* weight, int k, int row, float* out) {
  constexpr int kStep = Element<T>::kStep;
  const size_t steps = float_steps<T>(k);
  const T* line = static_cast<const T*>(weight) + (row / kPanel * steps * kPanel + row % kPanel) * kStep;
  for (int i = 0; i < k; ++i) out[i] = to_float(line[size_t(i / kStep) * kPanel * kStep + i % kStep]);
}

void unpack_integers(const WeightFormat& format, const void* weight, int k, int row, float* out) {
  const Column column = find_column(format, const_cast<void*>(weight), k, row);
  if (format.kind == WeightKind::kInt4) {
    const char* zeros = column.scales + sizeof(f16) * weight_groups(format, k) * kLanes;
    for (int i = 0; i < k; ++i) {
      const size_t index = size_t(i / format.group) * kLanes + column.lane;
      const uint8_t byte = nibbles_at(column, i)[i % kQuad];
      const int zero = format.zero_points ? zeros[index] : kNibbleZero;
      const int q = i / kQuad % 2 ? byte >> 4 : byte & 15;
      out[i] = get_scale(column.scales, index) * static_cast<float>(q - zero);
    }
    return;
  }
  float scale = 0.0f;
  if (format.kind == WeightKind::kInt8Channel) std::memcpy(&scale, column.scales + column.lane * sizeof(float), sizeof(float));
  for (int i = 0; i < k; ++i) {
    if (format.kind == WeightKind::kInt8) scale = get_scale(column.scales, size_t(i / kRowGroup) * kLanes + column.lane);
    out[i] = scale * static_cast<float>(quad_at(column, i)[i % kQuad] - 128);
  }
}

}  // namespace

size_t panel_bytes(const WeightFormat& format, int k) {
  switch (format.kind) {
    case WeightKind::kFloat32: return sizeof(float) * kPanel * k;
    case WeightKind::kBFloat16: return sizeof(bf16) * kPanel * float_steps<bf16>(k) * Element<bf16>::kStep;
    case WeightKind::kFloat16: return sizeof(f16) * kPanel * k;
    default: return kStrips * strip_bytes(format, k);
  }
}

void pack(const WeightFormat& format, const PackArgs& args) {
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
    default: return unpack_integers(format, weight, k, row, out);
  }
}

}  // namespace tidewheel::TW_ISA
