#include "model/weights/weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "kernels/block_formats.h"
#include "model/require.h"
#include "model/weights/byte_order.h"
#include "model/weights/finite.h"
#include "model/weights/pack_source.h"

namespace tidewheel {
namespace {

size_t align(size_t bytes) { return round_up(bytes, 64); }

float read_float(const Source& source, int64_t index) {
  if (source.type == DType::kFloat32) return bits_float(read_word<uint32_t>(source.data, index, source.swapped));
  const auto bits = read_word<uint16_t>(source.data, index, source.swapped);
  return source.type == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

// Lets the system free a tensor's pages. Parts of other tensors on these pages are read again when they are needed.
void give_back(const Source& source) {
  if (!source.mapped) return;
  int64_t begin = 0, end = 0;
  if (source.blocks) {
    end = static_cast<int64_t>((source.shape[0] - 1) * source.blocks->row_bytes + source.blocks->data_bytes);
  } else {
    const auto element = static_cast<int64_t>(dtype_bytes(source.type));
    end = element;
    for (size_t i = 0; i < source.shape.size(); ++i) {
      const int64_t reach = (source.shape[i] - 1) * source.strides[i] * element;
      (reach < 0 ? begin : end) += reach;
    }
  }
  const uintptr_t data = reinterpret_cast<uintptr_t>(source.data), page = sysconf(_SC_PAGESIZE);
  const uintptr_t first = (data + begin) / page * page;
  madvise(reinterpret_cast<void*>(first), data + end - first, MADV_DONTNEED);  // only a hint: if refused, pages stay
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

bool packs_floats(const WeightFormat& format) { return format.kind <= WeightKind::kInt4; }

// Whether the format keeps the bits of a matrix that a file stores in this way.
bool keeps(const WeightFormat& format, const StoredBlocks& stored) {
  if (is_small_floats(stored.type)) {
    std::optional<WeightFormat> own = small_float_format(stored.type, stored.group, stored.table);
    if (own) own->scale_table = stored.scale_table, own->scale_run = stored.scale_run;
    return own == format;
  }
  if (stored.type != BlockType::kGrid) return block_type_info(stored.type).format == format;
  return grid_format(stored.bits, stored.group, stored.zeros != nullptr, stored.scale_type) == format;
}

bool same_order(const std::vector<int32_t>* a, const std::vector<int32_t>* b) { return a == b || (a && b && *a == *b); }

bool is_order(const std::vector<int32_t>& order, int size) {
  std::vector<bool> named(size);
  for (const int32_t i : order) {
    if (i < 0 || i >= size || named[i]) return false;
    named[i] = true;
  }
  return order.size() == size_t(size);
}

}  // namespace

Weights::Weights(const Kernels& kernels, std::map<std::string, WeightFormat> formats, InputOrders orders)
    : kernels_(kernels), formats_(std::move(formats)), orders_(std::move(orders)) {}

void Weights::add(const std::string& name, const Slot& slot) {
  if (!slots_.emplace(name, slot).second) fail("two weights of this model are named " + name);
}

const WeightFormat& Weights::format_of(const std::string& name) const {
  const auto format = formats_.find(name);
  if (format == formats_.end()) fail("no format is given for the weight " + name);
  return format->second;
}

const std::vector<int32_t>* Weights::order_of(const std::string& name) const {
  const auto order = orders_.find(name);
  return order == orders_.end() ? nullptr : &order->second;
}

bool Weights::agree(const std::string& a, const std::string& b) const {
  return format_of(a) == format_of(b) && same_order(order_of(a), order_of(b));
}

std::optional<MatrixPlace> Weights::place_of(const std::string& name) const {
  const auto found = slots_.find(name);
  if (found == slots_.end() || found->second.cols == 0) return std::nullopt;
  const Slot& slot = found->second;
  return MatrixPlace{slot.linear, slot.columns, slot.rows, slot.cols};
}

std::pair<Linear*, Columns> Weights::add_matrix(const std::string& name, Linear& matrix, int rows, int cols, Columns columns) {
  const WeightFormat& format = format_of(name);
  const std::vector<int32_t>* order = order_of(name);
  if (order && !is_order(*order, cols)) fail("the order of the inputs of " + name + " must name each of them once");
  const bool in_a_row = columns.group_stride == 0;
  Linear* linear = &matrix;
  while (linear->next) linear = linear->next.get();
  const auto [added, is_new] = matrices_.emplace(linear, name);
  if (!is_new && !(linear->format == format && same_order(linear->input_order, order))) {
    if (!in_a_row) fail(added->second + " and " + name + " are packed into one matrix: they must have one format and order");
    linear->next = std::make_unique<Linear>();
    linear = linear->next.get();
    linear->first = columns.offset;
    matrices_.emplace(linear, name);
  }
  linear->format = format;
  linear->k = cols;
  if (linear->id < 0) linear->id = static_cast<int>(matrices_.size()) - 1;
  ++linear->tensors;
  linear->input_order = order;
  columns.offset -= linear->first;
  linear->n = in_a_row ? columns.offset + rows : columns.n;
  add(name, {linear, nullptr, rows, cols, columns});
  return {linear, columns};
}

void Weights::add_matrix(const std::string& name, Linear& matrix, int rows, int cols) {
  add_matrix(name, matrix, rows, cols, {rows, rows, 0, 0});
}

void Weights::add_linear(const std::string& name, Linear& linear, int rows, int cols, bool bias, const Columns& columns) {
  const auto [part, place] = add_matrix(name + ".weight", linear, rows, cols, columns);
  if (bias) add(name + ".bias", {part, &part->bias, rows, 0, place});
}

void Weights::add_linear(const std::string& name, Linear& linear, int rows, int cols, bool bias) {
  add_linear(name, linear, rows, cols, bias, {rows, rows, 0, 0});
}

void Weights::add_bias(const std::string& name, Linear& linear) {
  add(name + ".bias", {&linear, &linear.bias, linear.n, 0, {linear.n, linear.n, 0, 0}});
}

void Weights::add_vector(const std::string& name, float*& vector, int size) {
  add(name, {nullptr, &vector, size, 0, {size, size, 0, 0}});
}

void Weights::add_norm(const std::string& name, Norm& norm, const std::optional<NormPlan>& plan, int size) {
  if (!plan) return;
  norm.kind = plan->kind;
  norm.eps = plan->eps;
  if (plan->weight) add_vector(name + ".weight", norm.weight, size);
  if (plan->weight && plan->unit_offset) slots_.at(name + ".weight").added = 1;
  if (plan->bias) add_vector(name + ".bias", norm.bias, size);
}

void Weights::place(const Ownership& ownership) {
  for (const auto& [name, format] : formats_) {
    if (!slots_.contains(name)) fail("a format is given for " + name + ", which this model does not have");
  }
  for (const auto& [name, order] : orders_) {
    if (!formats_.contains(name)) fail("an order of inputs is given for " + name + ", which has no format");
  }
  // Several slots may share one target (q, k and v are one matrix). Each target is placed once. Calls visit(slot,
  // group, panels, bytes of one panel). A vector is one panel, in the first group.
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
        const size_t bytes = slot.linear->unpacked ? 0 : kernels_.panel_bytes(slot.linear->format, slot.linear->k);
        visit(slot, group, ownership.of(group, panels), bytes);
      }
    }
  };
  std::vector<size_t> next(ownership.groups());  // [groups]: bytes used of the group's arena
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
}

