#include "model/adapter.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "model/require.h"

namespace tidewheel {
namespace {

// An A, and where its values begin in h. With a bias there is one value more, which is always 1.
struct Projection {
  const LowRankUpdate* update;
  int first;
  bool bias;

  int values() const { return update->rank + bias; }
  bool is_that_of(const LowRankUpdate& other) const {
    return update->a == other.a && update->rank == other.rank && update->scale == other.scale;
  }
};

// A packed column, and what of which update is added to it.
struct Column {
  int projection = -1, row = 0;
  const LowRankUpdate* update = nullptr;
};

struct Layout {
  const Linear* linear = nullptr;
  std::vector<Projection> projections;
  std::vector<Column> columns;  // of all panels

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

int projection_of(Layout& layout, const LowRankUpdate& update) {
  int i = 0;
  for (Projection& known : layout.projections) {
    if (known.is_that_of(update)) return i;
    ++i;
  }
  layout.projections.push_back({&update, 0, false});
  return i;
}

std::map<int, Layout> layouts(const Weights& weights, std::span<const LowRankUpdate> updates) {
  std::map<int, Layout> all;  // by Linear::id
  for (const LowRankUpdate& update : updates) {
    const std::optional<MatrixPlace> place = weights.place_of(update.name);
    if (!place) fail("this model has no matrix named " + update.name);
    require(update.rank > 0 && update.first_output >= 0 && update.inputs == place->cols &&
                update.first_output + update.outputs <= place->rows,
            "an update must have the shape of its matrix");
    Layout& layout = all[place->linear->id];
    layout.linear = place->linear;
    layout.columns.resize(round_up(place->linear->n, kPanel));
    const int index = projection_of(layout, update);
    layout.projections[index].bias |= update.bias != nullptr;
    for (int r = 0; r < update.outputs; ++r) {
      Column& column = layout.columns[place->columns.of(update.first_output + r)];
      require(column.projection < 0, "two updates are of the same outputs");
      column = {index, r, &update};
    }
  }
  for (auto& [id, layout] : all) {
    int next = 0;
    for (Projection& projection : layout.projections) {
      projection.first = next;
      next += projection.values();
    }
  }
  return all;
}

// The values of h that the columns of a stripe need.
LowRankStripe stripe_of(const Layout& layout, size_t first_column) {
  int begin = layout.values(), end = 0;
  for (size_t c = first_column; c < first_column + kStripe; ++c) {
    if (layout.columns[c].projection < 0) continue;
    const Projection& projection = layout.projections[layout.columns[c].projection];
    begin = std::min(begin, projection.first);
    end = std::max(end, projection.first + projection.values());
  }
  return {nullptr, begin, std::max(end - begin, 0)};
}

// The part without its content: sizes are known, pointers are not.
Adapter::Part outline(const Layout& layout) {
  Adapter::Part part;
  part.values = layout.values();
  for (const Projection& projection : layout.projections) {
    part.scale.insert(part.scale.end(), projection.values(), projection.update->scale);
    part.one.insert(part.one.end(), projection.update->rank, 0.0f);
    if (projection.bias) part.one.push_back(1);
  }
  for (size_t column = 0; column < layout.columns.size(); column += kStripe) part.stripes.push_back(stripe_of(layout, column));
  return part;
}

void fill_a(const Layout& layout, DType type, char* a) {
  for (const Projection& projection : layout.projections) {
    const size_t inputs = projection.update->inputs, first = projection.first * inputs;
    for (size_t i = 0; i < projection.update->rank * inputs; ++i) store_as(type, a, first + i, projection.update->a[i]);
  }
}

void fill_stripe(const Layout& layout, size_t first_column, const LowRankStripe& stripe, DType type, char* b) {
  for (int c = 0; c < kStripe; ++c) {
    const Column& column = layout.columns[first_column + c];
    if (column.projection < 0) continue;
    const LowRankUpdate& update = *column.update;
    const int first = layout.projections[column.projection].first - stripe.first;
    for (int j = 0; j < update.rank; ++j) {
      store_as(type, b, size_t(first + j) * kStripe + c, update.b[size_t(column.row) * update.rank + j]);
    }
    if (update.bias) store_as(type, b, size_t(first + update.rank) * kStripe + c, update.bias[column.row]);
  }
}

}  // namespace

Adapter::Adapter(const Weights& weights, DType type, std::span<const LowRankUpdate> updates, int most_values)
    : type_(type), parts_(weights.matrices().size()) {
  const std::map<int, Layout> all = layouts(weights, updates);
  const size_t element = dtype_bytes(type);
  const auto a_bytes = [&](const Layout& layout) { return round_up(layout.values() * layout.linear->k * element, 64); };
  const auto b_bytes = [&](const LowRankStripe& stripe) { return round_up(stripe.count * kStripe * element, 64); };
  size_t bytes = 0;
  for (const auto& [id, layout] : all) {
    if (layout.values() > most_values) {
      fail("the updates of one matrix have " + std::to_string(layout.values()) + " values together, and there is room for " +
           std::to_string(most_values));
    }
    Part& part = parts_[id].emplace(outline(layout));
    bytes += a_bytes(layout);
    for (const LowRankStripe& stripe : part.stripes) bytes += b_bytes(stripe);
  }
  memory_ = Arena(bytes);
  char* next = memory_.data();
  for (const auto& [id, layout] : all) {
    Part& part = *parts_[id];
    fill_a(layout, type, next);
    part.a = next;
    next += a_bytes(layout);
    for (size_t s = 0; s < part.stripes.size(); ++s) {
      LowRankStripe& stripe = part.stripes[s];
      fill_stripe(layout, s * kStripe, stripe, type, next);
      stripe.b = next;
      next += b_bytes(stripe);
    }
  }
}

}  // namespace tidewheel
