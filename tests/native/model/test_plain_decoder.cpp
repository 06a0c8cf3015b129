#include <doctest/doctest.h>

#include <functional>
#include <numeric>

#include "model/executor.h"
#include "plain_decoder.h"
#include "support.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

const NormPlan kRms{NormKind::kRms, 1e-5f}, kLayerNorm{NormKind::kLayer, 1e-5f, true};
constexpr int kTokens = 21;

AttentionPlan plain_attention() {
  AttentionPlan plan;
  plan.num_heads = 4, plan.num_kv_heads = 2, plan.head_dim = 20;
  plan.scale = 0.25f;
  plan.rope = RopePlan{{1.0f, 0.5f, 0.2f, 0.1f, 0.05f, 0.01f}};
  return plan;
}

const MlpPlan kMlp{56, Activation::kSilu, true};

DecoderPlan plain_plan() {
  const std::vector<ResidualBlockPlan> layer = {{plain_attention(), kRms, {}, {}}, {kMlp, kRms, {}, {}}};
  DecoderPlan plan;
  plan.vocab_size = 60, plan.hidden_size = plan.embedding.size = 40, plan.max_positions = 64;
  plan.layers = {layer, layer};
  plan.final_norm = kRms;
  return plan;
}

struct Option {
  const char* name;
  std::function<void(DecoderPlan&)> set;
};

AttentionPlan& attention(DecoderPlan& plan, int layer = 0) { return std::get<AttentionPlan>(plan.layers[layer][0].mixer); }