Weights::Slot& Weights::find(const Source& source) {
  const auto found = slots_.find(source.name);
  if (found == slots_.end()) fail("this model has no weight named " + source.name);
  Slot& slot = found->second;
  const std::vector<int64_t> expected = slot.cols ? std::vector<int64_t>{slot.rows, slot.cols} : std::vector<int64_t>{slot.rows};
  if (source.shape != expected) {
    fail(source.name + " must have the shape " + shape_text(expected) + ", not " + shape_text(source.shape));
  }
  const bool fits = source.blocks ? slot.cols && keeps(slot.linear->format, *source.blocks)
                                  : !slot.cols || packs_floats(slot.linear->format);
  if (!fits) fail(source.name + " is not stored in the format that the model's plan gives it");
  return slot;
}

Range Weights::rows_of(const Slot& slot, int group) const {
  if (slot.cols == 0) return {0, group == 0 ? slot.rows : 0};
  const Range panels = slot.linear->slices[group].panels;
  return {slot.columns.first_row(panels.begin, slot.rows), slot.columns.first_row(panels.end, slot.rows)};
}

void Weights::pack(const Slot& slot, const Source& source, int group, int row_begin, int row_end, char* room) const {
  if (slot.cols == 0) {
    for (int r = row_begin; r < row_end; ++r) {
      float& value = (*slot.vector)[slot.columns.of(r)] = read_float(source, r * source.strides[0]);
      if (slot.added != 0) value += slot.added;
    }
    return;
  }
  pack_rows(kernels_, *slot.linear, slot.linear->slices[group], source, slot.columns, slot.rows, row_begin, row_end, room);
}

bool Weights::set(std::span<const Source> sources, ThreadPool& pool, const std::atomic<bool>& stop) {
  // What a worker packs at a time.
  struct Piece {
    size_t source;
    int row_begin, row_end;
  };
  std::vector<std::vector<Piece>> pieces(arenas_.size());  // [groups]
  std::vector<Slot*> slots;
  size_t room = 0;  // for rows that a worker swaps
  for (size_t i = 0; i < sources.size(); ++i) {
    slots.push_back(&find(sources[i]));
    const Slot& slot = *slots[i];
    if (is_unpacked(slot)) {
      slot.linear->parts.push_back({sources[i], slot.columns, slot.rows});
    } else {
      room = std::max(room, room_for(sources[i], slot.cols));
    }
    for (size_t group = 0; group < pieces.size(); ++group) {
      const Range rows = rows_of(slot, static_cast<int>(group));
      for (int row = rows.begin; row < rows.end; row += kPanel) {
        pieces[group].push_back({i, row, std::min(row + kPanel, rows.end)});
      }
    }
  }
  std::vector<std::atomic<int>> rows_done(sources.size());
  std::vector<char> rooms(room * pool.size());
  std::atomic<bool> finite = true;
  // One parallel region for all tensors, so that no worker waits for the others at the end of each tensor.
  pool.run([&](Worker& worker) {
    const std::vector<Piece>& own = pieces[worker.group()];
    worker.share_in_group(static_cast<int64_t>(own.size()), 1, [&](int64_t piece, int64_t) {
      if (stop.load(std::memory_order_relaxed)) return;
      const auto [i, begin, end] = own[piece];
      if (!are_finite(sources[i], begin, end)) finite.store(false, std::memory_order_relaxed);
      if (is_unpacked(*slots[i])) return;
      pack(*slots[i], sources[i], worker.group(), begin, end, rooms.data() + worker.index() * room);
      const int rows = end - begin;
      if (rows_done[i].fetch_add(rows, std::memory_order_acq_rel) + rows == slots[i]->rows) give_back(sources[i]);
    });
  });
  if (stop.load()) throw Stopped();
  for (Slot* slot : slots) slot->done = true;
  return finite;
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
