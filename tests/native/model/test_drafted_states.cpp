#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <random>

#include "model/executor.h"
#include "support.h"
#include "tensors.h"

using namespace tidewheel;
using namespace tidewheel::test;

namespace {

constexpr int kTable = 8, kVocab = 70, kDraftTokens = 5, kSlots = 4, kLength = 60;

DecoderPlan plan_with(const MixerPlan& mixer) {
  AttentionPlan attention;
  attention.num_heads = 2, attention.num_kv_heads = 1, attention.head_dim = 16, attention.scale = 0.25f;
  const NormPlan norm{NormKind::kRms, 1e-5f};
  DecoderPlan plan;
  plan.vocab_size = kVocab, plan.hidden_size = plan.embedding.size = 48, plan.max_positions = 128;
  plan.head.tied = true, plan.final_norm = norm;
  plan.layers = {{{mixer, norm, {}, {}}}, {{attention, norm, {}, {}}}, {{mixer, norm, {}, {}}}};
  return plan;
}

std::vector<std::pair<const char*, DecoderPlan>> plans() {
  const NormPlan norm{NormKind::kRms, 1e-5f};
  const DeltaNetPlan delta{2, 6, 20, 24, 4, norm};
  Mamba2Plan mamba;
  mamba.num_heads = 4, mamba.head_dim = 40, mamba.num_groups = 2, mamba.state_dim = 21, mamba.conv_kernel = 3;
  mamba.max_dt = 10, mamba.conv_bias = mamba.bias = true;
  mamba.norm = norm, mamba.input_scales = {1, 0.5f, 1, 2, 1};
  return {{"delta net", plan_with(delta)}, {"Mamba2", plan_with(mamba)}, {"short convolution", plan_with(ShortConvPlan{150, 3, true})},
          {"delta net of one tap", plan_with(DeltaNetPlan{1, 2, 16, 16, 1, norm})}};
}

struct Span {
  int sequence, slot, begin;
  std::vector<int32_t> tokens;  // the last ones are draft tokens
  int draft_tokens = 0;
};

class DraftingModel {
 public:
  Executor executor;

  DraftingModel(const DecoderPlan& plan, const std::vector<std::vector<int>>& groups)
      : executor(stored_as(plan, WeightFormat{WeightKind::kFloat32}), choose_kernels("auto"), CacheType::kFloat32,
                 {{4 * kTable}, 4, 64, kSlots, 0, kDraftTokens}, groups) {
    Random random;
    std::vector<Source> sources;
    for (const auto& [name, shape] : tensor_shapes(plan)) {
      const int64_t cols = shape.size() > 1 ? shape[1] : 1;
      values_.push_back(random.normals(shape[0] * cols, 0.3f));
      sources.push_back({name, values_.back().data(), DType::kFloat32, shape, {cols, 1}});
      sources.back().strides.resize(shape.size());
    }
    executor.set_weights(sources);
    executor.check_complete();
  }

  // The logits after each token of each span.
  std::vector<std::vector<float>> step(const std::vector<Span>& spans) {
    std::vector<int32_t> ids, positions, start = {0}, context, tables, slots, draft_tokens, rows;
    for (const Span& span : spans) {
      for (size_t i = 0; i < span.tokens.size(); ++i) {
        rows.push_back(static_cast<int32_t>(ids.size()));
        ids.push_back(span.tokens[i]), positions.push_back(span.begin + static_cast<int>(i));
      }
      start.push_back(static_cast<int32_t>(ids.size()));
      context.push_back(positions.back() + 1), slots.push_back(span.slot), draft_tokens.push_back(span.draft_tokens);
      for (int b = 0; b < kTable; ++b) tables.push_back(span.sequence * kTable + b);
    }
    const size_t count = rows.size();
    const std::vector<float> zeros(count), ones(count, 1.0f);
    const std::vector<int32_t> none(count + 1), unreported(count, -1);
    const std::vector<uint64_t> seeds(count);
    std::vector<int32_t> out(count);
    std::vector<float> logits(count * kVocab);
    Step step;
    step.token_ids = ids, step.positions = positions, step.query_start = start, step.context_len = context;
    step.block_tables = {{tables.data(), kTable}}, step.logits_rows = rows, step.out_logits = logits.data();
    step.state_slots = slots;
    if (std::any_of(draft_tokens.begin(), draft_tokens.end(), [](int32_t n) { return n != 0; })) step.num_draft_tokens = draft_tokens;
    Sampling& s = step.sampling;
    s.temperature = zeros, s.top_p = ones, s.min_p = zeros, s.seed = seeds;
    s.top_k = s.position = s.prompt_len = std::span(none).first(count);
    s.repetition_penalty = ones, s.presence_penalty = s.frequency_penalty = zeros, s.num_logprobs = unreported;
    s.history_start = s.bias_start = none, s.out_tokens = out;
    executor.step(step);
    std::vector<std::vector<float>> result;
    for (size_t r = 0; r < count; ++r) result.emplace_back(logits.begin() + r * kVocab, logits.begin() + (r + 1) * kVocab);
    return result;
  }

