// What Python sees, but for plans. Every call that computes drops the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "kernels/block_formats.h"
#include "model/executor.h"
#include "model/draft.h"
#include "model/tower.h"
#include "model/weights/string_ends.h"
#include "plan_bindings.h"
#include "quantize/bindings.h"
#include "runtime/ceilings.h"
#include "runtime/isa.h"
#include "runtime/topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidewheel {
namespace {

template <typename T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw std::invalid_argument("dtype must be float32, bfloat16 or float16, not " + name);
}

CacheType parse_cache_type(const std::string& name) {
  if (name == "float32") return CacheType::kFloat32;
  if (name == "bfloat16") return CacheType::kBFloat16;
  if (name == "float16") return CacheType::kFloat16;
  if (name == "fp8_e5m2") return CacheType::kFloat8E5M2;
  if (name == "fp8_e4m3") return CacheType::kFloat8E4M3;
  if (name == "int8") return CacheType::kInt8;
  if (name == "int4") return CacheType::kInt4;
  throw std::invalid_argument("a KV cache is of float32, bfloat16, float16, fp8_e5m2, fp8_e4m3, int8 or int4, not " + name);
}

// Keeps the arrays whose memory the spans point into.
class ArrayReader {
 public:
  explicit ArrayReader(nb::handle object) : object_(object) {}

  template <typename T>
  std::span<const T> get(const char* name) {
    Array1<T> array;
    if (!nb::try_cast(object_.attr(name), array, false)) {
      throw std::invalid_argument(std::string(name) + " must be a contiguous one-dimensional array of its type");
    }
    held_.push_back(nb::cast(array));
    return {array.data(), array.size()};
  }

  template <typename T>
  struct Matrix {
    std::span<const T> values = {};
    size_t columns = 0;
  };

  // Empty for None.
  template <typename T>
  Matrix<T> get_matrix(const char* name) {
    if (object_.attr(name).is_none()) return {};
    nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(object_.attr(name), array, false)) {
      throw std::invalid_argument(std::string(name) + " must be a contiguous two-dimensional array of its type");
    }
    held_.push_back(nb::cast(array));
    return {{array.data(), array.size()}, array.shape(1)};
  }

  // Empty for None.
  template <typename T>
  std::span<const T> get_optional(const char* name) {
    return object_.attr(name).is_none() ? std::span<const T>() : get<T>(name);
  }

 private:
  nb::handle object_;
  std::vector<nb::object> held_;
};

template <typename T, int N>
using Output = std::optional<nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>>;

template <typename T, int N>
std::span<T> output_span(Output<T, N>& output) {
  if (!output) return {};
  return {output->data(), output->size()};
}

struct SamplingOutputs {
  nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> tokens;
  Output<float, 1> logprobs;
  Output<int32_t, 1> ranks;
  Output<int32_t, 2> top_ids;
  Output<float, 2> top_logprobs;
};

// A step's TokenMasks, while the spans point into them.
struct Masks {
  explicit Masks(nb::handle batch) : object(batch.attr("masks")), read(object) {}

  void into(Sampling& sampling) {
    if (object.is_none()) return;
    sampling.mask_index = read.get<int32_t>("index");
    if (!nb::try_cast(object.attr("bits"), bits, false)) {
      throw std::invalid_argument("bits must be a contiguous two-dimensional uint32 array");
    }
    sampling.masks = bits.data();
    sampling.num_masks = bits.shape(0);
    sampling.mask_words = bits.shape(1);
  }

  std::function<void()> wait() const {
    if (object.is_none()) return {};
    return [this] {
      nb::gil_scoped_acquire acquire;
      object.attr("wait")();
    };
  }

  nb::object object;
  ArrayReader read;
  nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> bits;
};

Sampling read_sampling(ArrayReader& read) {
  Sampling sampling;
  sampling.temperature = read.get<float>("temperature");
  sampling.top_p = read.get<float>("top_p");
  sampling.min_p = read.get<float>("min_p");
  sampling.top_k = read.get<int32_t>("top_k");
  sampling.seed = read.get<uint64_t>("seed");
  sampling.position = read.get<int32_t>("position");
  sampling.repetition_penalty = read.get<float>("repetition_penalty");
  sampling.presence_penalty = read.get<float>("presence_penalty");
  sampling.frequency_penalty = read.get<float>("frequency_penalty");
  sampling.num_logprobs = read.get<int32_t>("num_logprobs");
  sampling.history_start = read.get<int32_t>("history_start");
  sampling.history_ids = read.get<int32_t>("history_ids");
  sampling.prompt_len = read.get<int32_t>("prompt_len");
  sampling.bias_start = read.get<int32_t>("bias_start");
  sampling.bias_ids = read.get<int32_t>("bias_ids");
  sampling.bias_values = read.get<float>("bias_values");
  sampling.target = read.get_optional<int32_t>("target");
  sampling.logprob_temperature = read.get_optional<float>("logprob_temperature");
  return sampling;
}

