#include "model/weights/pack_source.h"

#include <cstring>

#include "model/require.h"
#include "model/weights/byte_order.h"

namespace tidewheel {
namespace {

void pack_blocks(const Kernels& kernels, const Linear& linear, const Linear::Slice& slice, const Source& source,
                 const Columns& columns, int rows, int row_begin, int row_end, char* room) {
  const StoredBlocks& stored = *source.blocks;
  const char* data = static_cast<const char*>(source.data);
  PackBlocksArgs args{};
  args.source = stored.type;
  args.blocks = data + row_begin * stored.row_bytes;
  args.row_bytes = stored.row_bytes;
  if (stored.row_order) {
    for (int row = row_begin; row < row_end; ++row) {
      std::memcpy(room + (row - row_begin) * stored.data_bytes, data + stored.row_order[row] * stored.row_bytes,
                  stored.data_bytes);
    }
    args.blocks = room;
    args.row_bytes = stored.data_bytes;
  }
  if (stored.scales) {
    args.scales = static_cast<const char*>(stored.scales) + row_begin * stored.scale_stride * stored.scale_bytes();
    args.scale_stride = stored.scale_stride;
  }
  if (stored.zeros) {
    args.zeros = stored.zeros + row_begin * stored.zero_stride;
    args.zero_stride = stored.zero_stride;
  }
  if (stored.divisors) args.divisors = stored.divisors + row_begin;
  if (stored.scale_table) {
    args.largest = stored.largest + row_begin * stored.largest_stride;
    args.largest_stride = stored.largest_stride;
    args.offsets = stored.offsets + row_begin;
  }
  args.bits = stored.bits, args.scale_type = stored.scale_type;
  args.twos_complement = stored.twos_complement;
  args.rows = rows, args.cols = linear.k;
  args.weight = slice.weight, args.k = linear.k;
  args.group = columns.group, args.group_stride = columns.group_stride;
  args.offset = columns.offset - slice.panels.begin * kPanel;
  args.row_begin = row_begin, args.row_end = row_end;
  kernels.pack_blocks(linear.format, args);
}

}  // namespace

int Columns::first_row(int panel, int rows) const {
  int low = 0, high = rows;  // columns ascend with rows
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (of(middle) / kPanel < panel) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

size_t room_for(const Source& source, int cols) {
  if (source.blocks) return source.blocks->row_order ? kPanel * source.blocks->data_bytes : 0;
  return source.swapped ? size_t{kPanel} * cols * dtype_bytes(source.type) : 0;
}

void pack_rows(const Kernels& kernels, const Linear& linear, const Linear::Slice& slice, const Source& source,
               const Columns& columns, int rows, int row_begin, int row_end, char* room) {
  if (source.blocks) return pack_blocks(kernels, linear, slice, source, columns, rows, row_begin, row_end, room);
  const ptrdiff_t start = row_begin * source.strides[0] * dtype_bytes(source.type);
  Lines lines{static_cast<const char*>(source.data) + start, source.strides[0], source.strides[1]};
  if (source.swapped) {
    const auto swap = source.type == DType::kFloat32 ? swap_lines<uint32_t> : swap_lines<uint16_t>;
    lines = swap(lines, row_end - row_begin, linear.k, room);
  }
  kernels.pack_weights(linear.format, {lines.data, source.type, lines.row_stride, lines.col_stride, rows, linear.k, slice.weight,
                                       linear.k, columns.group, columns.group_stride,
                                       columns.offset - slice.panels.begin * kPanel, row_begin, row_end});
}

const char* pack_panel(const Kernels& kernels, const Linear& linear, int panel, char* room) {
  const size_t bytes = kernels.panel_bytes(linear.format, linear.k);
  std::memset(room, 0, bytes);
  const Linear::Slice slice{{panel, panel + 1}, room};
  for (const Linear::Part& part : linear.parts) {
    const int begin = part.columns.first_row(panel, part.rows), end = part.columns.first_row(panel + 1, part.rows);
    if (begin < end) {
      pack_rows(kernels, linear, slice, part.source, part.columns, part.rows, begin, end, room + round_up(bytes, 64));
    }
  }
  return room;
}

size_t panel_room(const Kernels& kernels, const Linear& linear) {
  // Copied rows have floats of at most four bytes, or blocks, which take fewer bytes.
  const size_t copied = size_t{kPanel} * round_up(linear.k, 256) * sizeof(float);
  return round_up(kernels.panel_bytes(linear.format, linear.k), 64) + copied;
}

}  // namespace tidewheel
