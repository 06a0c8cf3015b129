#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <memory>

#include "model/draft.h"
#include "small_model.h"
#include "support.h"
#include "tensors.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr int kTable = 4, kVocab = 90, kMost = 9;

DecoderPlan plan() {
  AttentionPlan attention;
  attention.num_heads = 4, attention.num_kv_heads = 2, attention.head_dim = 16, attention.scale = 0.25f;
  attention.rope = RopePlan{{1.0f, 0.1f, 0.01f, 0.001f}};
  const NormPlan norm{NormKind::kRms, 1e-5f};
  DecoderPlan plan;
  plan.vocab_size = kVocab, plan.hidden_size = plan.embedding.size = 72, plan.max_positions = 64;
  plan.head.tied = true, plan.final_norm = norm;
  plan.layers = {{{attention, norm, {}, {}}, {MlpPlan{104, Activation::kSilu, true}, norm, {}, {}}}};
  return plan;
}

// Sequences of which all but some tokens are in the cache. Each samples with a seed of its own, and token 7 is
// likelier.
class Sampled {
 public:
  explicit Sampled(Executor& executor, std::vector<std::vector<int32_t>> tokens)
      : executor_(executor), tokens_(std::move(tokens)), cached_(tokens_.size()) {}

  const std::vector<std::vector<int32_t>>& tokens() const { return tokens_; }

  // Runs what is not cached, and appends what each sequence in `sampling` samples.
  void step(const std::vector<int>& sampling) {
    std::vector<int32_t> out(sampling.size());
    Step step = build(sampling);
    step.sampling.out_tokens = out;
    executor_.step(step);
    for (size_t i = 0; i < tokens_.size(); ++i) cached_[i] = static_cast<int>(tokens_[i].size());
    for (size_t r = 0; r < sampling.size(); ++r) tokens_[sampling[r]].push_back(out[r]);
  }

  // The draft tokens of each sequence. The first sequences have the right to `counts` of them.
  std::vector<std::vector<int32_t>> draft(const std::vector<int32_t>& counts, float least = 0) {
    std::vector<int> sampling;
    for (size_t s = 0; s < counts.size(); ++s) {
      if (counts[s]) sampling.push_back(static_cast<int>(s));
    }
    std::vector<int32_t> out(counts.size() * kMost);
    tidewheel::draft(executor_, build(sampling), {counts, least, out, kMost});
    std::vector<std::vector<int32_t>> result;
    for (size_t s = 0; s < counts.size(); ++s) {
      const auto begin = out.begin() + s * kMost, end = std::find(begin, begin + kMost, -1);
      CHECK(std::all_of(end, begin + kMost, [](int32_t token) { return token == -1; }));
      result.emplace_back(begin, end);
    }
    return result;
  }

 private:
  Step build(const std::vector<int>& sampling) {
    ids_.clear(), positions_.clear(), start_ = {0}, context_.clear(), tables_.clear(), last_.clear(), at_.clear();
    seeds_.clear(), bias_start_ = {0}, bias_ids_.clear();
    for (size_t s = 0; s < tokens_.size(); ++s) {
      for (int t = cached_[s]; t < static_cast<int>(tokens_[s].size()); ++t) {
        ids_.push_back(tokens_[s][t]), positions_.push_back(t);
      }
      start_.push_back(static_cast<int32_t>(ids_.size()));
      context_.push_back(static_cast<int32_t>(tokens_[s].size()));
      for (int b = 0; b < kTable; ++b) tables_.push_back(static_cast<int32_t>(s * kTable + b));
    }
    for (const int s : sampling) {
      last_.push_back(start_[s + 1] - 1), at_.push_back(context_[s]), seeds_.push_back(100 + s);
      bias_ids_.push_back(7), bias_start_.push_back(static_cast<int32_t>(bias_ids_.size()));
    }
    const size_t rows = sampling.size();
    zeros_.assign(rows, 0), ones_.assign(rows, 1), none_.assign(rows + 1, 0), unreported_.assign(rows, -1);
    Step step;
    step.token_ids = ids_, step.positions = positions_, step.query_start = start_, step.context_len = context_;
    step.block_tables = {{tables_.data(), kTable}}, step.logits_rows = last_;
    Sampling& s = step.sampling;
    s.temperature = s.top_p = s.repetition_penalty = s.bias_values = ones_;
    s.min_p = s.presence_penalty = s.frequency_penalty = zeros_;
    s.top_k = s.prompt_len = {none_.data(), rows};
    s.seed = seeds_, s.position = at_, s.num_logprobs = unreported_, s.history_start = none_;
    s.bias_start = bias_start_, s.bias_ids = bias_ids_;
    return step;
  }

