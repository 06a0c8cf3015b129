#include "model/weights.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "model/byte_order.h"
#include "model/require.h"

namespace tidewheel {
namespace {

constexpr int kGateColumns = kPanel / 2;

size_t align(size_t bytes) { return round_up(bytes, 64); }

float read_float(const Source& source, int64_t index) {
  if (source.type == DType::kFloat32) return bits_float(read_word<uint32_t>(source.data, index, source.swapped));
  const auto bits = read_word<uint16_t>(source.data, index, source.swapped);
  return source.type == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

// Lets the system take back the pages that a tensor touches; its neighbours' that go with them are read again.
void give_back(const Source& source) {
  if (!source.mapped) return;
  const auto element = static_cast<int64_t>(dtype_bytes(source.type));
  int64_t begin = 0, end = element;
  for (size_t i = 0; i < source.shape.size(); ++i) {
    const int64_t reach = (source.shape[i] - 1) * source.strides[i] * element;
    (reach < 0 ? begin : end) += reach;
  }
  const uintptr_t data = reinterpret_cast<uintptr_t>(source.data), page = sysconf(_SC_PAGESIZE);
  const uintptr_t first = (data + begin) / page * page;
  madvise(reinterpret_cast<void*>(first), data + end - first, MADV_DONTNEED);  // a hint: refused, the pages only stay
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace

Weights::Weights(const ModelConfig& config, const Kernels& kernels, const WeightFormats& formats,
                 const Ownership& ownership)
    : kernels_(kernels) {
  layers.resize(config.layers.size());
  plan(config, formats);
  place(ownership);
}

void Weights::plan_linear(const std::string& name, Linear& linear, const WeightFormat& format, int rows, int cols,
                          bool bias, int n, int group, int group_stride, int offset) {
  linear.format = format;
  linear.n = n;
  linear.k = cols;
  slots_[name + ".weight"] = {&linear, nullptr, rows, cols, group, group_stride, offset};
  if (bias) slots_[name + ".bias"] = {&linear, &linear.bias, rows, 0, group, group_stride, offset};
}

void Weights::plan_linear(const std::string& name, Linear& linear, const WeightFormat& format, int rows, int cols,
                          bool bias) {
  plan_linear(name, linear, format, rows, cols, bias, rows, rows, 0, 0);
}

void Weights::plan_vector(const std::string& name, float*& vector, int size) {
  slots_[name] = {nullptr, &vector, size, 0, size, 0, 0};
}

void Weights::plan_norm(const std::string& name, Norm& norm, const NormConfig& config, int size) {
  norm.layer_norm = config.layer_norm;
  norm.eps = config.eps;
  plan_vector(name + ".weight", norm.weight, size);
  if (config.bias) plan_vector(name + ".bias", norm.bias, size);
}

void Weights::plan(const ModelConfig& config, const WeightFormats& formats) {
  const int hidden = config.hidden_size, embedding = config.embedding_size;
  const WeightFormat& linears = formats.layers;
  plan_linear("embed", embed, formats.embedding, config.vocab_size, embedding, false);
  if (config.num_positions) {
    plan_linear("embed.positions", positions, formats.positions, config.num_positions + config.position_offset, hidden, false);
    auto slot = slots_.extract("embed.positions.weight");
    slot.key() = "embed.positions";
    slots_.insert(std::move(slot));
  }
  if (embedding != hidden) {
    plan_linear("embed.project_in", project_in, linears, hidden, embedding, false);
    plan_linear("embed.project_out", project_out, linears, embedding, hidden, false);
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& c = config.layers[i];
    Layer& layer = layers[i];
    const std::string prefix = "layers." + std::to_string(i) + ".";
    const int q = c.q_size(), kv = c.kv_size(), qkv = c.qkv_size();
    plan_norm(prefix + "attention_norm", layer.attention_norm, c.norm, hidden);
    plan_linear(prefix + "q", layer.qkv, linears, q, hidden, c.qkv_bias, qkv, q, 0, 0);
    plan_linear(prefix + "k", layer.qkv, linears, kv, hidden, c.qkv_bias, qkv, kv, 0, q);
    plan_linear(prefix + "v", layer.qkv, linears, kv, hidden, c.qkv_bias, qkv, kv, 0, q + kv);
    plan_linear(prefix + "o", layer.out, linears, hidden, q, c.out_bias);
    if (c.qk_norm_eps) {
      plan_norm(prefix + "q_norm", layer.q_norm, {.eps = *c.qk_norm_eps}, c.head_dim);
      plan_norm(prefix + "k_norm", layer.k_norm, {.eps = *c.qk_norm_eps}, c.head_dim);
    }
    plan_norm(prefix + "mlp_norm", layer.mlp_norm, c.norm, hidden);
    const int width = static_cast<int>(round_up(c.intermediate_size, kGateColumns));
    if (c.gated) {
      plan_linear(prefix + "gate", layer.up, linears, c.intermediate_size, hidden, c.mlp_bias, 2 * width, kGateColumns, kPanel, 0);
      plan_linear(prefix + "up", layer.up, linears, c.intermediate_size, hidden, c.mlp_bias, 2 * width, kGateColumns, kPanel,
                  kGateColumns);
    } else {
      plan_linear(prefix + "up", layer.up, linears, c.intermediate_size, hidden, c.mlp_bias);
    }
    plan_linear(prefix + "down", layer.down, formats.down, hidden, c.intermediate_size, c.mlp_bias);
  }
  if (config.final_norm) plan_norm("final_norm", final_norm, *config.final_norm, hidden);
  if (!config.tied_head) plan_linear("head", head, formats.embedding, config.vocab_size, embedding, false);
}

void Weights::place(const Ownership& ownership) {
  // Several slots may share one target (q, k and v one matrix): each target is placed once. Calls
  // visit(slot, group, panels, bytes of one), for a vector with the first group alone and the whole as one panel.
  const auto for_each_run = [&](auto&& visit) {
    std::set<const void*> seen;
    for (auto& [name, slot] : slots_) {
      const void* target = slot.cols ? static_cast<void*>(slot.linear) : static_cast<void*>(slot.vector);
      if (!seen.insert(target).second) continue;
      const int panels = ((slot.linear ? slot.linear->n : slot.rows) + kPanel - 1) / kPanel;
      if (slot.cols == 0) {
        visit(slot, 0, Range{0, 1}, panels * kPanel * sizeof(float));
        continue;
      }
      for (int group = 0; group < ownership.groups(); ++group) {
        visit(slot, group, ownership.of(group, panels), kernels_.panel_bytes(slot.linear->format, slot.linear->k));
      }
    }
  };
  std::vector<size_t> next(ownership.groups());  // [groups]: bytes of its arena
  for_each_run([&](Slot&, int group, Range panels, size_t bytes) { next[group] += align(panels.size() * bytes); });
  for (size_t& total : next) arenas_.emplace_back(std::exchange(total, 0));
  for_each_run([&](Slot& slot, int group, Range panels, size_t bytes) {
    const size_t size = align(panels.size() * bytes);
    char* data = arenas_[group].data() + next[group];
    next[group] += size;
    if (slot.cols) {
      slot.linear->slices.push_back({panels, data});
    } else {
      *slot.vector = reinterpret_cast<float*>(data);
    }
    packed_.add(group, data, panels.size() * bytes, bytes);
  });
  if (head.slices.empty()) head = embed;
}

Weights::Slot& Weights::find(const Source& source) {
  const auto found = slots_.find(source.name);
  if (found == slots_.end()) fail("this model has no weight named " + source.name);
  Slot& slot = found->second;
  const std::vector<int64_t> expected = slot.cols ? std::vector<int64_t>{slot.rows, slot.cols} : std::vector<int64_t>{slot.rows};
  if (source.shape != expected) {
    fail(source.name + " must have the shape " + shape_text(expected) + ", not " + shape_text(source.shape));
  }
  return slot;
}

int Weights::Slot::first_row(int panel) const {
  int low = 0, high = rows;  // columns ascend with rows
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (column(middle) / kPanel < panel) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

Range Weights::rows_of(const Slot& slot, int group) const {
  if (slot.cols == 0) return {0, group == 0 ? slot.rows : 0};
  const Range panels = slot.linear->slices[group].panels;
  return {slot.first_row(panels.begin), slot.first_row(panels.end)};
}

void Weights::pack(const Slot& slot, const Source& source, int group, int row_begin, int row_end, char* room) const {
  if (slot.cols == 0) {
    for (int r = row_begin; r < row_end; ++r) (*slot.vector)[slot.column(r)] = read_float(source, r * source.strides[0]);
    return;
  }
  const Linear& linear = *slot.linear;
  const Linear::Slice& slice = linear.slices[group];
  const ptrdiff_t start = row_begin * source.strides[0] * dtype_bytes(source.type);
  Lines lines{static_cast<const char*>(source.data) + start, source.strides[0], source.strides[1]};
  if (source.swapped) {
    const auto swap = source.type == DType::kFloat32 ? swap_lines<uint32_t> : swap_lines<uint16_t>;
    lines = swap(lines, row_end - row_begin, slot.cols, room);
  }
  kernels_.pack(linear.format, {lines.data, source.type, lines.row_stride, lines.col_stride, slot.rows, slot.cols,
                                slice.weight, linear.k, slot.group, slot.group_stride,
                                slot.offset - slice.panels.begin * kPanel, row_begin, row_end});
}

void Weights::set(std::span<const Source> sources, ThreadPool& pool, const std::atomic<bool>& stop) {
  // What a worker of a group packs at a time.
  struct Piece {
    size_t source;
    int row_begin, row_end;
  };
  std::vector<std::vector<Piece>> pieces(arenas_.size());  // [groups]
  std::vector<Slot*> slots;
  size_t room = 0;  // for what a worker swaps
  for (size_t i = 0; i < sources.size(); ++i) {
    slots.push_back(&find(sources[i]));
    const Slot& slot = *slots[i];
    if (sources[i].swapped) room = std::max(room, size_t{kPanel} * slot.cols * dtype_bytes(sources[i].type));
    for (size_t group = 0; group < pieces.size(); ++group) {
      const Range rows = rows_of(slot, static_cast<int>(group));
      for (int row = rows.begin; row < rows.end; row += kPanel) {
        pieces[group].push_back({i, row, std::min(row + kPanel, rows.end)});
      }
    }
  }
  std::vector<std::atomic<int>> rows_done(sources.size());
  std::vector<char> rooms(room * pool.size());
  // One region for all, so that nobody waits for the others at the end of each tensor.
  pool.run([&](Worker& worker) {
    const std::vector<Piece>& own = pieces[worker.group()];
    worker.share_in_group(static_cast<int64_t>(own.size()), 1, [&](int64_t piece, int64_t) {
      if (stop.load(std::memory_order_relaxed)) return;
      const auto [i, begin, end] = own[piece];
      pack(*slots[i], sources[i], worker.group(), begin, end, rooms.data() + worker.index() * room);
      const int rows = end - begin;
      if (rows_done[i].fetch_add(rows, std::memory_order_acq_rel) + rows == slots[i]->rows) give_back(sources[i]);
    });
  });
  if (stop.load()) throw Stopped();
  for (Slot* slot : slots) slot->done = true;
}

bool Weights::read_packed(int file, int64_t offset, uint64_t checksum, ThreadPool& pool,
                          const std::atomic<bool>& stop) {
  const bool good = packed_.read(file, offset, checksum, pool, stop);
  if (stop.load()) throw Stopped();
  if (good) {
    for (auto& [name, slot] : slots_) slot.done = true;
  }
  return good;
}

void Weights::check_complete() const {
  for (const auto& [name, slot] : slots_) {
    if (!slot.done) fail("the weight " + name + " was not loaded");
  }
}

}  // namespace tidewheel
