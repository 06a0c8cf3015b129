// Weights from a checkpoint into panels, quantized on the way if the format says so. Quantization is plain code in a
// fixed order, so that every ISA level stores the same integers and scales.
#include <cmath>

#include "kernels/layout.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kLargestGroup = 128;

int packed_column(const PackArgs& args, int row) {
  return row / args.group * args.group_stride + row % args.group + args.offset;
}

template <typename T, typename S>
void pack_floats(const PackArgs& args) {
  constexpr int kStep = Element<T>::kStep;
  const size_t steps = float_steps<T>(args.k);
  const S* source = static_cast<const S*>(args.source);
  for (int begin = args.row_begin; begin < args.row_end;) {
    // Rows that land side by side in one panel are packed together, so that panel rows are written whole.
    const int column = packed_column(args, begin);
    int count = kPanel - column % kPanel;
    if (args.group - begin % args.group < count) count = args.group - begin % args.group;
    if (args.row_end - begin < count) count = args.row_end - begin;
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

TW_INLINE float nearest(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return (x + magic) - magic;
}

TW_INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

float largest_magnitude(const float* x, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = largest < std::fabs(x[i]) ? std::fabs(x[i]) : largest;
  return largest;
}

// A scale as it is stored: the integers are chosen for the rounded one.
float stored_scale(float scale) { return to_float(to_f16(scale)); }

void quantize_int8(const float* x, int count, float scale, uint8_t* out) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(clamp(nearest(x[i] * inverse), -127.0f, 127.0f) + 128.0f);
}

struct Int4Scale {
  float scale, shift;
};

TW_INLINE float int4_level(float x, float inverse, const Int4Scale& s) {
  return clamp(nearest((x - s.shift) * inverse), 0.0f, 15.0f);
}

// Sum of squared errors of a group's values at one scale, in sixteen partial sums.
float int4_error(const float* x, int count, const Int4Scale& s) {
  const float inverse = 1.0f / s.scale;
  float sums[16] = {};
  for (int i = 0; i < count; i += 16) {
    for (int j = 0; j < 16; ++j) {
      const float error = int4_level(x[i + j], inverse, s) * s.scale + s.shift - x[i + j];
      sums[j] += error * error;
    }
  }
  float sum = 0.0f;
  for (const float partial : sums) sum += partial;
  return sum;
}

// The best of a few scales around the one that just spans the values: clipping the extremes a little often costs
// less than a coarse step for all the others.
Int4Scale find_int4_scale(const float* x, int count, bool zero_points) {
  float low = 0.0f, high = 0.0f;
  for (int i = 0; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  // Without zero points 16 levels reach from -8 to 7: the longer side gets the 8, with a negative scale if it must.
  const float longer = -low > high ? low : high;
  const float span = zero_points ? (high - low) / 15.0f : longer / -8.0f;
  const float middle = (low + high) / 2.0f;
  Int4Scale best{0.0f, 0.0f};
  float least = 0.0f;
  for (int step = -2; step <= 9; ++step) {
    const float scale = stored_scale(span * (1.0f - 0.03f * static_cast<float>(step)));
    if (scale == 0.0f) continue;
    const Int4Scale candidate{scale, zero_points ? stored_scale(middle - 7.5f * scale) : -8.0f * scale};
    const float error = int4_error(x, count, candidate);
    if (best.scale == 0.0f || error < least) {
      best = candidate;
      least = error;
    }
  }
  return best;
}

void quantize_int4(const float* x, int count, const Int4Scale& s, uint8_t* out) {
  const float inverse = s.scale != 0.0f ? 1.0f / s.scale : 0.0f;
  for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(int4_level(x[i], inverse, s));
}

// Where a packed column lies: its strip, and its lane there.
struct Column {
  char* strip;
  int lane;
};

Column find_column(const WeightFormat& format, void* weight, int k, int column) {
  return {static_cast<char*>(weight) + size_t(column / kLanes) * strip_bytes(format, k), column % kLanes};
}

// Input i of a column within quads or nibbles, eight inputs of which share four bytes.
TW_INLINE uint8_t* quad_at(char* values, int lane, int i) {
  return reinterpret_cast<uint8_t*>(values) + (size_t(i / kQuad) * kLanes + lane) * kQuad;
}
TW_INLINE uint8_t* nibbles_at(char* values, int lane, int i) { return quad_at(values, lane, i / 2); }

void put_half(char* halves, int lane, float value) {
  const f16 half = to_f16(value);
  std::memcpy(halves + lane * sizeof(f16), &half, sizeof(f16));
}

float get_half(const char* halves, int lane) {
  f16 half;
  std::memcpy(&half, halves + lane * sizeof(f16), sizeof(f16));
  return to_float(half);
}

template <typename S>
void pack_int8_channel(const WeightFormat& format, const PackArgs& args, int row) {
  const Column column = find_column(format, args.weight, args.k, packed_column(args, row));
  float x[kRowGroup], largest = 0.0f;
  uint8_t q[kRowGroup];
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_group<S>(args, row, i, kRowGroup, x);
    const float magnitude = largest_magnitude(x, kRowGroup);
    largest = largest < magnitude ? magnitude : largest;
  }
  const float scale = largest / 127.0f;
  char* scales = column.strip + size_t(row_groups(args.k)) * kRowGroup * kLanes;
  std::memcpy(scales + column.lane * sizeof(float), &scale, sizeof(float));
  for (int i = 0; i < args.cols; i += kRowGroup) {
    read_group<S>(args, row, i, kRowGroup, x);
    quantize_int8(x, kRowGroup, scale, q);
    for (int j = 0; j < kRowGroup; j += kQuad) std::memcpy(quad_at(column.strip, column.lane, i + j), q + j, kQuad);
  }
}

template <typename S>
void pack_groups(const WeightFormat& format, const PackArgs& args, int row) {
  const Column column = find_column(format, args.weight, args.k, packed_column(args, row));
  const GroupLayout layout = GroupLayout::of(format, args.k);
  float x[kLargestGroup];
  uint8_t q[kLargestGroup];
  for (int g = 0; g < layout.groups; ++g) {
    read_group<S>(args, row, g * format.group, format.group, x);
    char* scales = column.strip + layout.scale_at(g);
    char* values = column.strip + layout.values_at(g);
    if (format.kind == WeightKind::kInt8) {
      const float scale = stored_scale(largest_magnitude(x, kRowGroup) / 127.0f);
      put_half(scales, column.lane, scale);
      quantize_int8(x, kRowGroup, scale, q);
      for (int j = 0; j < kRowGroup; j += kQuad) std::memcpy(quad_at(values, column.lane, j), q + j, kQuad);
      continue;
    }
    const Int4Scale s = find_int4_scale(x, format.group, format.zero_points);
    put_half(scales, column.lane, s.scale);
    if (format.zero_points) put_half(scales + layout.shift_bytes, column.lane, s.shift);
    quantize_int4(x, format.group, s, q);
    for (int j = 0; j < format.group; j += 2 * kQuad) {
      uint8_t* bytes = nibbles_at(values, column.lane, j);
      for (int b = 0; b < kQuad; ++b) bytes[b] = static_cast<uint8_t>(q[j + b] | q[j + kQuad + b] << 4);
    }
  }
}

template <typename S>
void pack_from(const WeightFormat& format, const PackArgs& args) {
  switch (format.kind) {
    case WeightKind::kFloat32: return pack_floats<float, S>(args);
    case WeightKind::kBFloat16: return pack_floats<bf16, S>(args);
    case WeightKind::kFloat16: return pack_floats<f16, S>(args);
    case WeightKind::kInt8Channel:
      for (int row = args.row_begin; row < args.row_end; ++row) pack_int8_channel<S>(format, args, row);
      return;
    case WeightKind::kInt8:
    case WeightKind::kInt4:
      for (int row = args.row_begin; row < args.row_end; ++row) pack_groups<S>(format, args, row);
      return;
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
  if (format.kind == WeightKind::kInt8Channel) {
    float scale;
    std::memcpy(&scale, column.strip + (size_t(row_groups(k)) * kRowGroup * kLanes + column.lane * sizeof(float)), sizeof(float));
    for (int i = 0; i < k; ++i) out[i] = scale * static_cast<float>(quad_at(column.strip, column.lane, i)[i % kQuad] - 128);
    return;
  }
  const GroupLayout layout = GroupLayout::of(format, k);
  for (int i = 0; i < k; ++i) {
    const int g = i / format.group, j = i % format.group;
    const char* scales = column.strip + layout.scale_at(g);
    char* values = column.strip + layout.values_at(g);
    const float scale = get_half(scales, column.lane);
    if (format.kind == WeightKind::kInt8) {
      out[i] = scale * static_cast<float>(quad_at(values, column.lane, j)[j % kQuad] - 128);
      continue;
    }
    const uint8_t byte = nibbles_at(values, column.lane, j)[j % kQuad];
    const float q = static_cast<float>(j / kQuad % 2 ? byte >> 4 : byte & 15);
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
