// Packs rows of small floats into panels, bit for bit, and unpacks them.
#include "kernels/table.h"
#include "kernels/widened.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kCodeUnit = kFloatUnit<bf16>;

// A column of a packed weight.
struct WidenedColumn {
  char* panel;
  int lane;
  size_t codes;  // the offset at which they begin

  WidenedColumn(const WeightFormat& format, void* weight, int k, int column)
      : panel(static_cast<char*>(weight) + column / kPanel * widened_panel_bytes(format, k)), lane(column % kPanel),
        codes(widened_scale_bytes(format, k)) {}

  // Only for formats whose scales are quantized too.
  QuantizedScales quantized(const WeightFormat& format, int k) const { return QuantizedScales::of(format, panel, k); }
  float& scale(int group) const { return reinterpret_cast<float*>(panel)[group * kPanel + lane]; }
  // The column's unit with input i. Units of all columns are interleaved.
  char* unit(int i) const { return panel + codes + (size_t(i / kCodeUnit) * kPanel + lane) * kCodeUnit; }
  uint32_t& eight(int i) const {
    return reinterpret_cast<uint32_t*>(panel + codes)[size_t(i / kTableInputs) * kPanel + lane];
  }
};

void pack_bytes(const uint8_t* codes, int count, const WidenedColumn& column) {
  int i = 0;
  for (; i + kCodeUnit <= count; i += kCodeUnit) std::memcpy(column.unit(i), codes + i, kCodeUnit);
  if (i < count) std::memcpy(column.unit(i), codes + i, count - i);
}

// Two codes a byte, the first in the high half.
void pack_nibbles(const uint8_t* codes, int count, const WidenedColumn& column) {
  for (int i = 0; i < count; i += kTableInputs) {
    uint32_t eight = 0;
    for (int j = i; j < i + kTableInputs && j < count; ++j) {
      eight |= static_cast<uint32_t>(j % 2 ? codes[j / 2] & 15 : codes[j / 2] >> 4) << 4 * (j - i);
    }
    column.eight(i) = eight;
  }
}

}  // namespace

void pack_widened(const WeightFormat& format, const PackBlocksArgs& args) {
  const int groups = (args.cols + format.group - 1) / format.group;
  for (int row = args.row_begin; row < args.row_end; ++row) {
    const int index = row - args.row_begin;
    const WidenedColumn column(format, args.weight, args.k, row / args.group * args.group_stride + row % args.group + args.offset);
    const auto* codes = static_cast<const uint8_t*>(args.blocks) + index * args.row_bytes;
    if (format.scale_table) {
      const QuantizedScales scales = column.quantized(format, args.k);
      const auto* scale_codes = static_cast<const uint8_t*>(args.scales) + index * args.scale_stride;
      const float* largest = args.largest + index * args.largest_stride;
      for (int g = 0; g < groups; ++g) scales.codes[g * kPanel + column.lane] = scale_codes[g];
      for (int g = 0; g < groups / scales.run; ++g) scales.largest[g * kPanel + column.lane] = largest[g];
      scales.offset[column.lane] = args.offsets[index];
    } else {
      const float* scales = static_cast<const float*>(args.scales) + index * args.scale_stride;
      for (int g = 0; g < groups; ++g) column.scale(g) = scales[g];
    }
    if (format.kind == WeightKind::kE4m3) {
      pack_bytes(codes, args.cols, column);
    } else {
      pack_nibbles(codes, args.cols, column);
    }
  }
}

void unpack_widened_row(const WeightFormat& format, const void* weight, int k, int row, float* out) {
  const WidenedColumn column(format, const_cast<void*>(weight), k, row);
  for (int i = 0; i < k; ++i) {
    const float number = format.kind == WeightKind::kE4m3
                             ? to_float(e4m3{static_cast<uint8_t>(column.unit(i)[i % kCodeUnit])})
                             : format.table[column.eight(i) >> 4 * (i % kTableInputs) & 15];
    const int group = i / format.group;
    out[i] = (format.scale_table ? column.quantized(format, k).at(group, column.lane) : column.scale(group)) * number;
  }
}

}  // namespace tidewheel::TW_ISA
