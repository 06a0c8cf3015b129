#include "quantize/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "kernels/block_formats.h"
#include "quantize/grid.h"
#include "quantize/pieces.h"
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

template <typename T, int DIMS>
using Array = nb::ndarray<T, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 2>;

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

template <typename A>
bool has_shape(const A& array, size_t rows, size_t columns) {
  return array.shape(0) == rows && array.shape(1) == columns;
}

float largest_code(int bits) {
  require(bits >= 2 && bits <= 8, "codes have 2 to 8 bits");
  return static_cast<float>((1 << bits) - 1);
}

constexpr int64_t kPieceWeights = 1 << 16;  // that a thread takes at once

void search_grid(const Floats& rows, const Array<const float, 1>& importance, int bits, bool symmetric,
                 const std::string& scale_type, const Array<float, 2>& scales, const Array<uint8_t, 2>& zeros,
                 const Array<uint8_t, 2>& codes, const Array<double, 1>& errors, const Array<double, 1>& squares, int threads,
                 const std::string& isa) {
  const size_t count = rows.shape(0), cols = rows.shape(1), groups = scales.shape(1);
  require(groups > 0 && cols > 0 && cols % groups == 0 && cols / groups % kGridStep == 0 && cols <= INT32_MAX,
          "groups must have a multiple of 16 inputs");
  require(importance.size() == cols, "importance must have a number for each input");
  require(has_shape(scales, count, groups) && has_shape(zeros, count, groups) && has_shape(codes, count, cols) &&
              errors.size() == count && squares.size() == count,
          "outputs must have the shape of the matrix");
  const DType type = type_of(scale_type, scale_type == "float32" ? 32 : 16);
  SearchGridArgs args{{static_cast<int>(cols / groups), largest_code(bits), symmetric, type}, static_cast<int>(cols),
                      rows.data(), importance.data(), scales.data(), zeros.data(), codes.data(), errors.data(),
                      squares.data(), 0, 0};
  const Kernels& kernels = choose_kernels(isa);
  const nb::gil_scoped_release release;
  const int64_t whole = static_cast<int64_t>(count), piece = std::max<int64_t>(1, kPieceWeights / args.cols);
  for_pieces((whole + piece - 1) / piece, threads, [&](int64_t i) {
    SearchGridArgs part = args;
    part.row_begin = i * piece, part.row_end = std::min(whole, part.row_begin + piece);
    kernels.search_grid(part);
  });
}

void round_inputs(const Array<float, 2>& x, const Floats& originals, const Floats& factor, const Array<const int, 1>& groups,
                  const Floats& scales, const Floats& zeros, int bits, const Array<uint8_t, 2>& codes,
                  const Array<double, 2>& residuals, int threads, const std::string& isa) {
  const size_t inputs = x.shape(0), columns = x.shape(1), strips = (columns + kGridStrip - 1) / kGridStrip;
  require(inputs <= kGridBlock && columns <= INT32_MAX, "a block has at most 64 inputs");
  require(has_shape(originals, inputs, columns) && has_shape(factor, inputs, inputs) && groups.size() == inputs &&
              scales.shape(1) == columns && has_shape(zeros, scales.shape(0), columns) && has_shape(codes, inputs, columns) &&
              has_shape(residuals, strips, inputs),
          "arrays must have the shape of the block");
  for (size_t i = 0; i < inputs; ++i) {
    require(groups.data()[i] >= 0 && static_cast<size_t>(groups.data()[i]) < scales.shape(0), "there is no such group");
  }
  const RoundInputsArgs args{static_cast<int>(inputs), static_cast<int>(columns), largest_code(bits), factor.data(),
                             originals.data(), groups.data(), scales.data(), zeros.data(), x.data(), codes.data(),
                             residuals.data(), 0, 0};
  const Kernels& kernels = choose_kernels(isa);
  const nb::gil_scoped_release release;
  for_pieces(static_cast<int64_t>(strips), threads, [&](int64_t strip) {
    RoundInputsArgs part = args;
    part.strip_begin = strip, part.strip_end = strip + 1;
    kernels.round_inputs(part);
  });
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize", &quantize, "kind"_a, "rows"_a, "dtype"_a = "float32", "importance"_a.none() = nb::none(),
        "threads"_a = 1, "thorough"_a = false, "isa"_a = "auto",
        "Rows of floats as blocks of a GGUF type: [rows, bytes].");
  m.def("search_grid", &search_grid, "rows"_a, "importance"_a, "bits"_a, "symmetric"_a, "scale_type"_a, "scales"_a, "zeros"_a,
        "codes"_a, "errors"_a, "squares"_a, "threads"_a = 1, "isa"_a = "auto",
        "The grid with the least error for each group of inputs, and the nearest codes: see SearchGridArgs.");
  m.def("round_inputs", &round_inputs, "x"_a, "originals"_a, "factor"_a, "groups"_a, "scales"_a, "zeros"_a, "bits"_a,
        "codes"_a, "residuals"_a, "threads"_a = 1, "isa"_a = "auto",
        "GPTQ's codes of some inputs, one after the other: see RoundInputsArgs.");
}

}  // namespace tidewheel