 private:
  std::deque<std::vector<float>> values_;
};

int32_t token_at(int sequence, int position) { return (position * 31 + sequence * 17 + position / 7) % kVocab; }

using Logits = std::vector<std::vector<float>>;

// Those after each token of a sequence, computed one by one.
Logits plainly(const DecoderPlan& plan, int sequence) {
  DraftingModel model(plan, {{0}});
  Logits all;
  for (int t = 0; t < kLength; ++t) all.push_back(model.step({{0, 0, t, {token_at(sequence, t)}}})[0]);
  return all;
}

}  // namespace

TEST_CASE("rejected draft tokens leave nothing in a state, and right ones what they would have left as tokens") {
  for (const auto& [name, plan] : plans()) {
    CAPTURE(name);
    const Logits expected[] = {plainly(plan, 0), plainly(plan, 1)};
    for (const auto& groups : {std::vector<std::vector<int>>{{0}}, std::vector<std::vector<int>>{{0, 0}, {0}}}) {
      DraftingModel model(plan, groups);
      std::mt19937 random(5);
      const auto up_to = [&](int most) { return static_cast<int>(random() % (most + 1)); };
      int next[] = {0, 0}, slot[] = {0, 1}, rejected = 0;
      while (next[0] < kLength || next[1] < kLength) {
        std::vector<Span> spans;
        int right[2] = {0, 0};
        for (const int s : {0, 1}) {
          if (next[s] == kLength || up_to(3) == 0) continue;
          Span span{s, slot[s], next[s], {}, 0};
          const int sure = 1 + std::min(up_to(2), kLength - 1 - next[s]);
          for (int i = 0; i < sure; ++i) span.tokens.push_back(token_at(s, next[s] + i));
          span.draft_tokens = up_to(kDraftTokens);
          right[s] = std::min({up_to(span.draft_tokens), kLength - next[s] - sure});
          for (int i = 0; i < span.draft_tokens; ++i) {
            const int32_t token = token_at(s, next[s] + sure + i);
            span.tokens.push_back(i < right[s] ? token : (token + 1) % kVocab);
          }
          rejected += span.draft_tokens - right[s];
          spans.push_back(span);
        }
        if (spans.empty()) continue;
        const Logits found = model.step(spans);
        size_t row = 0;
        bool same = true;
        for (const Span& span : spans) {
          const int kept = static_cast<int>(span.tokens.size()) - span.draft_tokens + right[span.sequence];
          for (int i = 0; i < kept; ++i) same = same && found[row + i] == expected[span.sequence][span.begin + i];
          row += span.tokens.size(), next[span.sequence] += kept;
        }
        CHECK(same);
        if (up_to(2) == 0) {  // goes on from copies; the one that is copied twice is in a slot of another's log
          const int32_t there[] = {slot[0] ^ 2, slot[1] ^ 2};
          const std::vector<int32_t> pairs = {slot[1], there[0], slot[0], there[0], slot[1], there[1]};
          model.executor.copy_states(pairs);
          slot[0] = there[0], slot[1] = there[1];
        }
      }
      CHECK(rejected > 20);
    }
  }
}

TEST_CASE("a slot is begun anew by another sequence, whatever its log holds") {
  const DecoderPlan plan = plans()[0].second;
  const Logits expected = plainly(plan, 1);
  DraftingModel model(plan, {{0}});
  model.step({{0, 3, 0, {1, 2, 3, 4}, 3}});
  for (int t = 0; t < 4; ++t) CHECK(model.step({{1, 3, t, {token_at(1, t)}}})[0] == expected[t]);
}

TEST_CASE("draft tokens that cannot be taken back are refused, and change nothing") {
  const DecoderPlan plan = plans()[0].second;
  const Logits expected = plainly(plan, 0);
  DraftingModel model(plan, {{0}});
  std::vector<int32_t> tokens;
  for (int t = 0; t < 8; ++t) tokens.push_back(token_at(0, t));
  CHECK_THROWS_AS(DraftingModel(plan_with(ShortConvPlan{48, 1, false}), {{0}}), std::invalid_argument);  // it has no state
  CHECK_THROWS_AS(model.step({{0, 0, 0, tokens, kDraftTokens + 1}}), std::invalid_argument);
  CHECK_THROWS_AS(model.step({{0, 0, 0, {1, 2}, 2}}), std::invalid_argument);
  CHECK_THROWS_AS(model.step({{0, 0, 0, {1, 2}, -1}}), std::invalid_argument);
  model.step({{0, 0, 0, tokens, 4}});  // after four tokens, with four draft tokens
  for (const int begin : {3, 9}) CHECK_THROWS_AS(model.step({{0, 0, begin, {1}}}), std::invalid_argument);
  CHECK(model.step({{0, 0, 8, {token_at(0, 8)}}})[0] == expected[8]);
}
