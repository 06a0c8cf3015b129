#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "model/weights/byte_order.h"
#include "model/weights/finite.h"
#include "model/weights/weights.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// Tensors that become a matrix alone, one with others, side by side and interleaved, and vectors.
struct Parts {
  Linear embed, qkv, up, down;
  Norm norm;

  void name(Weights& weights) {
    weights.add_matrix("embed.weight", embed, 70, 37);
    weights.add_linear("q", qkv, 36, 37, true, {72, 36, 0, 0});
    weights.add_linear("k", qkv, 18, 37, true, {72, 18, 0, 36});
    weights.add_linear("v", qkv, 18, 37, true, {72, 18, 0, 54});
    weights.add_linear("gate", up, 50, 37, false, {128, 16, 32, 0});
    weights.add_linear("up", up, 50, 37, false, {128, 16, 32, 16});
    weights.add_linear("down", down, 37, 50, false);
    weights.add_norm("norm", norm, NormPlan{NormKind::kLayer, 1e-5f, true, true, true}, 37);
  }
};

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
};

const Tensor kTensors[] = {
    {"embed.weight", {70, 37}}, {"q.weight", {36, 37}}, {"q.bias", {36}},       {"k.weight", {18, 37}},
    {"k.bias", {18}},           {"v.weight", {18, 37}}, {"v.bias", {18}},       {"gate.weight", {50, 37}},
    {"up.weight", {50, 37}},    {"down.weight", {37, 50}}, {"norm.weight", {37}}, {"norm.bias", {37}},
};

std::map<std::string, WeightFormat> all_as(const WeightFormat& format) {
  std::map<std::string, WeightFormat> formats;
  for (const auto& [name, shape] : kTensors) {
    if (shape.size() == 2) formats[name] = format;
  }
  return formats;
}

// Any bits but the exponent's highest, which numbers from 2 on have.
template <typename Word>
std::vector<Word> random_bits(size_t count) {
  std::mt19937 engine(5);
  std::vector<Word> bits(count);
  for (Word& word : bits) word = static_cast<Word>(engine() & ~(Word{1} << (8 * sizeof(Word) - 2)));
  return bits;
}

// The tensors packed from one run of words, where each of them lies at another place; `columns` stores columns first.
template <typename Word>
std::vector<char> packed(const Kernels& kernels, const WeightFormat& format, DType type, const std::vector<Word>& words,
                         bool swapped, bool columns) {
  ThreadPool pool({{0}, {0}});
  Weights weights(kernels, all_as(format));
  Parts parts;
  parts.name(weights);
  weights.place(pool.ownership());
  std::vector<Source> sources;
  const Word* next = words.data();
  for (const auto& [name, shape] : kTensors) {
    const int64_t cols = shape.size() > 1 ? shape[1] : 1;
    Source source{name, next, type, shape, {cols, 1}, swapped};
    if (columns) source.strides = {1, shape[0]};
    source.strides.resize(shape.size());
    sources.push_back(source);
    next += shape[0] * cols;
  }
  weights.set(sources, pool, std::atomic<bool>(false));
  weights.check_complete();
  std::vector<char> bytes;
  for (const auto run : weights.packed().spans()) bytes.insert(bytes.end(), run.begin(), run.end());
  return bytes;
}

template <typename Word>
void check_either_order(DType type) {
  const auto words = random_bits<Word>(20000);
  auto swapped = words;
  for (Word& word : swapped) word = swap_bytes(word);
  for (const Kernels* kernels : tested_kernels()) {
    for (const WeightFormat& format : {WeightFormat{WeightKind::kFloat32}, WeightFormat{WeightKind::kBFloat16},
                                       WeightFormat{WeightKind::kInt4, 64, true}}) {
      for (const bool columns : {false, true}) {
        CAPTURE(kernels->name);
        CAPTURE(static_cast<int>(format.kind));
        CAPTURE(columns);
        const auto expected = packed(*kernels, format, type, words, false, columns);
        CHECK(packed(*kernels, format, type, swapped, true, columns) == expected);
      }
    }
  }
}

}  // namespace

TEST_CASE("tensors in the other byte order are packed to the same bits") {
  check_either_order<uint32_t>(DType::kFloat32);
  check_either_order<uint16_t>(DType::kBFloat16);
  check_either_order<uint16_t>(DType::kFloat16);
}

TEST_CASE("numbers are read from either byte order") {
  const uint8_t bytes[] = {0x3f, 0x80, 0x12, 0x34};
  CHECK(read_word<uint16_t>(bytes, 0, kLittleEndian) == 0x3f80);
  CHECK(read_word<uint16_t>(bytes, 1, !kLittleEndian) == 0x3412);
  CHECK(read_word<uint32_t>(bytes, 0, kLittleEndian) == 0x3f801234);
}

