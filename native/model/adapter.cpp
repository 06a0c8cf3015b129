#include "model/adapter.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "model/require.h"

namespace tidewheel {
namespace {

// An A matrix, and where its values begin in h. A bias adds one more value, which is always the scale. Shifts add
// another one, which is always 1.
struct Projection {
  const LowRankUpdate* update;
  int first;
  bool bias, shift;

  int values() const { return update->rank + bias + shift; }
  bool is_that_of(const LowRankUpdate& other) const {
    return update->rank == other.rank && (update->rank == 0 || (update->a == other.a && update->scale == other.scale));
  }
};

// For a packed column: the update that is added to it, its row of B, and its projection.
struct Column {
  int projection = -1, row = 0;
  const LowRankUpdate* update = nullptr;
};

struct Layout {
  const Linear* linear = nullptr;
  std::vector<Projection> projections;
  std::vector<Column> columns;  // in all panels

  int values() const { return projections.back().first + projections.back().values(); }
};

void store_as(DType type, char* to, size_t index, float value) {
  if (type == DType::kFloat32) {
    std::memcpy(to + index * sizeof value, &value, sizeof value);
    return;
  }
  const uint16_t bits = type == DType::kBFloat16 ? to_bf16(value).bits : to_f16(value).bits;
  std::memcpy(to + index * sizeof bits, &bits, sizeof bits);
}

float load_as(DType type, const char* from, size_t index) {
  if (type == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + index * sizeof value, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + index * sizeof bits, sizeof bits);
  return type == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

void copy_matrix(const OwnMatrix& matrix, size_t elements, DType type, char* to) {
  const char* from = static_cast<const char*>(matrix.data);
  if (matrix.type == type) {
    std::memcpy(to, from, elements * dtype_bytes(type));
    return;
  }
  for (size_t i = 0; i < elements; ++i) store_as(type, to, i, load_as(matrix.type, from, i));
}

// The index of an input of one of a LoRA panel's outputs.
size_t place_in_lora_panel(DType type, int output, int input) {
  const int step = lora_panel_step(type);
  return size_t(input / step * kLoraPanel + output) * step + input % step;
}

size_t lora_panels_bytes(size_t outputs, int inputs, DType type) {
  return (outputs + kLoraPanel - 1) / kLoraPanel * lora_panel_bytes(inputs, type);
}

// Packs a matrix into LoRA panels that contain only zeros so far.
template <typename At>
void fill_lora_panels(DType type, size_t outputs, int inputs, At&& at, char* to) {
  for (size_t first = 0; first < outputs; first += kLoraPanel, to += lora_panel_bytes(inputs, type)) {
    const int count = static_cast<int>(std::min<size_t>(kLoraPanel, outputs - first));
    for (int i = 0; i < inputs; ++i) {
      for (int o = 0; o < count; ++o) store_as(type, to, place_in_lora_panel(type, o, i), at(first + o, i));
    }
  }
}

int projection_of(Layout& layout, const LowRankUpdate& update) {
  int i = 0;
  for (Projection& known : layout.projections) {
    if (known.is_that_of(update)) return i;
    ++i;
  }
  layout.projections.push_back({&update, 0, false, false});
  return i;
}

// An update, and the place of its matrix.
struct Placed {
  const LowRankUpdate* update;
  MatrixPlace place;
};

// Updates by Linear::id.
std::map<int, std::vector<Placed>> by_matrix(const Weights& weights, std::span<const LowRankUpdate> updates) {
  std::map<int, std::vector<Placed>> all;
  for (const LowRankUpdate& update : updates) {
    const std::optional<MatrixPlace> place = weights.place_of(update.name);
    if (!place) fail("this model has no matrix named " + update.name);
    require(update.rank >= 0 && (update.rank > 0 || (update.shift && !update.bias)), "an update must have a rank, or a shift");
    require(update.first_output >= 0 && update.inputs == place->cols &&
                update.first_output + update.outputs <= place->rows,
            "an update must have the shape of its matrix");
    all[place->linear->id].push_back({&update, *place});
  }
  return all;
}

Layout layout_of(std::span<const Placed> updates) {
  Layout layout;
  layout.linear = updates.front().place.linear;
  layout.columns.resize(round_up(layout.linear->n, kPanel));
  for (const auto& [update, place] : updates) {
    const int index = projection_of(layout, *update);
    layout.projections[index].bias |= update->bias != nullptr;
    layout.projections[index].shift |= update->shift != nullptr;
    for (int r = 0; r < update->outputs; ++r) {
      Column& column = layout.columns[place.columns.of(update->first_output + r)];
      require(column.projection < 0, "two updates are of the same outputs");
      column = {index, r, update};
    }
  }
  int next = 0;
  for (Projection& projection : layout.projections) {
    projection.first = next;
    next += projection.values();
  }
  return layout;
}

// The range of values of h that a LoRA panel's columns need.
LoraPanel lora_panel_of(const Layout& layout, size_t first_column) {
  int begin = layout.values(), end = 0;
  for (size_t c = first_column; c < first_column + kLoraPanel; ++c) {
    if (layout.columns[c].projection < 0) continue;
    const Projection& projection = layout.projections[layout.columns[c].projection];
    begin = std::min(begin, projection.first);
    end = std::max(end, projection.first + projection.values());
  }
  return {nullptr, begin, std::max(end - begin, 0)};
}

// A Part without its content: the sizes are set, the pointers are not.
Adapter::Part outline(const Layout& layout) {
  Adapter::Part part;
  part.values = layout.values();
  for (const Projection& projection : layout.projections) {
    part.scale.insert(part.scale.end(), projection.values() - projection.shift, projection.update->scale);
    if (projection.shift) part.scale.push_back(1);
    part.one.insert(part.one.end(), projection.update->rank, 0.0f);
    part.one.insert(part.one.end(), projection.bias + projection.shift, 1.0f);
  }
  for (size_t column = 0; column < layout.columns.size(); column += kLoraPanel) part.lora_panels.push_back(lora_panel_of(layout, column));
  return part;
}

void fill_a(const Layout& layout, DType type, char* a) {
  const int inputs = layout.linear->k;
  std::vector<const float*> rows(layout.values());  // null: zeros
  for (const Projection& projection : layout.projections) {
    for (int j = 0; j < projection.update->rank; ++j) rows[projection.first + j] = projection.update->a + size_t(j) * inputs;
  }
  fill_lora_panels(type, rows.size(), inputs, [&](size_t value, int i) { return rows[value] ? rows[value][i] : 0.0f; }, a);
}

void fill_lora_panel(const Layout& layout, size_t first_column, const LoraPanel& lora_panel, DType type, char* b) {
  for (int c = 0; c < kLoraPanel; ++c) {
    const Column& column = layout.columns[first_column + c];
    if (column.projection < 0) continue;
    const LowRankUpdate& update = *column.update;
    const Projection& projection = layout.projections[column.projection];
    const int first = projection.first - lora_panel.first;
    const auto store = [&](int value, float x) { store_as(type, b, place_in_lora_panel(type, c, first + value), x); };
    for (int j = 0; j < update.rank; ++j) {
      store(j, update.b[size_t(column.row) * update.rank + j]);
    }
    if (update.bias) store(update.rank, update.bias[column.row]);
    if (update.shift) store(update.rank + projection.bias, update.shift[column.row]);
  }
}

}  // namespace

std::optional<MatrixPlace> table_of(const Weights& weights) {
  const std::optional<MatrixPlace> embedding = weights.place_of("embed.weight");
  return embedding ? embedding : weights.place_of("head.weight");
}

Adapter::Adapter(const Weights& weights, DType type, const AdapterContent& content, int max_values)
    : type_(type), rope_factor_(content.rope_factor), parts_(weights.matrices().size()) {
  require(rope_factor_ >= 1, "a rope's angles must be divided by at least 1");
  const std::map<int, std::vector<Placed>> all = by_matrix(weights, content.updates);
  const size_t element = dtype_bytes(type);
  const std::optional<MatrixPlace> table = table_of(weights);
  require(table || (!content.embedding && !content.embed && !content.head), "this stage has no embedding, and no head");
  size_ = table ? table->cols : 0;
  const size_t vocab = table ? table->rows : 0, matrix_elements = vocab * size_;
  if (const auto& added = content.embedding) {
    require(added->rank > 0 && size_t(added->inputs) == vocab && added->outputs == size_ && !added->bias && !added->shift,
            "an update of the embedding must have its shape");
    rank_ = added->rank, scale_ = added->scale;
  }
  const auto a_bytes = [&](const Layout& layout) { return lora_panels_bytes(layout.values(), layout.linear->k, type); };
  const size_t tokens_bytes = round_up(vocab * rank_ * element, 64), rows_bytes = lora_panels_bytes(size_, rank_, type);
  const size_t embed_bytes = round_up(matrix_elements * element, 64), head_bytes = lora_panels_bytes(vocab, size_, type);
  size_t bytes = tokens_bytes + rows_bytes + (content.embed ? embed_bytes : 0) + (content.head ? head_bytes : 0);
  // Each layout is computed twice, because the layouts of all of a model's experts would take more memory than the
  // adapter.
  changed_.reserve(all.size());
  for (const auto& [id, updates] : all) {
    const Layout layout = layout_of(updates);
    changed_.push_back(id);
    if (layout.values() > max_values) {
      fail("the updates of one matrix have " + std::to_string(layout.values()) + " values together, and there is room for " +
           std::to_string(max_values));
    }
    Part& part = parts_[id].emplace(outline(layout));
    bytes += a_bytes(layout);
    for (const LoraPanel& lora_panel : part.lora_panels) bytes += lora_panel.bytes(type);
  }
  memory_ = Arena(bytes);
  char* next = memory_.data();
  Part* before = nullptr;
  for (const auto& [id, updates] : all) {
    const Layout layout = layout_of(updates);
    Part& part = *parts_[id];
    fill_a(layout, type, next);
    part.a = next;
    if (before) {
      before->next = next;
      before->next_bytes = round_up(a_bytes(layout) / (before->lora_panels.size() * kLoraPanel / kPanel), 64);
    }
    before = &part;
    next += a_bytes(layout);
    for (size_t s = 0; s < part.lora_panels.size(); ++s) {
      LoraPanel& lora_panel = part.lora_panels[s];
      fill_lora_panel(layout, s * kLoraPanel, lora_panel, type, next);
      lora_panel.b = next;
      next += lora_panel.bytes(type);
    }
  }
  if (content.embedding) {
    for (size_t token = 0; token < vocab; ++token) {
      for (int j = 0; j < rank_; ++j) store_as(type, next, token * rank_ + j, content.embedding->a[j * vocab + token]);
    }
    tokens_a_ = next;
    next += tokens_bytes;
    fill_lora_panels(type, size_, rank_, [&](size_t row, int j) { return content.embedding->b[row * rank_ + j]; }, next);
    rows_b_ = next;
    next += rows_bytes;
  }
  if (const auto& own = content.embed) {
    copy_matrix(*own, matrix_elements, type, next);
    embed_ = next;
    next += embed_bytes;
  }
  if (const auto& own = content.head) {
    const char* from = static_cast<const char*>(own->data);
    fill_lora_panels(type, vocab, size_, [&](size_t row, int i) { return load_as(own->type, from, row * size_ + i); }, next);
    head_ = next;
  }
}

bool Adapter::look_up(int token, float* row) const {
  if (!embed_) return false;
  for (int i = 0; i < size_; ++i) row[i] = load_as(type_, embed_, size_t(token) * size_ + i);
  return true;
}

void Adapter::add_embedding(const Kernels& kernels, int token, float* row, float* scratch) const {
  if (!tokens_a_) return;
  float* const h = scratch;
  float* const packed = h + rank_;
  float* const y = packed + packed_row_floats(rank_);
  for (int j = 0; j < rank_; ++j) h[j] = scale_ * load_as(type_, tokens_a_, size_t(token) * rank_ + j);
  kernels.pack_lora_panel_inputs(type_, h, 0, rank_, kLoraPanelInputs, packed);
  const void* const x = packed;
  kernels.project({&x, 1, rank_, rows_b_, type_, (size_ + kLoraPanel - 1) / kLoraPanel, &y});
  for (int i = 0; i < size_; ++i) row[i] += y[i];
}

}  // namespace tidewheel
