#include <doctest/doctest.h>

#include <map>

#include "model/executor.h"
#include "small_model.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr int kVocab = 150, kSize = 64, kMaxRank = 7;

// A run of tokens of one sequence, which has the blocks from 8 * `sequence` on, and the number of its adapter.
struct Chunk {
  int sequence, begin, end, adapter;
};

using Logits = std::vector<std::vector<float>>;

// The small one with experts of both forms.
DecoderPlan plan_with_experts(bool unpacked) {
  DecoderPlan plan = small_plan();
  ExpertsPlan experts;
  experts.num_experts = 5, experts.experts_per_token = 2, experts.intermediate_size = 72;
  experts.shared_size = 56, experts.shared_gate = true;
  experts.unpacked = unpacked;
  plan.layers[0].push_back({experts, NormPlan{NormKind::kRms, 1e-5f}, {}, {}, 0.5f});
  experts.shared_size = 0, experts.shared_gate = false;
  experts.gated = false, experts.weighs_input = true;
  experts.router.sigmoid = true;
  plan.layers[1].push_back({experts, NormPlan{NormKind::kRms, 1e-5f}, {}, {}, 0.5f});
  return plan;
}

class Model {
 public:
  Model(const Kernels& kernels, const WeightFormat& format, DType type, const std::vector<std::vector<int>>& groups,
        bool unpacked = false)
      : executor_(stored_as(plan_with_experts(unpacked), format), kernels, CacheType::kFloat32, {{40}, 4, 192, 0, kMaxRank},
                  groups) {
    std::vector<Source> sources;
    for (const auto& [name, shape] : tensor_shapes(plan_with_experts(unpacked))) {
      const int64_t cols = shape.size() > 1 ? shape[1] : 1;
      sources.push_back({name, normals(shape[0] * cols, 0.2f), DType::kFloat32, shape, {cols, 1}});
      sources.back().strides.resize(shape.size());
    }
    executor_.set_weights(sources);
    executor_.check_complete();
    executor_.set_adapter(0, executor_.pack_adapter(type, low_ranks()));
    executor_.set_adapter(1, executor_.pack_adapter(type, matrices()));
    executor_.set_adapter(2, executor_.pack_adapter(type, of_experts()));
  }

  // The logits after each token.
  Logits step(const std::vector<Chunk>& chunks) {
    constexpr int kBlocksEach = 8;
    std::vector<int32_t> tokens, positions, start = {0}, context, rows_wanted, blocks, adapters;
    for (const Chunk& chunk : chunks) {
      for (int t = chunk.begin; t < chunk.end; ++t) {
        rows_wanted.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back((t * 31 + chunk.sequence * 7) % kVocab);
        positions.push_back(t);
      }
      start.push_back(static_cast<int32_t>(tokens.size()));
      context.push_back(chunk.end);
      adapters.push_back(chunk.adapter);
      for (int b = 0; b < kBlocksEach; ++b) blocks.push_back(chunk.sequence * kBlocksEach + b);
    }
    const size_t rows = rows_wanted.size();
    const std::vector<float> zeros(rows), ones(rows, 1.0f);
    const std::vector<int32_t> none(rows + 1), no_logprobs(rows, -1);
    const std::vector<uint64_t> seeds(rows);
    std::vector<int32_t> out(rows);
    std::vector<float> logits(rows * kVocab);
    const std::span<const int32_t> ints(none.data(), rows);
    Step step{tokens, positions, start, context, {{blocks.data(), kBlocksEach}}, {}, adapters, rows_wanted, {}, logits.data()};
    Sampling& s = step.sampling;
    s.temperature = zeros, s.top_p = ones, s.min_p = zeros, s.top_k = ints, s.seed = seeds, s.position = ints;
    s.repetition_penalty = ones, s.presence_penalty = zeros, s.frequency_penalty = zeros, s.num_logprobs = no_logprobs;
    s.history_start = none, s.bias_start = none, s.prompt_len = ints, s.out_tokens = out;
    executor_.step(step);
    Logits result;
    for (auto row = logits.begin(); row != logits.end(); row += kVocab) result.emplace_back(row, row + kVocab);
    return result;
  }

  Executor& executor() { return executor_; }

  LowRankUpdate update(const std::string& module, int rank, int outputs, int inputs, bool bias = false, bool shift = false) {
    return {module + ".weight", 0, outputs, inputs, rank, normals(rank * inputs, 0.1f), normals(outputs * rank, 0.5f),
            bias ? normals(outputs, 0.5f) : nullptr, 0.7f, shift ? normals(outputs, 0.5f) : nullptr};
  }

 private:
  // Ranks that no vector of any level divides, some with a bias.
  AdapterContent low_ranks() {
    AdapterContent content;
    content.updates = {update("layers.0.q", 3, 144, 96, true, true), update("layers.0.k", 0, 72, 96, false, true),
                       update("layers.0.v", 2, 72, 96, false, true), update("layers.0.gate", 1, 104, 96),
                       update("layers.1.up", 7, 200, 96), update("layers.2.o", 5, 96, 144), update("head", 3, kVocab, kSize, true)};
    content.embedding = update("embed", 5, kSize, kVocab);
    return content;
  }