// Everything that a plan may say, and the plain plan does not.
const Option kOptions[] = {
    {"sinks", [](DecoderPlan& plan) { attention(plan).sinks = true; }},
    {"sinks in a window", [](DecoderPlan& plan) { attention(plan).sinks = true, attention(plan).sliding_window = 5; }},
    {"interleaved rope", [](DecoderPlan& plan) { attention(plan).rope->interleaved = true; }},
    {"rope with a factor", [](DecoderPlan& plan) { attention(plan).rope->factor = 1.3f; }},
    {"a layer without positions", [](DecoderPlan& plan) { attention(plan, 1).rope.reset(); }},
    {"alibi", [](DecoderPlan& plan) {
       attention(plan).rope.reset();
       attention(plan).alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
     }},
    {"scores with a cap", [](DecoderPlan& plan) { attention(plan).softcap = 1.5f; }},
    {"biases", [](DecoderPlan& plan) {
       attention(plan).qkv_bias = attention(plan).out_bias = true;
       std::get<MlpPlan>(plan.layers[1][1].mixer).bias = true;
     }},
    {"q/k norm over a head", [](DecoderPlan& plan) { attention(plan).qk_norm = kRms; }},
    {"q/k LayerNorm over a head", [](DecoderPlan& plan) { attention(plan).qk_norm = kLayerNorm; }},
    {"q/k norm over the whole width", [](DecoderPlan& plan) {
       attention(plan).qk_norm = kRms;
       attention(plan).qk_norm_over = QkNormOver::kWhole;
     }},
    {"q/k LayerNorm over the whole width", [](DecoderPlan& plan) {
       attention(plan, 1).qk_norm = kLayerNorm;
       attention(plan, 1).qk_norm_over = QkNormOver::kWhole;
     }},
    {"q/k norm of each head", [](DecoderPlan& plan) {
       attention(plan).qk_norm = kLayerNorm;
       attention(plan).qk_norm_over = QkNormOver::kEach;
     }},
    {"q/k norm after rope", [](DecoderPlan& plan) {
       attention(plan).qk_norm = kRms;
       attention(plan).qk_norm_after_rope = true;
     }},
    {"a temperature by position", [](DecoderPlan& plan) { attention(plan).query_temperature = {0.7f, 4, 1}; }},
    {"a plain MLP", [](DecoderPlan& plan) { plan.layers[0][1].mixer = MlpPlan{50, Activation::kGelu}; }},
    {"LayerNorm", [](DecoderPlan& plan) { plan.layers[1][1].norm = kLayerNorm; }},
    {"norms without weights", [](DecoderPlan& plan) {
       plan.layers[0][0].norm = NormPlan{NormKind::kLayer, 1e-5f, false, false};
       plan.final_norm = NormPlan{NormKind::kRms, 1e-5f, false, false};
     }},
    {"weights above 1", [](DecoderPlan& plan) {
       plan.layers[0][0].norm->unit_offset = true;
       plan.final_norm->unit_offset = true;
     }},
    {"no norm", [](DecoderPlan& plan) { plan.layers[1][0].norm.reset(), plan.final_norm.reset(); }},
    {"post-norms", [](DecoderPlan& plan) { plan.layers[0][0].post_norm = plan.layers[0][1].post_norm = kRms; }},
    {"a post-norm with a scale", [](DecoderPlan& plan) {
       plan.layers[0][1].post_norm = kLayerNorm;
       plan.layers[0][1].scale = 0.4f;
     }},
    {"scales", [](DecoderPlan& plan) { plan.layers[0][0].scale = 0.3f, plan.layers[1][1].scale = 1.7f; }},
    {"a norm of the sum", [](DecoderPlan& plan) { plan.layers[0][0].sum_norm = kLayerNorm; }},
    {"residual blocks beside each other with norms of their own", [](DecoderPlan& plan) {
       plan.layers[0] = {{ParallelPlan{{{plain_attention(), kRms, {}, {}}, {kMlp, kLayerNorm, {}, {}}}}, {}, {}, {}}};
     }},
    {"residual blocks beside each other with one norm", [](DecoderPlan& plan) {
       plan.layers[1] = {{ParallelPlan{{{plain_attention(), {}, {}, {}}, {kMlp, {}, {}, {}}}}, kLayerNorm, {}, {}}};
     }},
    {"residual blocks beside each other with all that they may have", [](DecoderPlan& plan) {
       plan.layers[0] = {{ParallelPlan{{{plain_attention(), kRms, kRms, {}, 0.5f}, {kMlp, {}, {}, {}, 2.0f}}}, kRms,
                          kLayerNorm, kRms, 0.7f}};
     }},
    {"residual blocks within residual blocks", [](DecoderPlan& plan) {
       const ParallelPlan inner{{{plain_attention(), kRms, {}, {}}}};
       plan.layers[0] = {{ParallelPlan{{{inner, kRms, {}, {}}, {kMlp, kLayerNorm, {}, {}}}}, {}, {}, {}}};
     }},
    {"a scaled embedding", [](DecoderPlan& plan) { plan.embedding.scale = 6.5f; }},
    {"a normalized embedding", [](DecoderPlan& plan) { plan.embedding.norm = kLayerNorm; }},
    {"a normalized embedding with positions", [](DecoderPlan& plan) { plan.embedding = {40, 64, 2, 1.0f, kLayerNorm, {}}; }},
    {"a head with a bias", [](DecoderPlan& plan) { plan.head.bias = true, plan.head.divisor = 2; }},
    {"a tied head with a bias", [](DecoderPlan& plan) { plan.head.tied = plan.head.bias = true; }},
    {"learned positions and projections", [](DecoderPlan& plan) { plan.embedding = {28, 64, 2, 0.5f, {}, {}}; }},
    {"a tied head", [](DecoderPlan& plan) { plan.head.tied = true; }},
    {"a head with a divisor", [](DecoderPlan& plan) { plan.head.divisor = 8; }},
    {"a head with a cap", [](DecoderPlan& plan) { plan.head.softcap = 2; }},
    {"a head with both", [](DecoderPlan& plan) { plan.head.divisor = 0.5f, plan.head.softcap = 3; }},
};

std::map<std::string, std::vector<float>> random_tensors(const DecoderPlan& plan) {
  Random random;
  std::map<std::string, std::vector<float>> tensors;
  for (const auto& [name, shape] : tensor_shapes(plan)) {
    const bool matrix = shape.size() == 2;
    tensors[name] = random.normals(matrix ? shape[0] * shape[1] : shape[0], matrix ? 1.5f / std::sqrt(float(shape[1])) : 1.0f);
  }
  return tensors;
}