TEST_CASE("a number that is not finite is found in its row, in either byte order and whichever way rows lie") {
  constexpr int kRows = 5, kCols = 600;
  for (const bool swapped : {false, true}) {
    for (const bool columns : {false, true}) {
      auto words = random_bits<uint16_t>(kRows * kCols);
      const Source source{"w", words.data(), DType::kBFloat16, {kRows, kCols},
                          columns ? std::vector<int64_t>{1, kRows} : std::vector<int64_t>{kCols, 1}, swapped};
      for (uint16_t& word : words) word = swapped ? swap_bytes(word) : word;
      CHECK(are_finite(source, 0, kRows));
      for (const int col : {0, 300, kCols - 1}) {
        uint16_t& word = words[columns ? col * kRows + 3 : 3 * kCols + col];
        const uint16_t infinite = 0xff80, kept = word;
        word = swapped ? swap_bytes(infinite) : infinite;
        CHECK_FALSE(are_finite(source, 2, 4));
        CHECK(are_finite(source, 0, 3));
        CHECK(are_finite(source, 4, kRows));
        word = kept;
      }
    }
  }
}

TEST_CASE("a scale of a block that is not finite is found in its row") {
  constexpr size_t kBlock = 144, kRow = 3 * kBlock;  // q4_k: two float16 numbers, then what may have any bits
  std::vector<uint8_t> bytes(4 * kRow, 0xff);
  for (size_t i = 0; i < bytes.size(); i += kBlock) std::fill_n(bytes.begin() + i, 4, uint8_t{0x3b});
  const int32_t order[] = {3, 2, 1, 0};
  Source source{"w", bytes.data(), DType::kFloat32, {4, 768}, {}};
  source.blocks = StoredBlocks{BlockType::kQ4K, kRow, kRow, order, {{1, 0x7c}, {3, 0x7c}}};
  CHECK(are_finite(source, 0, 4));
  bytes[kRow + 2 * kBlock + 3] = 0xfc;
  CHECK_FALSE(are_finite(source, 2, 3));
  CHECK(are_finite(source, 0, 2));
  CHECK(are_finite(source, 3, 4));
}

TEST_CASE("each matrix is stored in its own format, and tensors whose columns alternate must agree") {
  const Kernels& kernels = choose_kernels("auto");
  const WeightFormat int8{WeightKind::kInt8}, int4{WeightKind::kInt4, 64};
  const auto named = [&](const std::map<std::string, WeightFormat>& formats) {
    Weights weights(kernels, formats);
    Parts parts;
    parts.name(weights);
    weights.place(Ownership({1}));
    return parts;
  };
  auto formats = all_as(int8);
  formats["down.weight"] = int4;
  const Parts parts = named(formats);
  CHECK(parts.down.format.kind == WeightKind::kInt4);
  CHECK(parts.down.format.group == 64);
  CHECK(parts.qkv.format.kind == WeightKind::kInt8);
  formats["v.weight"] = int4;
  const Parts split = named(formats);
  CHECK(split.qkv.n == 54);
  REQUIRE(split.qkv.next);
  CHECK(split.qkv.next->first == 54);
  CHECK(split.qkv.next->n == 18);
  CHECK(split.qkv.next->format.kind == WeightKind::kInt4);
  formats["up.weight"] = int4;
  CHECK_THROWS_WITH(named(formats), "gate.weight and up.weight are packed into one matrix: they must have one format and order");
  formats["up.weight"] = int8;
  formats.erase("v.weight");
  CHECK_THROWS_WITH(named(formats), "no format is given for the weight v.weight");
  formats["v.weight"] = int8;
  formats["w.weight"] = int8;
  CHECK_THROWS_WITH(named(formats), "a format is given for w.weight, which this model does not have");
  Weights weights(kernels, all_as(int8));
  Parts twice;
  twice.name(weights);
  float* vector = nullptr;
  CHECK_THROWS_WITH(weights.add_vector("q.bias", vector, 3), "two weights of this model are named q.bias");
}

TEST_CASE("a unit offset is added in float32, to the weight and not to the bias") {
  ThreadPool pool({std::vector<int>{0}});
  Weights weights(choose_kernels("auto"), {});
  Norm norm;
  weights.add_norm("norm", norm, NormPlan{NormKind::kRms, 1e-5f, true, true, true}, 2);
  weights.place(pool.ownership());
  const bf16 values[] = {to_bf16(0x1p-9f), to_bf16(-0.5f)};
  const Source sources[] = {{"norm.weight", values, DType::kBFloat16, {2}, {1}}, {"norm.bias", values, DType::kBFloat16, {2}, {1}}};
  weights.set(sources, pool, std::atomic<bool>(false));
  CHECK(norm.weight[0] == 1 + 0x1p-9f);
  CHECK(norm.weight[1] == 0.5f);
  CHECK(norm.bias[0] == 0x1p-9f);
}