void set_outputs(Sampling& sampling, SamplingOutputs& outputs) {
  sampling.out_tokens = {outputs.tokens.data(), outputs.tokens.size()};
  sampling.out_logprobs = output_span<float, 1>(outputs.logprobs);
  sampling.out_ranks = output_span<int32_t, 1>(outputs.ranks);
  sampling.out_top_ids = output_span<int32_t, 2>(outputs.top_ids);
  sampling.out_top_logprobs = output_span<float, 2>(outputs.top_logprobs);
  if (outputs.top_ids && outputs.top_logprobs) {
    if (outputs.top_ids->shape(1) != outputs.top_logprobs->shape(1)) {
      throw std::invalid_argument("top_ids and top_logprobs differ in shape");
    }
    sampling.top_stride = static_cast<int>(outputs.top_ids->shape(1));
  }
}

// The batch keeps the array.
BlockTables read_tables(nb::handle array, size_t sequences) {
  nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu> tables;
  if (!nb::try_cast(array, tables, false) || (tables.shape(1) > 1 && tables.stride(1) != 1)) {
    throw std::invalid_argument("block tables must be two-dimensional int32 arrays with contiguous rows");
  }
  if (tables.shape(0) != sequences) throw std::invalid_argument("block tables must have one row a sequence");
  return {tables.data(), tables.shape(0) == 1 ? static_cast<int64_t>(tables.shape(1)) : tables.stride(0)};
}

// All of a StepBatch, which keeps its arrays, but for where the results go.
struct StepReader {
  explicit StepReader(nb::handle batch)
      : read(batch), sampling(batch.attr("sampling")), read_rows(sampling), window_tables(batch.attr("window_tables")) {
    step.token_ids = read.get<int32_t>("token_ids");
    step.positions = read.get<int32_t>("positions");
    step.query_start = read.get<int32_t>("query_start");
    step.context_len = read.get<int32_t>("context_len");
    step.state_slots = read.get_optional<int32_t>("state_slots");
    step.num_draft_tokens = read.get_optional<int32_t>("num_draft_tokens");
    step.adapters = read.get_optional<int32_t>("adapters");
    const auto rope_positions = read.get_matrix<int32_t>("rope_positions");
    if (!rope_positions.values.empty() && rope_positions.columns != step.token_ids.size()) {
      throw std::invalid_argument("rope_positions must have a column for each of token_ids");
    }
    step.rope_positions = rope_positions.values;
    const auto media = read.get_matrix<float>("media_rows");
    step.media_rows = media.values, step.media_width = media.columns;
    step.media_index = read.get_optional<int32_t>("media_index");
    step.media_layers = read.get_optional<int32_t>("media_layers");
    step.visible_until = read.get_optional<int32_t>("visible_until");
    step.logits_rows = read.get<int32_t>("logits_rows");
    step.block_tables.push_back(read_tables(batch.attr("block_tables"), step.context_len.size()));
    for (const nb::handle tables : window_tables) step.block_tables.push_back(read_tables(tables, step.context_len.size()));
    step.sampling = read_sampling(read_rows);
  }

  ArrayReader read;
  nb::object sampling;
  ArrayReader read_rows;
  nb::object window_tables;
  Step step;
};

void run_step(Executor& executor, nb::handle batch, decltype(SamplingOutputs::tokens) tokens, Output<float, 1> logprobs,
              Output<int32_t, 1> ranks, Output<int32_t, 2> top_ids, Output<float, 2> top_logprobs,
              Output<float, 2> rows, Output<float, 2> logits) {
  StepReader read(batch);
  Step& step = read.step;
  SamplingOutputs outputs{std::move(tokens), std::move(logprobs), std::move(ranks), std::move(top_ids),
                          std::move(top_logprobs)};
  set_outputs(step.sampling, outputs);
  Masks masks(read.sampling);
  masks.into(step.sampling);
  if (logits) {
    if (logits->shape(0) < step.logits_rows.size() || logits->shape(1) != static_cast<size_t>(executor.vocab_size())) {
      throw std::invalid_argument("logits must have the shape [rows, vocabulary]");
    }
    step.out_logits = logits->data();
  }
  step.rows = output_span<float, 2>(rows);
  const std::function<void()> wait = masks.wait();
  nb::gil_scoped_release release;
  executor.step(step, wait);
}

void run_draft(Executor& executor, nb::handle batch, Array1<int32_t> counts, float min_probability,
               nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> tokens) {
  StepReader read(batch);
  Masks masks(read.sampling);
  masks.into(read.step.sampling);
  const DraftTokens wanted{{counts.data(), counts.size()}, min_probability, {tokens.data(), tokens.size()}, tokens.shape(1)};
  const nb::gil_scoped_release release;
  draft(executor, read.step, wanted);
}

