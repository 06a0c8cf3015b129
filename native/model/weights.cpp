#include "model/weights.h"

#include <algorithm>
#include <atomic>
#include <set>

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

constexpr size_t kPiece = size_t{1} << 19;  // bytes that are read and summed at once: they stay in a core's cache

// Against torn and flipped bytes, not against malice: FNV-1a by words in eight independent chains, so that it is
// bound by memory. `size` is a multiple of 64. Sums of pieces do not hang on the order in which they are done.
uint64_t piece_checksum(const char* data, size_t size, size_t index) {
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t chains[8];
  for (uint64_t& chain : chains) chain = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; i += sizeof chains) {
    for (size_t j = 0; j < 8; ++j) {
      uint64_t word;
      std::memcpy(&word, data + i + j * sizeof word, sizeof word);
      chains[j] = (chains[j] ^ word) * kPrime;
    }
  }
  uint64_t sum = index;
  for (const uint64_t chain : chains) sum = (sum ^ chain ^ chain >> 32) * kPrime;
  return sum;
}

bool read_all(int file, char* to, size_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t count = pread(file, to, size, offset);
    if (count <= 0) return false;
    to += count;
    size -= static_cast<size_t>(count);
    offset += count;
  }
  return true;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace

Weights::Weights(const ModelConfig& config, const Kernels& kernels, const WeightFormats& formats) : kernels_(kernels) {
  layers.resize(config.layers.size());
  plan(config, formats);
  place();
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

void Weights::place() {
  // Several slots may share one target (q, k and v one matrix): each target is placed once.
  const auto for_each_target = [this](auto&& visit) {
    std::set<const void*> seen;
    for (auto& [name, slot] : slots_) {
      const void* target = slot.cols ? static_cast<void*>(slot.linear) : static_cast<void*>(slot.vector);
      if (!seen.insert(target).second) continue;
      const size_t columns = round_up(slot.linear ? slot.linear->n : slot.rows, kPanel);
      visit(slot, align(slot.cols ? columns / kPanel * kernels_.panel_bytes(slot.linear->format, slot.linear->k)
                                  : columns * sizeof(float)));
    }
  };
  size_t total = 0;
  for_each_target([&](Slot&, size_t bytes) { total += bytes; });
  arena_ = Arena(total);
  char* next = arena_.data();
  for_each_target([&](Slot& slot, size_t bytes) {
    if (slot.cols) {
      slot.linear->weight = next;
    } else {
      *slot.vector = reinterpret_cast<float*>(next);
    }
    next += bytes;
  });
  if (!head.weight) head = embed;
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

void Weights::pack(const Slot& slot, const Source& source, int row_begin, int row_end, char* room) const {
  if (slot.cols == 0) {
    for (int r = row_begin; r < row_end; ++r) {
      (*slot.vector)[r / slot.group * slot.group_stride + r % slot.group + slot.offset] = read_float(source, r * source.strides[0]);
    }
    return;
  }
  const Linear& linear = *slot.linear;
  const ptrdiff_t start = row_begin * source.strides[0] * dtype_bytes(source.type);
  Lines lines{static_cast<const char*>(source.data) + start, source.strides[0], source.strides[1]};
  if (source.swapped) {
    const auto swap = source.type == DType::kFloat32 ? swap_lines<uint32_t> : swap_lines<uint16_t>;
    lines = swap(lines, row_end - row_begin, slot.cols, room);
  }
  kernels_.pack(linear.format, {lines.data, source.type, lines.row_stride, lines.col_stride, slot.rows, slot.cols,
                                linear.weight, linear.k, slot.group, slot.group_stride, slot.offset, row_begin,
                                row_end});
}

void Weights::set(std::span<const Source> sources, ThreadPool& pool, const std::atomic<bool>& stop) {
  std::vector<Slot*> slots;
  std::vector<int64_t> piece_ends;  // [sources]: the pieces of all tensors up to this one
  int64_t pieces = 0;
  size_t room = 0;  // for what a worker swaps
  for (const Source& source : sources) {
    slots.push_back(&find(source));
    if (source.swapped) room = std::max(room, size_t{kPanel} * slots.back()->cols * dtype_bytes(source.type));
    piece_ends.push_back(pieces += (slots.back()->rows + kPanel - 1) / kPanel);
  }
  std::vector<std::atomic<int>> rows_done(sources.size());
  std::vector<char> rooms(room * pool.size());
  // One region for all, so that nobody waits for the others at the end of each tensor.
  pool.run([&](Worker& worker) {
    worker.share(pieces, 1, [&](int64_t piece, int64_t) {
      if (stop.load(std::memory_order_relaxed)) return;
      const size_t i = std::upper_bound(piece_ends.begin(), piece_ends.end(), piece) - piece_ends.begin();
      const int rows = slots[i]->rows;
      const int begin = static_cast<int>(piece - (i ? piece_ends[i - 1] : 0)) * kPanel;
      const int end = std::min(begin + kPanel, rows);
      pack(*slots[i], sources[i], begin, end, rooms.data() + worker.index() * room);
      if (rows_done[i].fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == rows) give_back(sources[i]);
    });
  });
  if (stop.load()) throw Stopped();
  for (Slot* slot : slots) slot->done = true;
}

bool Weights::read_packed(int file, int64_t offset, uint64_t checksum, ThreadPool& pool,
                          const std::atomic<bool>& stop) {
  std::atomic<uint64_t> sum = 0;
  std::atomic<bool> complete = true;
  pool.run([&](Worker& worker) {
    worker.share(static_cast<int64_t>(arena_.bytes()), kPiece, [&](int64_t begin, int64_t end) {
      if (stop.load(std::memory_order_relaxed)) return;
      const size_t size = static_cast<size_t>(end - begin);
      if (!read_all(file, arena_.data() + begin, size, offset + begin)) {
        complete = false;
      } else {
        sum += piece_checksum(arena_.data() + begin, size, static_cast<size_t>(begin) / kPiece);
      }
    });
  });
  if (stop.load()) throw Stopped();
  if (!complete || sum != checksum) {
    std::memset(arena_.data(), 0, arena_.bytes());
    return false;
  }
  for (auto& [name, slot] : slots_) slot.done = true;
  return true;
}

uint64_t Weights::checksum() const {
  uint64_t sum = 0;
  for (size_t begin = 0; begin < arena_.bytes(); begin += kPiece) {
    sum += piece_checksum(arena_.data() + begin, std::min(kPiece, arena_.bytes() - begin), begin / kPiece);
  }
  return sum;
}

void Weights::check_complete() const {
  for (const auto& [name, slot] : slots_) {
    if (!slot.done) fail("the weight " + name + " was not loaded");
  }
}

}  // namespace tidewheel
