#include "quantize/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>

#include "kernels/block_formats.h"
#include "quantize/quantize_rows.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidewheel {
namespace {

using Rows = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Importance = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>;

DType type_of(const std::string& name, int bits) {
  const DType type = name == "float32" ? DType::kFloat32 : name == "bfloat16" ? DType::kBFloat16 : DType::kFloat16;
  if ((type == DType::kFloat16 && name != "float16") || bits != dtype_bytes(type) * 8) {
    throw std::invalid_argument("rows must be of float32, bfloat16 or float16, and hold elements of that");
  }
  return type;
}

Blocks quantize(const std::string& kind, const Rows& rows, const std::string& dtype,
                const std::optional<Importance>& importance, int threads, bool thorough, const std::string& isa) {
  const BlockTypeInfo* info = find_block_type(kind);
  if (!info || !info->bytes) throw std::invalid_argument("there are no blocks of the type " + kind);
  if (threads < 1) throw std::invalid_argument("there must be at least one thread");
  if (rows.shape(1) > 1 && rows.stride(1) != 1) throw std::invalid_argument("rows must be contiguous");
  if (rows.shape(0) > 1 && rows.stride(0) < 0) throw std::invalid_argument("rows must lie one behind the other");
  if (rows.shape(1) > INT32_MAX) throw std::invalid_argument("rows are too long");
  if (importance && importance->size() != rows.shape(1)) {
    throw std::invalid_argument("importance must have a number for each input");
  }
  QuantizeArgs args{};
  args.type = info->type;
  args.source_type = type_of(dtype, rows.dtype().bits);
  args.x = static_cast<const char*>(rows.data());
  args.row_bytes = static_cast<size_t>(rows.stride(0)) * dtype_bytes(args.source_type);
  args.cols = static_cast<int>(rows.shape(1));
  args.effort = thorough ? Effort::kThorough : Effort::kFast;
  const size_t row_bytes = rows.shape(1) / info->inputs * info->bytes;
  auto out = std::make_unique<uint8_t[]>(rows.shape(0) * row_bytes);
  args.out = out.get();
  const Kernels& kernels = choose_kernels(isa);
  {
    const nb::gil_scoped_release release;
    quantize_rows(kernels, args, importance ? importance->data() : nullptr, static_cast<int64_t>(rows.shape(0)), threads);
  }
  const nb::capsule owner(out.get(), [](void* data) noexcept { delete[] static_cast<uint8_t*>(data); });
  return Blocks(out.release(), {rows.shape(0), row_bytes}, owner);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize", &quantize, "kind"_a, "rows"_a, "dtype"_a = "float32", "importance"_a.none() = nb::none(),
        "threads"_a = 1, "thorough"_a = false, "isa"_a = "auto",
        "Rows of floats as blocks of a GGUF type: [rows, bytes].");
}

}  // namespace tidewheel
