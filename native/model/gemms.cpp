#include "model/gemms.h"

#include <algorithm>

namespace tidewheel {
namespace {

// The number of input elements that take about as long to pack as a barrier takes.
constexpr int kMaxPackedAlone = 8192;

// Rows of one head that are packed at a time: enough rows for each read of a weight, and few enough to stay in the L1
// cache.
constexpr int kMaxHeadRows = 32;

// Up to this number of rows, every worker packs them for itself. That takes less time than a barrier.
int max_rows_alone(const Linear& linear) { return kMaxPackedAlone / linear.k; }

// Whether inputs packed for `a` can also be used for `b`.
bool same_inputs(const Linear& a, const Linear& b) {
  return a.format.kind == b.format.kind && a.format.zero_points == b.format.zero_points && a.format.bits == b.format.bits &&
         (a.input_order == b.input_order || (a.input_order && b.input_order && *a.input_order == *b.input_order));
}

}  // namespace

void Gemms::allocate(const std::map<const Linear*, std::string>& matrices) {
  size_t row_bytes = 0, bytes_alone = 0;
  for (const auto& [linear, name] : matrices) {
    const size_t bytes = kernels_.row_bytes(linear->format, linear->k);
    row_bytes = std::max(row_bytes, bytes);
    bytes_alone = std::max(bytes_alone, max_rows_alone(*linear) * bytes);
    max_inputs_ = std::max(max_inputs_, linear->k);
  }
  packed_ = Arena(workspace_.rows() * row_bytes);
  // Two rows of scratch, before the inputs that are packed alone: one row is normalized in the first, and reordered in
  // the second.
  row_scratch_bytes_ = 2 * room_for_row();
  workspace_.need_scratch(row_scratch_bytes_ + bytes_alone);
}

Gemms::Inputs Gemms::prepare(Worker& worker, const Linear& linear, const Rows& rows) const {
  const StepAdapters::Projection low_rank = adapters_.projection(linear, rows);
  const auto project = [&](int64_t piece) { adapters_.project(worker, low_rank, piece, linear, rows); };
  const bool alone = rows.count <= max_rows_alone(linear);
  char* const scratch = workspace_.scratch(worker);
  char* const out = alone ? scratch + row_scratch_bytes_ : packed_.data();
  const PackInputsArgs args{rows.x, rows.stride, rows.gather, rows.count, linear.k, rows.norm,
                            reinterpret_cast<float*>(scratch), out};
  const auto pack = [&](int begin, int end) {
    if (linear.input_order) {
      pack_in_order(linear, args, scratch + room_for_row(), begin, end);
    } else {
      kernels_.pack_inputs(linear.format, args, begin, end);
    }
  };
  if (alone) {
    if (low_rank.pieces > 0) worker.share(low_rank.pieces, 1, [&](int64_t piece, int64_t) { project(piece); });
    if (!worker.is_late()) pack(0, rows.count);
  } else {
    const int tile = kernels_.tile_rows(linear.format), tiles = (rows.count + tile - 1) / tile;
    worker.share(low_rank.pieces + tiles, 1, [&](int64_t i, int64_t) {
      if (i < low_rank.pieces) return project(i);
      const int begin = static_cast<int>(i - low_rank.pieces) * tile;
      pack(begin, std::min(begin + tile, rows.count));
    });
  }
  return {out, low_rank.rows};
}

// Row by row: normalizes the row in one piece of scratch memory, and reorders its inputs in the other one, `room`.
void Gemms::pack_in_order(const Linear& linear, const PackInputsArgs& args, char* room, int begin, int end) const {
  float* const ordered = reinterpret_cast<float*>(room);
  const std::vector<int32_t>& order = *linear.input_order;
  for (int row = begin; row < end; ++row) {
    const float* x = args.x + (args.gather ? args.gather[row] : row) * args.x_stride;
    if (args.norm.kind != NormKind::kNone) {
      std::copy_n(x, args.k, args.scratch);
      kernels_.normalize(args.norm, args.scratch, args.k);
      x = args.scratch;
    }
    for (int i = 0; i < args.k; ++i) ordered[i] = x[order[i]];
    PackInputsArgs one = args;
    one.x = ordered, one.x_stride = 0, one.gather = nullptr, one.norm = {};
    kernels_.pack_inputs(linear.format, one, row, row + 1);
  }
}

void Gemms::capture(Worker& worker, const Linear& linear, const Rows& rows) const {
  for (const Linear* part = &linear; part; part = part->next.get()) {
    capture_.keep(worker, *part, rows.count, [&](int row, float* out) {
      std::copy_n(rows.x + (rows.gather ? rows.gather[row] : row) * rows.stride, part->k, out);
      if (rows.norm.kind != NormKind::kNone) kernels_.normalize(rows.norm, out, part->k);
    });
  }
}

void Gemms::run(Worker& worker, const Linear& linear, const Rows& rows, const Output& output) const {
  if (!capture_.empty()) capture(worker, linear, rows);
  Inputs inputs = prepare(worker, linear, rows);
  multiply(worker, linear, inputs, rows.count, output);
  for (const Linear* before = &linear; before->next; before = before->next.get()) {
    const Linear& part = *before->next;
    if (inputs.low_rank || adapters_.changes(part, part) || !same_inputs(*before, part)) inputs = prepare(worker, part, rows);
    Output behind = output;
    behind.y += part.first;
    multiply(worker, part, inputs, rows.count, behind);
  }
}

// A head's rows are packed in blocks of about as many rows as a tile of inputs has, by the worker that multiplies them.
int Gemms::heads_block_rows(const Linear& linear) const {
  const int tile = kernels_.tile_rows(linear.format);
  return (kMaxHeadRows + tile - 1) / tile * tile;
}

size_t Gemms::heads_scratch_bytes(const Linear& linear) const {
  return 2 * round_up((linear.k + kRowGroup) * sizeof(float), 64) +
         heads_block_rows(linear) * kernels_.row_bytes(linear.format, linear.k);
}

void Gemms::run_heads(Worker& worker, const Linear& linear, const HeadLayout& layout, const Rows& rows,
                      const Output& output) const {
  const Linear::Slice& slice = linear.slices[worker.group()];
  const int panels = layout.panels(), block_rows = heads_block_rows(linear);
  const int blocks = (rows.count + block_rows - 1) / block_rows;
  // The heads whose panels the group owns. Of the first and the last head it may own only some panels.
  const int first = slice.panels.begin / panels, last = (slice.panels.end + panels - 1) / panels;
  const size_t panel_bytes = kernels_.panel_bytes(linear.format, linear.k);
  const size_t room = round_up((linear.k + kRowGroup) * sizeof(float), 64);
  worker.share_in_group(int64_t{last - first} * blocks, 1, [&](int64_t i, int64_t) {
    const int head = first + static_cast<int>(i / blocks), begin = static_cast<int>(i % blocks) * block_rows;
    const int count = std::min(rows.count - begin, block_rows);
    char* const scratch = workspace_.scratch(worker);
    char* const packed = scratch + 2 * room;
    const float* x = rows.x + begin * rows.stride + head * layout.input_step;
    const PackInputsArgs args{x, rows.stride, nullptr, count, linear.k, rows.norm, reinterpret_cast<float*>(scratch), packed};
    if (linear.input_order) {
      pack_in_order(linear, args, scratch + room, 0, count);
    } else {
      kernels_.pack_inputs(linear.format, args, 0, count);
    }
    const int own = std::max(slice.panels.begin, head * panels), end = std::min(slice.panels.end, (head + 1) * panels);
    const int column = (own - head * panels) * kPanel;
    float* y = output.y + begin * output.stride + head * layout.output_step + column;
    kernels_.gemm(linear.format, {packed, 0, count, slice.weight + (own - slice.panels.begin) * panel_bytes, linear.k,
                                  layout.columns - column, 0, end - own, nullptr, Epilogue::kStore, Activation::kSilu, y,
                                  output.stride, output.scale, 0});
  });
}

void Gemms::multiply(Worker& worker, const Linear& part, const Inputs& inputs, int num_rows, const Output& output) const {
  // The group's own panels form a GEMM of their own, with fewer columns.
  const Linear::Slice& slice = part.slices[worker.group()];
  const int panels = slice.panels.size(), first_column = slice.panels.begin * kPanel;
  const int columns = std::min(part.n, slice.panels.end * kPanel) - first_column;
  const float* bias = part.bias ? part.bias + first_column : nullptr;
  float* y = output.y + (output.epilogue == Epilogue::kGated ? first_column / 2 : first_column);
  const int block_rows = kernels_.row_block(part.format, part.k);
  const int blocks = (num_rows + block_rows - 1) / block_rows;
  // All panels of one block of rows, then those of the next block.
  worker.share_ranges_in_group(int64_t{blocks} * panels, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int row = static_cast<int>(begin / panels) * block_rows;
      const int panel = static_cast<int>(begin % panels);
      const int panel_end = static_cast<int>(std::min<int64_t>(panels, panel + (end - begin)));
      kernels_.gemm(part.format, {inputs.packed, row, std::min(num_rows, row + block_rows), slice.weight, part.k, columns, panel,
                                    panel_end, bias, output.epilogue, output.activation, y, output.stride, output.scale,
                                    output.softcap, 0, inputs.low_rank, slice.panels.begin});
      begin += panel_end - panel;
    }
  });
}

}  // namespace tidewheel
