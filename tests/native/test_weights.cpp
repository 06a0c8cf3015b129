#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>

#include "model/byte_order.h"
#include "model/weights.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

ModelConfig small_model() {
  LayerConfig layer;
  layer.num_heads = 2;
  layer.num_kv_heads = 1;
  layer.head_dim = 18;
  layer.intermediate_size = 50;
  layer.gated = true;
  ModelConfig config;
  config.vocab_size = 70;
  config.hidden_size = config.embedding_size = 37;
  config.tied_head = true;
  config.layers = {layer};
  config.final_norm.emplace();
  return config;
}

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
};

const Tensor kTensors[] = {
    {"embed.weight", {70, 37}},       {"layers.0.attention_norm.weight", {37}}, {"layers.0.q.weight", {36, 37}},
    {"layers.0.k.weight", {18, 37}},  {"layers.0.v.weight", {18, 37}},          {"layers.0.o.weight", {37, 36}},
    {"layers.0.mlp_norm.weight", {37}}, {"layers.0.gate.weight", {50, 37}},     {"layers.0.up.weight", {50, 37}},
    {"layers.0.down.weight", {37, 50}}, {"final_norm.weight", {37}},
};

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
  Weights weights(small_model(), kernels, {format, format, format, format}, pool.ownership());
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