  // Some of the matrices of some experts, and what is beside them.
  AdapterContent of_experts() {
    AdapterContent content;
    content.updates = {update("layers.1.down", 2, 96, 200), update("layers.0.router", 3, 5, 96),
                       update("layers.0.shared_gate", 2, 1, 96), update("layers.0.shared.up", 4, 56, 96),
                       update("layers.0.shared.down", 5, 96, 56, true)};
    for (const int expert : {0, 2, 3}) {
      const std::string number = std::to_string(expert);
      content.updates.push_back(update("layers.0.experts." + number + ".gate", 1 + expert, 72, 96));
      if (expert > 0) content.updates.push_back(update("layers.0.experts." + number + ".up", 3, 72, 96, true));
      content.updates.push_back(update("layers.1.experts." + number + ".up", 7, 72, 96));
      if (expert < 3) content.updates.push_back(update("layers.1.experts." + number + ".down", 1 + expert, 96, 72));
    }
    return content;
  }

  AdapterContent matrices() {
    AdapterContent content;
    content.updates = {update("layers.0.v", 6, 72, 96), update("layers.0.experts.0.down", 5, 96, 72),
                       update("layers.0.experts.4.up", 2, 72, 96), update("layers.1.experts.1.up", 3, 72, 96)};
    content.embed = {normals(kVocab * kSize, 0.3f), DType::kFloat32};
    content.head = {normals(kVocab * kSize, 0.3f), DType::kFloat32};
    return content;
  }

  const float* normals(size_t count, float scale) {
    return values_.emplace_back(std::make_unique<std::vector<float>>(random_.normals(count, scale)))->data();
  }

  Random random_;
  std::vector<std::unique_ptr<std::vector<float>>> values_;
  Executor executor_;
};

const NamedFormat kSome[] = {{"float32", {WeightKind::kFloat32}}, {"int8", {WeightKind::kInt8}}, {"int4 32", {WeightKind::kInt4, 32}}};

// The logits of a sequence's first tokens, of more rows than there is room for at a time.
Logits part(const Logits& all, size_t begin, size_t count) { return {all.begin() + begin, all.begin() + begin + count}; }

}  // namespace

TEST_CASE("a sequence's logits are the same to the bit whatever adapters others have, in any chunks, on any threads") {
  for (const Kernels* kernels : tested_kernels()) {
    int which = 0;
    for (const auto& [name, format] : kSome) {
      CAPTURE(kernels->name);
      CAPTURE(name);
      const DType type = kTypes[which++ % 3];
      Model alone(*kernels, format, type, {{0}}), together(*kernels, format, type, {{0, 0}, {0}}, which == 2);
      std::vector<Logits> expected;  // by adapter + 1
      for (int adapter = -1; adapter < 3; ++adapter) {
        Logits& own = expected.emplace_back(alone.step({{1, 0, 5, adapter}}));
        for (const auto& row : alone.step({{1, 5, 23, adapter}})) own.push_back(row);
        for (const float x : own.back()) REQUIRE(std::isfinite(x));
        if (adapter >= 0) CHECK(own.back() != expected[0].back());
      }
      for (int adapter = -1; adapter < 3; ++adapter) {
        CAPTURE(adapter);
        const Logits mixed = together.step({{0, 0, 6, 0}, {1, 0, 22, adapter}, {2, 0, 9, -1}, {3, 0, 7, 1}, {4, 0, 3, 2}});
        CHECK(part(mixed, 6, 22) == part(expected[adapter + 1], 0, 22));
        const Logits decoded = together.step({{4, 3, 4, 1}, {1, 22, 23, adapter}, {0, 6, 7, 2}});
        CHECK(decoded[1] == expected[adapter + 1][22]);
      }
    }
  }
}

TEST_CASE("adapters that do not fit are refused, and numbers without one end no later step") {
  Model model(choose_kernels("auto"), {WeightKind::kFloat32}, DType::kFloat32, {{0}});
  const auto pack = [&](const LowRankUpdate& update) { model.executor().pack_adapter(DType::kFloat32, {{update}, {}, {}, {}}); };
  CHECK_THROWS_AS(pack(model.update("layers.0.nothing", 1, 96, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.q", 1, 145, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.q", 100, 144, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.experts.5.up", 1, 72, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.experts.4.down", 1, 72, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.q", 0, 144, 96)), std::invalid_argument);
  CHECK_THROWS_AS(pack(model.update("layers.0.q", 0, 144, 96, true, true)), std::invalid_argument);
  AdapterContent content;
  content.embedding = model.update("embed", 1, kSize, kVocab + 1);
  CHECK_THROWS_AS(model.executor().pack_adapter(DType::kFloat32, content), std::invalid_argument);
  const Logits expected = model.step({{0, 0, 3, 0}});
  CHECK_THROWS_AS(model.step({{1, 0, 3, 1}, {2, 0, 3, 9}}), std::invalid_argument);
  CHECK(model.step({{0, 0, 3, 0}}) == expected);
  model.executor().set_adapter(0, nullptr);
  CHECK_THROWS_AS(model.step({{0, 0, 3, 0}}), std::invalid_argument);
}
