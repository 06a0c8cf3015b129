#include <doctest/doctest.h>

#include <iterator>
#include <map>

#include "model/executor.h"
#include "support.h"
#include "tensors.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

// A small decoder whose sizes fill neither panels nor groups.
DecoderPlan small_model() {
  AttentionPlan attention;
  attention.num_heads = attention.num_kv_heads = 5;
  attention.head_dim = 16;
  attention.scale = 0.25f;
  attention.rope = RopePlan{{1.0f, 0.1f, 0.01f, 0.001f}};
  const NormPlan norm{NormKind::kRms, 1e-5f};
  const std::vector<ResidualBlockPlan> layer = {{attention, norm, {}, {}}, {MlpPlan{104, Activation::kSilu, true}, norm, {}, {}}};
  DecoderPlan plan;
  plan.vocab_size = 90;
  plan.hidden_size = plan.embedding.size = 72;
  plan.max_positions = 256;
  plan.head.tied = true;
  plan.final_norm = norm;
  plan.layers = {layer, layer};
  return plan;
}

// A run of tokens of one sequence, which has the blocks from 8 * `sequence` on.
struct Chunk {
  int sequence, begin, end;
};

class Model {
 public:
  Model(const Kernels& kernels, const WeightFormat& format, int threads)
      : executor_(stored_as(small_model(), format), kernels, CacheType::kBFloat16, {{24}, 4, 192}, {std::vector<int>(threads, 0)}) {
    Random random;
    std::map<std::string, std::vector<float>> values;
    std::vector<Source> sources;
    for (const auto& [name, shape] : tensor_shapes(small_model())) {
      const int64_t cols = shape.size() > 1 ? shape[1] : 1;
      values[name] = random.normals(shape[0] * cols, 0.3f);
      sources.push_back({name, values[name].data(), DType::kFloat32, shape, {cols, 1}});
      sources.back().strides.resize(shape.size());
    }
    executor_.set_weights(sources);
    executor_.check_complete();
  }

  // The logits of the last token of each chunk.
  std::vector<std::vector<float>> step(const std::vector<Chunk>& chunks) {
    constexpr int kBlocksEach = 8;
    std::vector<int32_t> tokens, positions, start = {0}, context, last, blocks;
    for (const Chunk& chunk : chunks) {
      for (int t = chunk.begin; t < chunk.end; ++t) {
        tokens.push_back((t * 31 + chunk.sequence * 7) % 90);
        positions.push_back(t);
      }
      start.push_back(static_cast<int32_t>(tokens.size()));
      context.push_back(chunk.end);
      last.push_back(static_cast<int32_t>(tokens.size()) - 1);
      for (int b = 0; b < kBlocksEach; ++b) blocks.push_back(chunk.sequence * kBlocksEach + b);
    }
    const size_t rows = chunks.size();
    const std::vector<float> zeros(rows), ones(rows, 1.0f);
    const std::vector<int32_t> none(rows + 1), no_logprobs(rows, -1);
    const std::vector<uint64_t> seeds(rows);
    std::vector<int32_t> out(rows);
    std::vector<float> logits(rows * executor_.vocab_size());
    const std::span<const int32_t> nothing(none.data(), rows);
    Step step{tokens, positions, start, context, {{blocks.data(), kBlocksEach}}, {}, {}, last, {}, logits.data()};
    Sampling& sampling = step.sampling;
    sampling.temperature = sampling.min_p = sampling.presence_penalty = sampling.frequency_penalty = zeros;
    sampling.top_p = sampling.repetition_penalty = ones;
    sampling.top_k = sampling.position = sampling.prompt_len = nothing;
    sampling.seed = seeds;
    sampling.num_logprobs = no_logprobs;
    sampling.history_start = sampling.bias_start = none;
    sampling.out_tokens = out;
    executor_.step(step);
    std::vector<std::vector<float>> result;
    for (auto row = logits.begin(); row != logits.end(); row += executor_.vocab_size()) {
      result.emplace_back(row, row + executor_.vocab_size());
    }
    return result;
  }

 private:
  Executor executor_;
};

}  // namespace

TEST_CASE("logits are the same to the bit alone and beside others, in one chunk and in many, on one thread and on three") {
  for (const Kernels* kernels : tested_kernels()) {
    for (size_t i = 0; i < std::size(kFormats); i += kStride) {
      const auto& [name, format] = kFormats[i];
      CAPTURE(kernels->name);
      CAPTURE(name);
      Model alone(*kernels, format, 1), together(*kernels, format, 3);
      std::vector<float> expected;
      for (const auto& [begin, end] : {std::pair{0, 7}, std::pair{7, 44}, std::pair{44, 76}, std::pair{76, 77}}) {
        expected = alone.step({{1, begin, end}})[0];
      }
      for (const float x : expected) REQUIRE(std::isfinite(x));
      const auto logits = together.step({{0, 0, 19}, {1, 0, 77}, {2, 0, 61}});
      CHECK(logits[1] == expected);
      together.step({{1, 0, 76}});
      const auto decoded = together.step({{2, 61, 62}, {1, 76, 77}, {0, 19, 20}});
      CHECK(decoded[1] == expected);
    }
  }
}
