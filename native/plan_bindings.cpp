#include "plan_bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "kernels/block_formats.h"
#include "model/tower_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidewheel {
namespace {

// "grid" and the types of quantized files keep the file's bits. The other parameters belong to grids.
WeightFormat parse_block_format(const std::string& kind, int group, bool zero_points, int bits, const std::string& scale_type,
                                const std::vector<float>& table) {
  const BlockTypeInfo* info = find_block_type(kind);
  if (info && is_small_floats(info->type)) {
    if (info->type == BlockType::kTable4 && table.size() != 16) throw std::invalid_argument("a table has 16 numbers");
    const auto format = small_float_format(info->type, group, table.data());
    if (!format) {
      throw std::invalid_argument("small floats have groups of 32, 64 or a multiple of 128, not " + std::to_string(group));
    }
    return *format;
  }
  if (info) return info->format;
  const std::map<std::string, DType> types = {
      {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}, {"float16", DType::kFloat16}};
  const auto type = types.find(scale_type);
  if (type == types.end()) throw std::invalid_argument("scales are float32, bfloat16 or float16, not " + scale_type);
  const auto format = grid_format(bits, group, zero_points, type->second);
  if (!format) {
    throw std::invalid_argument("a grid has 2, 3, 4 or 8 bits and groups of 32, 64, 128 or a multiple of 256, not " +
                                std::to_string(bits) + " and " + std::to_string(group));
  }
  return *format;
}

WeightFormat parse_format(const std::string& kind, int group, bool zero_points, int bits, const std::string& scale_type,
                          const std::vector<float>& table) {
  if (kind == "grid" || find_block_type(kind)) return parse_block_format(kind, group, zero_points, bits, scale_type, table);
  static const std::map<std::string, WeightKind> kinds = {
      {"float32", WeightKind::kFloat32}, {"bfloat16", WeightKind::kBFloat16},        {"float16", WeightKind::kFloat16},
      {"int8", WeightKind::kInt8},       {"int8-channel", WeightKind::kInt8Channel}, {"int4", WeightKind::kInt4}};
  const auto found = kinds.find(kind);
  if (found == kinds.end()) {
    throw std::invalid_argument("a weight is stored as float32, bfloat16, float16, int8, int8-channel, int4, grid or as a type of quantized files, not " + kind);
  }
  if (found->second != WeightKind::kInt4) return {found->second};
  if (group != 32 && group != 64 && group != 128) throw std::invalid_argument("int4 has groups of 32, 64 or 128");
  return {WeightKind::kInt4, group, zero_points};
}

// Python's words for an enum's values. The error for any other word begins with `rule`.
template <typename Enum>
struct Words {
  const char* rule;
  std::vector<std::pair<std::string, Enum>> values;

  // Lists the words, each in `quote` marks.
  std::string listed(const char* quote, const char* last_separator) const {
    std::string list;
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) list += i + 1 < values.size() ? ", " : last_separator;
      list += quote + values[i].first + quote;
    }
    return list;
  }
};

const Words<NormKind>& words(NormKind) {
  static const Words<NormKind> known = {"a norm must be ", {{"rms", NormKind::kRms}, {"layer", NormKind::kLayer}}};
  return known;
}

const Words<QkNormOver>& words(QkNormOver) {
  static const Words<QkNormOver> known = {
      "queries and keys are normalized over ",
      {{"head", QkNormOver::kHead}, {"each", QkNormOver::kEach}, {"whole", QkNormOver::kWhole}}};
  return known;
}

const Words<Activation>& words(Activation) {
  static const Words<Activation> known = {
      "activation must be ",
      {{"silu", Activation::kSilu}, {"gelu", Activation::kGelu}, {"gelu_tanh", Activation::kGeluTanh},
       {"gelu_quick", Activation::kGeluQuick}, {"relu", Activation::kRelu}, {"relu2", Activation::kRelu2}}};
  return known;
}

// A field's type in Python. For a class, it is the class's name.
template <typename T>
std::string python_type(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return "Literal[" + words(value).listed("\"", ", ") + "]";
  } else {
    return nb::cast<std::string>(nb::type<T>().attr("__name__"));
  }
}
std::string python_type(bool) { return "bool"; }
std::string python_type(int) { return "int"; }
std::string python_type(float) { return "float"; }
std::string python_type(const std::string&) { return "str"; }
template <typename T>
std::string python_type(const std::optional<T>&) {
  return python_type(T()) + " | None";
}
template <typename T, size_t SIZE>
std::string python_type(const std::array<T, SIZE>&) {
  return "Sequence[" + python_type(T()) + "]";
}
template <typename T>
std::string python_type(const std::vector<T>&) {
  return "Sequence[" + python_type(T()) + "]";
}
template <typename T>
std::string python_type(const std::map<std::string, T>&) {
  return "Mapping[str, " + python_type(T()) + "]";
}
template <typename First, typename... Others>
std::string python_type(const std::variant<First, Others...>&) {
  return (python_type(First()) + ... + (" | " + python_type(Others())));
}