void sample_logits(const std::string& isa, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> logits,
                   nb::handle batch, decltype(SamplingOutputs::tokens) tokens, Output<float, 1> logprobs,
                   Output<int32_t, 1> ranks, Output<int32_t, 2> top_ids, Output<float, 2> top_logprobs) {
  ArrayReader read(batch);
  SamplingOutputs outputs{std::move(tokens), std::move(logprobs), std::move(ranks), std::move(top_ids),
                          std::move(top_logprobs)};
  Sampling sampling = read_sampling(read);
  set_outputs(sampling, outputs);
  Masks masks(batch);
  masks.into(sampling);
  const Sampler sampler(choose_kernels(isa), static_cast<int>(logits.shape(1)), 1);
  sampler.check(sampling, logits.shape(0));
  if (const std::function<void()> wait = masks.wait()) wait();
  nb::gil_scoped_release release;
  for (size_t row = 0; row < logits.shape(0); ++row) sampler.sample(sampling, row, logits.data() + row * logits.shape(1), 0);
}

// Tensors as tuples of name, array, dtype, whether the bytes of its elements lie in the other order than this
// machine's, and whether the array is a view of a mapped file.
using Tensor = std::tuple<std::string, nb::ndarray<nb::ro, nb::device::cpu>, std::string, bool, bool>;

// A matrix as a quantized checkpoint has it, whose bits are kept: see StoredBlocks. It keeps the arrays.
struct BlockSource {
  std::string name;
  nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu> data;  // [rows, bytes], contiguous rows
  std::optional<nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> row_order;
  std::optional<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>> scales;
  std::optional<nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>> zeros;
  std::optional<Array1<float>> numbers;  // divisors or a table
  std::optional<nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>> largest;
  std::optional<Array1<float>> offsets;
  StoredBlocks blocks;
  int cols;
  bool mapped;

  // Of a type of GGUF's blocks. `scales_at` are pairs of a byte in a block and a mask: see ScaleByte.
  BlockSource(std::string name_of, decltype(data) rows, const std::string& type, decltype(row_order) order, bool is_mapped,
              const std::vector<std::pair<size_t, uint8_t>>& scales_at)
      : name(std::move(name_of)), data(std::move(rows)), row_order(std::move(order)), mapped(is_mapped) {
    const BlockTypeInfo* info = find_block_type(type);
    check(info && info->bytes && data.shape(1) % info->bytes == 0, "rows must be whole blocks of a known type");
    blocks.type = info->type;
    cols = static_cast<int>(data.shape(1) / info->bytes * info->inputs);
    for (const auto& [at, exponent] : scales_at) {
      check(at < size_t(info->bytes), "scales must lie in a block");
      blocks.scales_at.push_back({at, exponent});
    }
    if (row_order) {
      check(row_order->size() == data.shape(0), "the order must name a row for each row");
      for (size_t i = 0; i < row_order->size(); ++i) {
        check((*row_order)(i) >= 0 && size_t((*row_order)(i)) < data.shape(0), "the order names rows that do not exist");
      }
      blocks.row_order = row_order->data();
    }
    set_rows();
  }

  // A grid of integers of `bits` for `inputs`.
  BlockSource(std::string name_of, decltype(data) codes, int bits, int group, int inputs, decltype(scales) all_scales,
              const std::string& scale_type, decltype(zeros) all_zeros, bool twos_complement)
      : name(std::move(name_of)), data(std::move(codes)), scales(std::move(all_scales)), zeros(std::move(all_zeros)),
        cols(inputs), mapped(false) {
    check(bits > 0 && bits <= 8 && group > 0 && inputs > 0, "bits, group and inputs must be above 0");
    const size_t rows = data.shape(0), groups = (size_t(inputs) + group - 1) / group;
    check(data.shape(1) == (size_t(inputs) * bits + 7) / 8, "codes must be as many as the inputs");
    blocks.type = BlockType::kGrid;
    blocks.bits = bits, blocks.group = group;
    blocks.scale_type = parse_dtype(scale_type);
    check(scales && scales->dtype().bits == dtype_bytes(blocks.scale_type) * 8, "scales must be of their type");
    check(scales->shape(0) == rows && scales->shape(1) == groups, "there must be a scale for each group");
    blocks.scales = scales->data();
    blocks.scale_stride = static_cast<ptrdiff_t>(groups);
    if (zeros) {
      check(!twos_complement, "codes with zero points must not be in two's complement");
      check(zeros->shape(0) == rows && zeros->shape(1) == groups, "there must be a zero point for each group");
      blocks.zeros = zeros->data();
      blocks.zero_stride = static_cast<ptrdiff_t>(groups);
    }
    blocks.twos_complement = twos_complement;
    set_rows();
  }