// The logits after each of the tokens, in two chunks and then one by one.
std::vector<std::vector<float>> computed(const Kernels& kernels, const DecoderPlan& plan,
                                         const std::map<std::string, std::vector<float>>& tensors,
                                         const std::vector<int>& tokens) {
  DecoderPlan stored = stored_as(plan, {WeightKind::kFloat32});
  for (const auto& [name, format] : plan.formats) stored.formats[name] = format;
  Executor executor(stored, kernels, CacheType::kFloat32, {{4}, kTokens, kTokens}, {{0}, {0}});
  std::vector<Source> sources;
  std::map<std::string, std::vector<float>> ordered;
  for (const auto& [name, shape] : tensor_shapes(plan)) {
    sources.push_back({name, tensors.at(name).data(), DType::kFloat32, shape, {shape.back(), 1}});
    if (const auto order = plan.input_orders.find(name); order != plan.input_orders.end()) {
      std::vector<float>& values = ordered[name] = tensors.at(name);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = tensors.at(name)[i - i % shape[1] + order->second[i % shape[1]]];
      }
      sources.back().data = values.data();
    }
    if (shape.size() == 1) sources.back().strides = {1};
  }
  executor.set_weights(sources);
  executor.check_complete();
  std::vector<std::vector<float>> result;
  const std::vector<int32_t> table = {2, 0, 3, 1};
  for (int begin = 0; begin < kTokens;) {
    const int count = begin < 18 ? 9 : 1, end = begin + count;
    std::vector<int32_t> positions(count), rows(count), context = {end}, start = {0, count};
    std::iota(positions.begin(), positions.end(), begin);
    std::iota(rows.begin(), rows.end(), 0);
    const std::vector<int32_t> ids(tokens.begin() + begin, tokens.begin() + end), none(count + 1), no_logprobs(count, -1);
    const std::vector<float> zeros(count), ones(count, 1.0f);
    const std::vector<uint64_t> seeds(count);
    std::vector<int32_t> out(count);
    std::vector<float> logits(size_t(count) * plan.vocab_size);
    Step step{ids, positions, start, context, {{table.data(), 4}}, {}, {}, rows, {}, logits.data()};
    Sampling& s = step.sampling;
    const std::span<const int32_t> ints(none.data(), count);
    s.temperature = s.min_p = s.presence_penalty = s.frequency_penalty = zeros;
    s.top_p = s.repetition_penalty = ones;
    s.top_k = s.position = s.prompt_len = ints;
    s.seed = seeds, s.num_logprobs = no_logprobs, s.history_start = s.bias_start = none, s.out_tokens = out;
    executor.step(step);
    for (int row = 0; row < count; ++row) {
      const float* first = logits.data() + size_t(row) * plan.vocab_size;
      result.emplace_back(first, first + plan.vocab_size);
    }
    begin = end;
  }
  return result;
}

}  // namespace

TEST_CASE("whatever a plan says is computed, as a plain decoder does it, on every level") {
  std::vector<int> tokens(kTokens);
  for (int t = 0; t < kTokens; ++t) tokens[t] = (t * 37 + 11) % 60;
  const PlainDecoder::Matrix usual = PlainDecoder(plain_plan(), random_tensors(plain_plan())).logits(tokens);
  for (const Kernels* kernels : tested_kernels()) {
    for (const Option& option : kOptions) {
      CAPTURE(kernels->name);
      CAPTURE(option.name);
      DecoderPlan plan = plain_plan();
      option.set(plan);
      const auto tensors = random_tensors(plan);
      const auto expected = PlainDecoder(plan, tensors).logits(tokens);
      const auto logits = computed(*kernels, plan, tensors, tokens);
      double largest = 0, worst = 0, moved = 0;
      for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < plan.vocab_size; ++i) {
          largest = std::max(largest, std::abs(expected[t][i]));
          worst = std::max(worst, std::abs(logits[t][i] - expected[t][i]));
          moved = std::max(moved, std::abs(usual[t][i] - expected[t][i]));
        }
      }
      CHECK(worst <= 1e-4 * largest);
      CHECK(moved > 1e-2 * largest);  // so that an option without effect would be found out
    }
  }
}