template <typename T>
void set_field(const std::string& name, nb::handle given, T& value) {
  if constexpr (std::is_enum_v<T>) {
    std::string word;
    set_field(name, given, word);
    for (const auto& [known, meant] : words(value).values) {
      if (word == known) {
        value = meant;
        return;
      }
    }
    throw std::invalid_argument(words(value).rule + words(value).listed("", " or ") + ", not " + word);
  } else if (!nb::try_cast(given, value)) {
    const std::string type = nb::cast<std::string>(given.type().attr("__name__"));
    throw nb::type_error((name + " must be " + python_type(value) + ", not " + type).c_str());
  }
}

template <typename T>
nb::object field_value(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    for (const auto& [word, meant] : words(value).values) {
      if (value == meant) return nb::cast(word);
    }
    return nb::none();
  } else {
    return nb::cast(value);
  }
}

// Calls visit(name, plan) with a default plan of each class.
void each_plan(auto&& visit) {
  visit("NormPlan", NormPlan());
  visit("RopePlan", RopePlan());
  visit("TemperaturePlan", TemperaturePlan());
  visit("KvScales", KvScales());
  visit("DisentangledPlan", DisentangledPlan());
  visit("AttentionPlan", AttentionPlan());
  visit("LatentAttentionPlan", LatentAttentionPlan());
  visit("MlpPlan", MlpPlan());
  visit("DeltaNetPlan", DeltaNetPlan());
  visit("Mamba2Plan", Mamba2Plan());
  visit("ShortConvPlan", ShortConvPlan());
  visit("RouterPlan", RouterPlan());
  visit("ExpertsPlan", ExpertsPlan());
  visit("ParallelPlan", ParallelPlan());
  visit("PerLayerPlan", PerLayerPlan());
  visit("LaurelPlan", LaurelPlan());
  visit("AltUpPlan", AltUpPlan());
  visit("StreamsPlan", StreamsPlan());
  visit("ResidualBlockPlan", ResidualBlockPlan());
  visit("PerLayerEmbeddingPlan", PerLayerEmbeddingPlan());
  visit("EmbeddingPlan", EmbeddingPlan());
  visit("HeadPlan", HeadPlan());
  visit("MtpPlan", MtpPlan());
  visit("Eagle3Plan", Eagle3Plan());
  visit("DecoderPlan", DecoderPlan());
  visit("ProjectionPlan", ProjectionPlan());
  visit("CrossAttentionPlan", CrossAttentionPlan());
  visit("TowerPlan", TowerPlan());
}

// Python sets fields by keyword, and can read them. A field that it does not set keeps the struct's default.
template <typename Plan>
void bind_plan(nb::module_& m, const std::string& plan_name) {
  nb::class_<Plan>(m, plan_name.c_str())
      .def("__init__", [plan_name](Plan* self, nb::kwargs given) {
        Plan plan;
        plan.visit_fields([&](const char* name, auto& value) {
          if (!given.contains(name)) return;
          set_field(plan_name + "." + name, given[name], value);
          nb::del(given[name]);
        });
        if (given.size() > 0) {
          const std::string unknown = nb::cast<std::string>(given.keys()[0]);
          throw nb::type_error((plan_name + " has no field " + unknown).c_str());
        }
        new (self) Plan(std::move(plan));
      })
      .def("__getattr__", [plan_name](Plan& self, const std::string& asked) {
        nb::object found;
        self.visit_fields([&](const char* name, const auto& value) {
          if (asked == name) found = field_value(value);
        });
        if (!found.is_valid()) throw nb::attribute_error((plan_name + " has no field " + asked).c_str());
        return found;
      });
}

// For each plan, the types of its fields by name. tools/native_stub.py writes them into tidewheel/_native.pyi.
nb::dict plan_fields() {
  nb::dict plans;
  each_plan([&](const char* plan_name, auto plan) {
    nb::dict fields;
    plan.visit_fields([&](const char* name, const auto& value) { fields[name] = python_type(value); });
    plans[plan_name] = fields;
  });
  return plans;
}

}  // namespace

const float* kept_scale_table(const std::vector<float>& table) {
  if (table.size() != 256) throw std::invalid_argument("a table of scales has 256 numbers");
  static std::mutex mutex;
  static std::set<std::vector<float>> tables;
  const std::lock_guard lock(mutex);
  return tables.insert(table).first->data();
}

void bind_plans(nb::module_& m) {
  nb::class_<WeightFormat>(m, "WeightFormat")
      .def("__init__", [](WeightFormat* self, const std::string& kind, int group, bool zero_points, int bits,
                          const std::string& scale_type, const std::vector<float>& table,
                          const std::vector<float>& scale_table, int scale_run) {
        new (self) WeightFormat(parse_format(kind, group, zero_points, bits, scale_type, table));
        if (scale_table.empty()) return;
        if (self->kind != WeightKind::kTable4 || scale_run <= 0) {
          throw std::invalid_argument("scales in 8 bits are for table4, and have runs of groups");
        }
        self->scale_table = kept_scale_table(scale_table);
        self->scale_run = scale_run;
      }, "kind"_a, "group"_a = kRowGroup, "zero_points"_a = false, "bits"_a = 4, "scale_type"_a = "float16",
           "table"_a = std::vector<float>(), "scale_table"_a = std::vector<float>(), "scale_run"_a = 0);

  each_plan([&](const char* name, auto plan) { bind_plan<decltype(plan)>(m, name); });
  m.def("plan_fields", plan_fields);
}

}  // namespace tidewheel