  // Small floats: see PackBlocksArgs. `type` is e4m3, table4 with a table, nvfp4 with divisors, or mxfp4-rows. Scales
  // of table4 are bytes if there is a `scale_table`, and a largest one for equal runs of a row's groups, and offsets.
  BlockSource(std::string name_of, decltype(data) codes, const std::string& type, int group, int inputs,
              decltype(scales) all_scales, decltype(numbers) all_numbers, const std::vector<float>& scale_table,
              decltype(largest) all_largest, decltype(offsets) all_offsets, bool is_mapped)
      : name(std::move(name_of)), data(std::move(codes)), scales(std::move(all_scales)), numbers(std::move(all_numbers)),
        largest(std::move(all_largest)), offsets(std::move(all_offsets)), cols(inputs), mapped(is_mapped) {
    const BlockTypeInfo* info = find_block_type(type);
    check(info && (is_small_floats(info->type) || byte_scale_group(info->type)),
          "small floats are e4m3, table4, nvfp4 or mxfp4-rows");
    blocks.type = info->type;
    blocks.group = group;
    check(group > 0 && inputs > 0, "group and inputs must be above 0");
    const bool is_nvfp4 = blocks.type == BlockType::kNvfp4, is_table = blocks.type == BlockType::kTable4;
    const int four_group = byte_scale_group(blocks.type);
    const size_t rows = data.shape(0), groups = (size_t(inputs) + group - 1) / group;
    check(!four_group || group == four_group, "nvfp4 has groups of 16, and mxfp4-rows of 32");
    check(data.shape(1) == (blocks.type == BlockType::kE4m3 ? size_t(inputs) : (size_t(inputs) + 1) / 2),
          "codes must be as many as the inputs");
    if (!scale_table.empty()) {
      blocks.scale_table = kept_scale_table(scale_table);
      check(is_table && largest && offsets && offsets->size() == rows,
            "scales in 8 bits are for table4, with largest ones and an offset for each row");
      check(largest->shape(0) == rows && largest->shape(1) > 0 && groups % largest->shape(1) == 0,
            "there must be a largest scale for equal runs of a row's groups");
      blocks.scale_run = static_cast<int>(groups / largest->shape(1));
      blocks.largest = largest->data();
      blocks.largest_stride = static_cast<ptrdiff_t>(largest->shape(1));
      blocks.offsets = offsets->data();
    }
    check(scales && scales->dtype().bits == blocks.scale_bytes() * 8, "scales must be float32, or bytes as their type says");
    check(scales->shape(0) == rows && scales->shape(1) == groups, "there must be a scale for each group");
    blocks.scales = scales->data();
    blocks.scale_stride = static_cast<ptrdiff_t>(groups);
    check(numbers ? numbers->size() == (is_nvfp4 ? rows : 16) : !is_nvfp4 && !is_table,
          "there must be a divisor for each row, or a table of 16 numbers");
    if (is_nvfp4) blocks.divisors = numbers->data();
    if (is_table) blocks.table = numbers->data();
    set_rows();
  }

 private:
  void check(bool condition, const char* message) const {
    if (!condition) throw std::invalid_argument(name + ": " + message);
  }

  void set_rows() {
    check(data.shape(1) == 1 || data.stride(1) == 1, "rows must be contiguous");
    check(data.stride(0) >= 0, "rows must lie one behind the other");
    blocks.row_bytes = static_cast<size_t>(data.stride(0));
    blocks.data_bytes = data.shape(1);
  }
};