TEST_CASE("tensors of one product may be stored in different ways") {
  std::vector<int> tokens(kTokens);
  for (int t = 0; t < kTokens; ++t) tokens[t] = (t * 37 + 11) % 60;
  DecoderPlan plan = plain_plan();
  attention(plan).qkv_bias = true;
  std::get<MlpPlan>(plan.layers[1][1].mixer).bias = true;
  const auto in_order = [&](const std::string& name, int size, int step) {
    std::vector<int32_t>& order = plan.input_orders[name];
    for (int i = 0; i < size; ++i) order.push_back((i * step + 3) % size);
  };
  const WeightFormat half{WeightKind::kFloat16};
  plan.formats["layers.0.v.weight"] = plan.formats["layers.1.k.weight"] = plan.formats["layers.1.up.weight"] = half;
  for (const char* name : {"layers.0.q.weight", "layers.0.k.weight", "layers.0.gate.weight"}) in_order(name, 40, 7);
  in_order("layers.0.up.weight", 40, 9);
  in_order("layers.1.down.weight", 56, 5);
  auto tensors = random_tensors(plan);
  for (auto& [name, values] : tensors) {
    for (float& value : values) value = to_float(to_f16(value));
  }
  const auto expected = PlainDecoder(plan, tensors).logits(tokens);
  for (const Kernels* kernels : tested_kernels()) {
    CAPTURE(kernels->name);
    const auto logits = computed(*kernels, plan, tensors, tokens);
    double largest = 0, worst = 0;
    for (int t = 0; t < kTokens; ++t) {
      for (int i = 0; i < plan.vocab_size; ++i) {
        largest = std::max(largest, std::abs(expected[t][i]));
        worst = std::max(worst, std::abs(logits[t][i] - expected[t][i]));
      }
    }
    CHECK(worst <= 1e-3 * largest);  // matrices of float16 round their inputs
  }
}

TEST_CASE("a plan that makes no sense is refused") {
  const auto refused = [](const std::function<void(DecoderPlan&)>& spoil) {
    DecoderPlan plan = plain_plan();
    spoil(plan);
    const std::vector<std::vector<int>> groups = {{0}};
    CHECK_THROWS_AS(Executor(stored_as(plan, {}), choose_kernels("auto"), CacheType::kFloat32, {{4}, 4, 4}, groups),
                    std::invalid_argument);
  };
  refused([](DecoderPlan& plan) { attention(plan).num_kv_heads = 3; });
  refused([](DecoderPlan& plan) { attention(plan).rope->inv_freq.resize(11); });
  refused([](DecoderPlan& plan) { attention(plan).scale = 0; });
  refused([](DecoderPlan& plan) { attention(plan).alibi_slopes = {1.0f}; });
  refused([](DecoderPlan& plan) { plan.head.divisor = 0; });
  refused([](DecoderPlan& plan) { plan.layers[0][0].mixer = ParallelPlan{}; });
  refused([](DecoderPlan& plan) {
    plan.layers[0] = {{ParallelPlan{{{kMlp, {}, {}, kRms}}}, {}, {}, {}}};
  });
  refused([](DecoderPlan& plan) { plan.layers[0].push_back(plan.layers[0][0]); });  // two of one name
  refused([](DecoderPlan& plan) { plan.input_orders["layers.0.o.weight"] = {0, 1}; });
  refused([](DecoderPlan& plan) { plan.input_orders["layers.0.o.weight"].assign(80, 1); });
  refused([](DecoderPlan& plan) { plan.input_orders["layers.9.o.weight"] = {0}; });
  refused([](DecoderPlan& plan) {
    for (int i = 0; i < 40; ++i) plan.input_orders["embed.weight"].push_back(39 - i);  // rows that are looked up
  });
}
