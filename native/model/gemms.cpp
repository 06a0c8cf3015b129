#include "model/gemms.h"

#include <algorithm>

namespace tidewheel {
namespace {

// Elements of GEMM inputs that take about as long to pack as a barrier takes.
constexpr int kMostPackedAlone = 8192;

// If there are few rows, every worker packs them for itself. That takes less time than a barrier.
int most_rows_alone(const Linear& linear) { return kMostPackedAlone / linear.k; }

}  // namespace

void Gemms::allocate(const std::map<const Linear*, std::string>& matrices) {
  size_t row_bytes = 0, bytes_alone = 0;
  int inputs = 0;
  for (const auto& [linear, name] : matrices) {
    const size_t bytes = kernels_.row_bytes(linear->format, linear->k);
    row_bytes = std::max(row_bytes, bytes);
    bytes_alone = std::max(bytes_alone, most_rows_alone(*linear) * bytes);
    inputs = std::max(inputs, linear->k);
  }
  packed_ = Arena(workspace_.rows() * row_bytes);
  // One row at a time is normalized in front of those packed alone.
  row_scratch_bytes_ = round_up((inputs + kRowGroup) * sizeof(float), 64);
  workspace_.need_scratch(row_scratch_bytes_ + bytes_alone);
}

const char* Gemms::pack_inputs(Worker& worker, const Linear& linear, const Rows& rows) const {
  const bool alone = rows.count <= most_rows_alone(linear);
  char* const scratch = workspace_.scratch(worker);
  char* const out = alone ? scratch + row_scratch_bytes_ : packed_.data();
  const PackInputsArgs args{rows.x, rows.stride, rows.gather, rows.count, linear.k, rows.norm,
                            reinterpret_cast<float*>(scratch), out};
  if (alone) {
    if (!worker.is_late()) kernels_.pack_inputs(linear.format, args, 0, rows.count);
  } else {
    worker.share(rows.count, kernels_.tile_rows(linear.format), [&](int64_t begin, int64_t end) {
      kernels_.pack_inputs(linear.format, args, static_cast<int>(begin), static_cast<int>(end));
    });
  }
  return out;
}

void Gemms::run(Worker& worker, const Linear& linear, const Rows& rows, const Output& output) const {
  const char* x = pack_inputs(worker, linear, rows);
  // The group's own panels are a GEMM of their own, with fewer columns.
  const Linear::Slice& slice = linear.slices[worker.group()];
  const int panels = slice.panels.size(), first_column = slice.panels.begin * kPanel;
  const int columns = std::min(linear.n, slice.panels.end * kPanel) - first_column;
  const float* bias = linear.bias ? linear.bias + first_column : nullptr;
  float* y = output.y + (output.epilogue == Epilogue::kGated ? first_column / 2 : first_column);
  const int block_rows = kernels_.row_block(linear.format, linear.k);
  const int blocks = (rows.count + block_rows - 1) / block_rows;
  // Panel by panel of one block of rows after the other.
  worker.share_in_group_guided(int64_t{blocks} * panels, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int row = static_cast<int>(begin / panels) * block_rows;
      const int panel = static_cast<int>(begin % panels);
      const int panel_end = static_cast<int>(std::min<int64_t>(panels, panel + (end - begin)));
      kernels_.gemm(linear.format, {x, row, std::min(rows.count, row + block_rows), slice.weight, linear.k, columns, panel,
                                    panel_end, bias, output.epilogue, output.activation, y, output.stride, output.scale,
                                    output.softcap});
      begin += panel_end - panel;
    }
  });
}

}  // namespace tidewheel