// The side of an Executor or a Tower of a cache of packed weights.
template <typename Model>
void bind_packed_weights(nb::class_<Model>& model) {
  model
      .def("read_weights", &Model::read_weights, "file"_a, "offset"_a, "checksum"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("weights_checksum", [](const Model& self) { return self.weights().packed().checksum(); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("packed_weights", [](const Model& self) {
        nb::list runs;
        for (const std::span<const char> run : self.weights().packed().spans()) {
          runs.append(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(run.data(), {run.size()}, nb::find(self)));
        }
        return runs;
      });
}

// Of an Executor or a Tower.
template <typename Model>
bool set_weights(Model& model, const std::vector<Tensor>& tensors, const std::vector<const BlockSource*>& matrices) {
  std::vector<Source> sources;
  for (const auto& [name, array, dtype, swapped, mapped] : tensors) {
    Source& source = sources.emplace_back(name, array.data(), parse_dtype(dtype));
    if (array.dtype().bits != dtype_bytes(source.type) * 8) {
      throw std::invalid_argument(name + " does not hold elements of " + dtype);
    }
    for (size_t i = 0; i < array.ndim(); ++i) {
      source.shape.push_back(static_cast<int64_t>(array.shape(i)));
      source.strides.push_back(array.stride(i));
    }
    source.swapped = swapped;
    source.mapped = mapped;
    source.owner = std::make_shared<nb::ndarray<nb::ro, nb::device::cpu>>(array);
  }
  for (const BlockSource* matrix : matrices) {
    Source& source = sources.emplace_back(matrix->name, matrix->data.data(), DType::kFloat32);
    source.shape = {static_cast<int64_t>(matrix->data.shape(0)), matrix->cols};
    source.mapped = matrix->mapped;
    source.blocks = matrix->blocks;
    source.owner = std::make_shared<BlockSource>(*matrix);
  }
  nb::gil_scoped_release release;
  return model.set_weights(sources);
}

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Updates as tuples of name, first output, A, B, bias or None, scale, and shift or None. That of `embed.weight` is of
// tokens' rows.
using Update = std::tuple<std::string, int, Matrix, Matrix, std::optional<Array1<float>>, float,
                          std::optional<Array1<float>>>;

// [vocab, embedding size], and the type of its elements.
using Table = std::tuple<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>, std::string>;

nb::ndarray<nb::numpy, float, nb::ndim<2>> take_inputs(Executor& executor, const std::string& name) {
  auto rows = std::make_unique<std::vector<float>>(executor.take_inputs(name));
  float* const data = rows->data();
  const size_t inputs = executor.weights().place_of(name)->cols, count = rows->size() / inputs;
  const nb::capsule owner(rows.release(), [](void* held) noexcept { delete static_cast<std::vector<float>*>(held); });
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {count, inputs}, owner);
}

std::optional<OwnMatrix> own_matrix(const Executor& executor, const std::optional<Table>& table) {
  if (!table) return {};
  const auto& [array, dtype] = *table;
  const DType type = parse_dtype(dtype);
  const std::optional<MatrixPlace> place = table_of(executor.weights());
  if (!place || array.shape(0) != size_t(place->rows) || array.shape(1) != size_t(place->cols) ||
      array.dtype().bits != dtype_bytes(type) * 8) {
    throw std::invalid_argument("an embedding or head of an adapter's own must have the shape of the model's, and its type");
  }
  return OwnMatrix{array.data(), type};
}

AdapterContent content_of(const std::vector<Update>& given) {
  AdapterContent content;
  for (const auto& [name, first, a, b, bias, scale, shift] : given) {
    const int rank = static_cast<int>(a.shape(0)), outputs = static_cast<int>(b.shape(0));
    if (b.shape(1) != a.shape(0) || (bias && bias->size() != b.shape(0)) || (shift && shift->size() != b.shape(0))) {
      throw std::invalid_argument("A, B and biases of " + name + " do not fit each other");
    }
    const LowRankUpdate update{name, first, outputs, static_cast<int>(a.shape(1)), rank, a.data(), b.data(),
                               bias ? bias->data() : nullptr, scale, shift ? shift->data() : nullptr};
    if (name == "embed.weight") {
      content.embedding = update;
    } else {
      content.updates.push_back(update);
    }
  }
  return content;
}

std::shared_ptr<const Adapter> pack_adapter(const Executor& executor, const std::string& dtype,
                                            const std::vector<Update>& given, const std::optional<Table>& embed,
                                            const std::optional<Table>& head, float rope_factor) {
  AdapterContent content = content_of(given);
  content.rope_factor = rope_factor;
  content.embed = own_matrix(executor, embed);
  content.head = own_matrix(executor, head);
  const DType type = parse_dtype(dtype);
  nb::gil_scoped_release release;
  return executor.pack_adapter(type, std::move(content));
}

using RowsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Positions = std::optional<nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;
using Seen = std::optional<Array1<int32_t>>;
using Adapters = std::optional<Array1<int32_t>>;

TowerPiece piece_of(size_t num_rows, const Array1<int32_t>& query_start, const Array1<int32_t>& lengths, int first,
                    const Positions& positions, const Seen& seen, const Adapters& adapters) {
  TowerPiece piece{{query_start.data(), query_start.size()}, {lengths.data(), lengths.size()}, first, {}};
  if (seen) piece.seen = {seen->data(), seen->size()};
  if (positions) {
    if (positions->shape(1) != num_rows) throw std::invalid_argument("positions must have one entry for each row on each axis");
    piece.rope_positions = {positions->data(), positions->size()};
  }
  if (adapters) piece.adapters = {adapters->data(), adapters->size()};
  return piece;
}

void normalize_rows(const std::string& isa, RowsOut rows, float epsilon, Array1<float> weight, std::optional<Array1<float>> bias) {
  const size_t size = rows.shape(1);
  if (size == 0 || weight.size() != size || (bias && bias->size() != size)) {
    throw std::invalid_argument("a norm has a weight, and perhaps a bias, for each number of a row");
  }
  const Kernels& kernels = choose_kernels(isa);
  // Kernels take them without const, and do not change them.
  const Norm norm{bias ? NormKind::kLayer : NormKind::kRms, epsilon, const_cast<float*>(weight.data()),
                  bias ? const_cast<float*>(bias->data()) : nullptr};
  const nb::gil_scoped_release release;
  for (size_t row = 0; row < rows.shape(0); ++row) kernels.normalize(norm, rows.data() + row * size, static_cast<int>(size));
}

void run_layers(Tower& tower, int layer, int end, RowsOut rows, Array1<int32_t> query_start, Array1<int32_t> lengths,
                Positions positions, Seen seen, Adapters adapters, std::optional<Array1<int32_t>> read) {
  TowerPiece piece = piece_of(rows.shape(0), query_start, lengths, 0, positions, seen, adapters);
  if (read) piece.read = {read->data(), read->size()};
  const nb::gil_scoped_release release;
  tower.run(layer, end, piece, {rows.data(), rows.size()});
}

void finish_layer(Tower& tower, int layer, RowsOut rows, Array1<int32_t> query_start, Array1<int32_t> lengths, int first,
                  Positions positions, Seen seen, Adapters adapters) {
  const TowerPiece piece = piece_of(rows.shape(0), query_start, lengths, first, positions, seen, adapters);
  const nb::gil_scoped_release release;
  tower.finish(layer, piece, {rows.data(), rows.size()});
}

void remember_layer(Tower& tower, int layer, Matrix rows, Array1<int32_t> query_start, Array1<int32_t> lengths, int first,
                    Positions positions, Seen seen, Adapters adapters) {
  const TowerPiece piece = piece_of(rows.shape(0), query_start, lengths, first, positions, seen, adapters);
  const nb::gil_scoped_release release;
  tower.remember(layer, piece, {rows.data(), rows.size()});
}

nb::dict topology_dict(const Topology& topology) {
  nb::list processors;
  for (const Processor& p : topology.allowed) {
    nb::dict processor;
    processor["cpu"] = p.cpu;
    processor["core"] = p.core;
    processor["numa_node"] = p.numa_node;
    processors.append(processor);
  }
  nb::dict result;
  result["processors"] = processors;
  result["cores"] = nb::cast(topology.cores);
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Tidewheel's native CPU runtime.";

  nb::exception<Stopped>(m, "StoppedError");
  bind_plans(m);
  bind_quantize(m);

  using Codes = decltype(BlockSource::data);
  using Scales = decltype(BlockSource::scales);
  nb::class_<BlockSource>(m, "BlockSource")
      .def(nb::init<std::string, Codes, std::string, decltype(BlockSource::row_order), bool,
                    std::vector<std::pair<size_t, uint8_t>>>(), "name"_a, "data"_a, "type"_a, "row_order"_a.none(), "mapped"_a,
           "scales_at"_a = std::vector<std::pair<size_t, uint8_t>>())
      .def(nb::init<std::string, Codes, int, int, int, Scales, std::string, decltype(BlockSource::zeros), bool>(), "name"_a,
           "codes"_a, "bits"_a, "group"_a, "inputs"_a, "scales"_a, "scale_type"_a, "zeros"_a.none(), "twos_complement"_a)
      .def(nb::init<std::string, Codes, std::string, int, int, Scales, decltype(BlockSource::numbers),
                    std::vector<float>, decltype(BlockSource::largest), decltype(BlockSource::offsets), bool>(), "name"_a,
           "codes"_a, "type"_a, "group"_a, "inputs"_a, "scales"_a, "numbers"_a.none(), "scale_table"_a,
           "largest"_a.none(), "offsets"_a.none(),
           "mapped"_a);

  nb::class_<Adapter>(m, "Adapter").def_prop_ro("num_bytes", &Adapter::bytes);

  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<const std::vector<std::vector<int>>&>(), "groups"_a)
      .def_prop_ro("cpus", &ThreadPool::cpus)
      .def("yield_core", &ThreadPool::yield_core)
      .def("reclaim_core", &ThreadPool::reclaim_core);

  nb::class_<Executor> executor(m, "Executor");
  bind_packed_weights(executor);
  executor
      .def("__init__", [](Executor* self, const DecoderPlan& plan, const std::string& isa, const std::string& cache_dtype,
                          const std::vector<int>& num_blocks, int max_num_seqs, int max_num_batched_tokens,
                          const std::vector<std::vector<int>>& groups, int num_states, int max_lora_rank,
                          int max_draft_tokens, const Executor* beside) {
        new (self) Executor(plan, choose_kernels(isa), parse_cache_type(cache_dtype),
                            {num_blocks, max_num_seqs, max_num_batched_tokens, num_states, max_lora_rank, max_draft_tokens},
                            beside ? beside->pool() : std::make_shared<ThreadPool>(groups));
      }, "plan"_a, "isa"_a, "cache_dtype"_a, "num_blocks"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "groups"_a,
           "num_states"_a = 0, "max_lora_rank"_a = 0, "max_draft_tokens"_a = 0, "beside"_a.none() = nb::none())
      .def("set_weights", &set_weights<Executor>, "tensors"_a, "matrices"_a = std::vector<const BlockSource*>())
      .def("stop_loading", &Executor::stop_loading)
      .def("check_complete", &Executor::check_complete)
      .def_prop_ro("vocab_size", &Executor::vocab_size)
      .def("step", &run_step, "batch"_a, "token_ids"_a, "logprobs"_a.none(), "ranks"_a.none(), "top_ids"_a.none(),
           "top_logprobs"_a.none(), "rows"_a.none() = nb::none(), "logits"_a.none() = nb::none())
      .def("draft", &run_draft, "batch"_a, "counts"_a, "min_probability"_a, "token_ids"_a)
      .def("copy_blocks", [](Executor& self, nb::ndarray<const int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu> pairs,
                             int group) {
        const nb::gil_scoped_release release;
        self.copy_blocks({pairs.data(), pairs.size()}, group);
      }, "pairs"_a, "group"_a)
      .def("read_blocks", [](Executor& self, Array1<int32_t> blocks,
                             nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> to) {
        const nb::gil_scoped_release release;
        self.read_blocks({blocks.data(), blocks.size()}, {reinterpret_cast<char*>(to.data()), to.size()});
      }, "blocks"_a, "to"_a)
      .def("write_blocks", [](Executor& self, Array1<int32_t> blocks,
                              nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> from) {
        const nb::gil_scoped_release release;
        self.write_blocks({blocks.data(), blocks.size()}, {reinterpret_cast<const char*>(from.data()), from.size()});
      }, "blocks"_a, "source"_a)
      .def("copy_states", [](Executor& self, nb::ndarray<const int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu> pairs) {
        const nb::gil_scoped_release release;
        self.copy_states({pairs.data(), pairs.size()});
      }, "pairs"_a)
      .def("release_scratch", &Executor::release_scratch, nb::call_guard<nb::gil_scoped_release>())
      .def("pack_adapter", &pack_adapter, "dtype"_a, "updates"_a, "embed"_a.none() = nb::none(), "head"_a.none() = nb::none(),
           "rope_factor"_a = 1.0f)
      .def("set_adapter", &Executor::set_adapter, "number"_a, "adapter"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("pin_caller", &Executor::pin_caller)
      .def_prop_ro("threads", &Executor::pool)
      .def("use_threads", &Executor::use_threads, "threads"_a)
      .def("matrix_ids", [](const Executor& self, const std::vector<std::string>& names) {
        std::vector<int> ids;
        for (const std::string& name : names) ids.push_back(self.matrix_of(name).id);
        return ids;
      }, "names"_a)
      .def("capture_inputs", &Executor::capture_inputs, "names"_a)
      .def("take_inputs", &take_inputs, "name"_a)
      .def("start_profile", [](Executor& self) { self.profile().start(); })
      .def("stop_profile", [](Executor& self) { self.profile().stop(); })
      .def("profile", [](Executor& self) {
        nb::dict phases;
        for (int i = 0; i < static_cast<int>(Phase::kCount); ++i) {
          const Profile::Entry& entry = self.profile().entry(static_cast<Phase>(i));
          if (entry.calls) phases[kPhaseNames[i]] = nb::make_tuple(entry.calls, entry.seconds);
        }
        return phases;
      })
      .def_prop_ro("isa", [](const Executor& self) { return self.kernels().name; })
      .def_prop_ro("num_threads", &Executor::num_threads)
      .def_prop_ro("row_floats", &Executor::row_floats)
      .def_prop_ro("has_states", &Executor::has_states)
      .def_prop_ro("weight_bytes", &Executor::weight_bytes)
      .def_prop_ro("cache_bytes", &Executor::cache_bytes)
      .def_prop_ro("block_bytes", [](const Executor& self) { return self.cache().whole_block_bytes(); });

  nb::class_<Tower> tower(m, "Tower");
  bind_packed_weights(tower);
  tower
      .def("__init__", [](Tower* self, const TowerPlan& plan, const std::string& isa, const std::string& cache_dtype,
                          int max_rows, int piece_rows, const Executor* beside, const std::vector<std::vector<int>>& groups,
                          int max_lora_rank) {
        new (self) Tower(plan, choose_kernels(isa), parse_cache_type(cache_dtype), {max_rows, piece_rows, max_lora_rank},
                         beside ? beside->pool() : std::make_shared<ThreadPool>(groups));
      }, "plan"_a, "isa"_a, "cache_dtype"_a, "max_rows"_a, "piece_rows"_a, "beside"_a.none(),
           "groups"_a = std::vector<std::vector<int>>(), "max_lora_rank"_a = 0)
      .def("set_weights", &set_weights<Tower>, "tensors"_a, "matrices"_a = std::vector<const BlockSource*>())
      .def("stop_loading", &Tower::stop_loading)
      .def("use_threads", &Tower::use_threads, "threads"_a)
      .def("check_complete", &Tower::check_complete)
      .def("project", [](Tower& self, const std::string& name, Matrix rows, RowsOut out) {
        const nb::gil_scoped_release release;
        self.project(name, {rows.data(), rows.size()}, {out.data(), out.size()});
      }, "name"_a, "rows"_a, "out"_a)
      .def("remember", &remember_layer, "layer"_a, "rows"_a, "query_start"_a, "lengths"_a, "first"_a, "positions"_a.none(),
           "seen"_a.none() = nb::none(), "adapters"_a.none() = nb::none())
      .def("run", &run_layers, "layer"_a, "end"_a, "rows"_a, "query_start"_a, "lengths"_a, "positions"_a.none(),
           "seen"_a.none() = nb::none(), "adapters"_a.none() = nb::none(), "read"_a.none() = nb::none())
      .def("finish", &finish_layer, "layer"_a, "rows"_a, "query_start"_a, "lengths"_a, "first"_a, "positions"_a.none(),
           "seen"_a.none() = nb::none(), "adapters"_a.none() = nb::none())
      .def("pack_adapter", [](const Tower& self, const std::string& dtype, const std::vector<Update>& updates) {
        const AdapterContent content = content_of(updates);
        const DType type = parse_dtype(dtype);
        const nb::gil_scoped_release release;
        return self.pack_adapter(type, content);
      }, "dtype"_a, "updates"_a)
      .def("set_adapter", &Tower::set_adapter, "number"_a, "adapter"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("remember_keys", [](Tower& self, const std::string& name, Matrix rows, int length, int first) {
        const nb::gil_scoped_release release;
        self.remember_keys(name, length, first, {rows.data(), rows.size()});
      }, "name"_a, "rows"_a, "length"_a, "first"_a)
      .def("attend", [](Tower& self, const std::string& name, Matrix rows, int length, RowsOut out) {
        const nb::gil_scoped_release release;
        self.attend(name, length, {rows.data(), rows.size()}, {out.data(), out.size()});
      }, "name"_a, "rows"_a, "length"_a, "out"_a)
      .def("release_scratch", &Tower::release_scratch, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("isa", [](const Tower& self) { return self.kernels().name; })
      .def_prop_ro("num_blocks", &Tower::num_blocks)
      .def_prop_ro("weight_bytes", &Tower::weight_bytes)
      .def_prop_ro("scratch_bytes", &Tower::scratch_bytes);

  m.def("sample", &sample_logits, "isa"_a, "logits"_a, "sampling"_a, "token_ids"_a, "logprobs"_a.none(),
        "ranks"_a.none(), "top_ids"_a.none(), "top_logprobs"_a.none(),
        "Samples rows of logits [R, vocab] with one thread.");
  m.def("normalize", &normalize_rows, "isa"_a, "rows"_a, "epsilon"_a, "weight"_a, "bias"_a.none(),
        "LayerNorm of rows [T, size] in place, or RMSNorm if there is no bias, with one thread.");
  m.def("string_ends", [](Array1<uint8_t> content, size_t begin,
                          nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ends) {
    const nb::gil_scoped_release release;
    return string_ends({content.data(), content.size()}, begin, {ends.data(), ends.size()});
  }, "content"_a, "begin"_a, "ends"_a, "Where strings behind their lengths end; false if one is past the content's end.");
  m.def("available_isa_levels", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
  }, "Names of the ISA levels that this processor has, best first.");
  m.def("isa_note", &kernels_note, "Why a level is behind one with fewer instructions; empty if none is.");
  m.def("chosen_isa_level", [](const std::string& isa) { return std::string(choose_kernels(isa).name); }, "isa"_a = "auto",
        "The level that is used for `isa`; TIDEWHEEL_ISA decides what auto means.");
  m.def("topology", [](const std::string& root, const std::optional<std::vector<int>>& allowed) {
    return topology_dict(read_topology(root, allowed));
  }, "root"_a = "/", "allowed"_a = nb::none(), "Processors and quota that this process may use.");
  m.def("parse_cpu_list", &parse_cpu_list, "text"_a, "'0-3,8' to [0, 1, 2, 3, 8].");
  m.def("packed_version", [] { return kPackedVersion; }, "Of the layout and the content of packed weights.");
  m.def("block_tokens", [] { return kBlockTokens; }, "Tokens a KV block holds.");
  m.def("state_floats", [](int key_dim, int value_dim) { return recurrence_state_floats(key_dim, value_dim); }, "key_dim"_a,
        "value_dim"_a, "Numbers that one head of a recurrence keeps of a sequence.");
  m.def("kv_bytes_per_block", [](int num_kv_heads, int key_dim, int value_dim, bool values_in_keys, const std::string& dtype) {
    const Heads heads{num_kv_heads, num_kv_heads, key_dim, value_dim, values_in_keys ? 0 : -1};
    return heads.block_bytes(parse_cache_type(dtype));
  }, "num_kv_heads"_a, "key_dim"_a, "value_dim"_a, "values_in_keys"_a, "dtype"_a, "Bytes of one layer's K and V in one block.");
  m.def("measure_ceilings", [](const std::string& isa, const std::vector<int>& cpus, double seconds, int megabytes) {
    const Kernels& kernels = choose_kernels(isa);
    nb::gil_scoped_release release;
    const Ceilings ceilings = measure_ceilings(kernels, cpus, seconds, megabytes);
    return std::map<std::string, double>{{"read_bytes_per_second", ceilings.read_bytes_per_second},
                                         {"bfloat16_flops", ceilings.bfloat16_flops},
                                         {"int8_ops", ceilings.int8_ops},
                                         {"float32_flops", ceilings.float32_flops}};
  }, "isa"_a, "cpus"_a, "seconds"_a = 1.0, "megabytes"_a = 512, "The machine's measured limits with these threads.");
}

}  // namespace tidewheel