  Executor& executor_;
  std::vector<std::vector<int32_t>> tokens_;
  std::vector<int> cached_;
  std::vector<int32_t> ids_, positions_, start_, context_, tables_, last_, at_, bias_start_, bias_ids_, none_, unreported_;
  std::vector<uint64_t> seeds_;
  std::vector<float> zeros_, ones_;
};

class Weighted {
 public:
  Executor executor;

  explicit Weighted(std::shared_ptr<ThreadPool> pool)
      : executor(stored_as(plan(), WeightFormat{WeightKind::kFloat32}), choose_kernels("auto"), CacheType::kFloat32, {{16}, 4, 64}, std::move(pool)) {
    Random random;
    std::vector<Source> sources;
    for (const auto& [name, shape] : tensor_shapes(plan())) {
      const int64_t cols = shape.size() > 1 ? shape[1] : 1;
      values_.push_back(random.normals(shape[0] * cols, 0.3f));
      sources.push_back({name, values_.back().data(), DType::kFloat32, shape, {cols, 1}});
      sources.back().strides.resize(shape.size());
    }
    executor.set_weights(sources);
    executor.check_complete();
  }

 private:
  std::deque<std::vector<float>> values_;
};

const std::vector<std::vector<int32_t>> kPrompts = {{1, 2, 3}, {4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, {30}};

}  // namespace

TEST_CASE("draft tokens are the tokens that steps of one token each sample, whoever gets how many") {
  const auto pool = std::make_shared<ThreadPool>(std::vector<std::vector<int>>{{0, 0}});
  Weighted steps(pool), loop(pool);  // side by side on the same threads
  Sampled one(steps.executor, kPrompts), all(loop.executor, kPrompts);
  for (int i = 0; i < kMost; ++i) one.step({0, 1, 2});
  const auto draft_tokens = all.draft({3, 9, 0});
  for (const auto& [sequence, count] : {std::pair{0, 3}, std::pair{1, 9}, std::pair{2, 0}}) {
    const auto begin = one.tokens()[sequence].begin() + kPrompts[sequence].size();
    CAPTURE(sequence);
    CHECK(draft_tokens[sequence] == std::vector<int32_t>(begin, begin + count));
  }
  // What was drafted is in the cache, but for the last ones, and the tokens go on from there.
  all.step({0, 1, 2});
  for (int i = 1; i < kMost; ++i) all.step({0, 1, 2});
  CHECK(all.tokens() == one.tokens());
}

TEST_CASE("a sequence that draws gets one more draft token when it is unlikely to be right") {
  Weighted model(std::make_shared<ThreadPool>(std::vector<std::vector<int>>{{0}}));
  Sampled sequences(model.executor, kPrompts);
  const auto whole = sequences.draft({9, 9, 9}), first = sequences.draft({9, 9, 9}, 0.999f);
  const auto some = sequences.draft({9, 9, 9}, 1e-3f);
  size_t total = 0;
  for (size_t s = 0; s < whole.size(); ++s) {
    CHECK(whole[s].size() == 9);
    CHECK(first[s].size() == 1);
    CHECK(std::equal(some[s].begin(), some[s].end(), whole[s].begin()));
    total += some[s].size();
  }
  CHECK(total > 3);
  CHECK(total < 27);
}

TEST_CASE("draft tokens that have no room are refused before anything is computed") {
  Weighted model(std::make_shared<ThreadPool>(std::vector<std::vector<int>>{{0}}));
  std::vector<std::vector<int32_t>> longest(1, std::vector<int32_t>(60, 5));
  Sampled sequences(model.executor, longest);
  CHECK(sequences.draft({5})[0].size() == 5);
  CHECK_THROWS_AS(sequences.draft({6}), std::invalid_argument);
}
