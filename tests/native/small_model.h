// A decoder of unlike layers with random weights, in an executor: projections, learned positions, biases, norms of both
// kinds in every place, residual blocks beside each other, and KV heads that groups cannot share alike.
#pragma once

#include <memory>

#include "cached.h"
#include "model/executor.h"
#include "tensors.h"

namespace tidewheel::test {

inline DecoderPlan small_plan() {
  DecoderPlan plan;
  plan.vocab_size = 150, plan.hidden_size = 96, plan.max_positions = 1024;
  plan.embedding = {64, 1024, 2, 0.5f, {}, {}};
  plan.final_norm = NormPlan{NormKind::kRms, 1e-5f};
  plan.head = {true, 2.0f, 40.0f};
  AttentionPlan attention;
  attention.num_heads = 6, attention.num_kv_heads = 3, attention.head_dim = 24, attention.scale = 0.2f;
  attention.qkv_bias = attention.out_bias = true;
  attention.qk_norm = NormPlan{NormKind::kRms, 1e-5f};
  attention.rope = RopePlan{{1.0f, 0.3f, 0.1f, 0.01f}};
  const NormPlan rms{NormKind::kRms, 1e-5f}, layer_norm{NormKind::kLayer, 1e-5f, true};
  plan.layers.push_back({{attention, rms, rms, {}}, {MlpPlan{104, Activation::kSilu, true, true}, rms, {}, {}, 0.5f}});
  AttentionPlan other;
  other.num_heads = 4, other.num_kv_heads = 1, other.head_dim = 40, other.scale = 0.2f;
  other.sliding_window = 600;
  other.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  other.sinks = true;
  const MlpPlan mlp{200, Activation::kGeluTanh};
  plan.layers.push_back({{other, {}, {}, layer_norm}, {mlp, {}, {}, layer_norm}});
  AttentionPlan beside = attention;
  beside.qk_norm_over = QkNormOver::kWhole;
  beside.rope->interleaved = true;
  plan.layers.push_back({{ParallelPlan{{{beside, {}, {}, {}}, {mlp, layer_norm, {}, {}}}}, rms, {}, {}}});
  return plan;
}

// Two KV splits. On an emulated processor, where each token takes long, the second one has few.
constexpr int kLongPrompt = kStride == 1 ? 700 : 560;

// A sequence whose first `common` tokens, whole blocks of them, are those of an earlier one, with its blocks.
struct Fork {
  int parent, common;
  int prompt;  // tokens
};

class SmallModel {
 public:
  Executor executor;

  SmallModel(const Kernels& kernels, const WeightFormat& format, CacheType type, const std::vector<std::vector<int>>& groups,
             bool with_weights = true)
      : executor(stored_as(small_plan(), format), kernels, type, {{kBlocks}, 4, 1024}, groups) {
    if (!with_weights) return;
    for (const auto& [name, shape] : tensor_shapes(small_plan())) add(name, shape);
    executor.set_weights(sources_);
    executor.check_complete();
  }

  // The logits after some more tokens of each sequence, `rounds` times. `counts` are of the tokens that a sequence gets
  // each time: of all in one step, or token by token in steps of their own.
  std::vector<float> run_forks(const std::vector<Fork>& forks, const std::vector<int>& counts, int rounds, bool together) {
    const int sequences = static_cast<int>(forks.size());
    std::vector<int32_t> tables(size_t(sequences) * kTable), ids(size_t(sequences) * kTable * kBlockTokens), context, out(sequences);
    const auto part = [&](int s, int begin, int end) {
      const auto first = ids.begin() + s * kTable * kBlockTokens;
      return std::vector<int32_t>(first + begin, first + end);
    };
    for (int s = 0; s < sequences; ++s) {
      const Fork& fork = forks[s];
      for (int b = 0; b < kTable; ++b) {
        tables[s * kTable + b] = b < fork.common / kBlockTokens ? tables[fork.parent * kTable + b] : kBlocks - 1 - s * kTable - b;
      }
      for (int t = 0; t < kTable * kBlockTokens; ++t) {
        int32_t* id = &ids[s * kTable * kBlockTokens + t];
        *id = t < fork.common ? ids[fork.parent * kTable * kBlockTokens + t] : (t * 31 + s * 7) % 150;
      }
      step(part(s, fork.common, fork.prompt), {0, fork.prompt - fork.common}, {fork.prompt}, &tables[s * kTable], false, out.data());
      context.push_back(fork.prompt);
    }
    std::vector<float> all;
    for (int round = 0; round < rounds; ++round) {
      std::vector<int32_t> tokens, start{0};
      for (int s = 0; s < sequences; ++s) {
        const auto more = part(s, context[s], context[s] + counts[s]);
        tokens.insert(tokens.end(), more.begin(), more.end());
        start.push_back(static_cast<int32_t>(tokens.size()));
        for (const int32_t id : more) {
          ++context[s];
          if (together) continue;
          const auto logits = step({id}, {0, 1}, {context[s]}, &tables[s * kTable], true, out.data());
          if (context[s] == forks[s].prompt + (round + 1) * counts[s]) all.insert(all.end(), logits.begin(), logits.end());
        }
      }
      if (!together) continue;
      const auto logits = step(tokens, start, context, tables.data(), true, out.data());
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

  // The logits of greedy decoding: prompts of `prompts` tokens, computed `chunk` at a time, then `count` more of all.
  // Half way the sequences move to copies of their blocks.
  std::vector<float> run(const std::vector<int>& prompts, int count, int chunk = 1024) {
    const int sequences = static_cast<int>(prompts.size());
    std::vector<int32_t> next(sequences, 7), table(size_t(sequences) * kTable), pairs;
    for (int i = 0; i < sequences * kTable; ++i) table[i] = sequences * kTable - 1 - i;  // backwards
    std::vector<float> all;
    for (int s = 0; s < sequences; ++s) {
      for (int begin = 0; begin < prompts[s]; begin += chunk) {
        const int end = std::min(begin + chunk, prompts[s]);
        std::vector<int32_t> tokens;
        for (int t = begin; t < end; ++t) tokens.push_back((t * 31 + s * 7) % 150);
        const auto logits = step(tokens, {0, end - begin}, {end}, table.data() + s * kTable, end == prompts[s], &next[s]);
        all.insert(all.end(), logits.begin(), logits.end());
      }
    }
    std::vector<int32_t> context = prompts, start(sequences + 1);
    for (int s = 0; s <= sequences; ++s) start[s] = s;
    for (int i = 0; i < count; ++i) {
      if (i == count / 2) {
        for (int32_t& block : table) {
          const int32_t copy = block + sequences * kTable;
          pairs.insert(pairs.end(), {block, copy});
          block = copy;
        }
        executor.copy_blocks(pairs);
      }
      for (int32_t& length : context) ++length;
      const std::vector<int32_t> tokens = next;
      const auto logits = step(tokens, start, context, table.data(), true, next.data());
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

 private:
  static constexpr int kTable = 48, kBlocks = 4 * kTable;  // blocks a sequence; two sequences and their copies

  void add(const std::string& name, const std::vector<int64_t>& shape) {
    const size_t count = shape[0] * (shape.size() > 1 ? shape[1] : 1);
    const auto& values = values_.emplace_back(
        std::make_unique<std::vector<float>>(random_.normals(count, shape.size() > 1 ? 0.2f : 1.0f)));
    sources_.push_back({name, values->data(), DType::kFloat32, shape,
                        shape.size() > 1 ? std::vector<int64_t>{shape[1], 1} : std::vector<int64_t>{1}});
  }

  // The logits after the last token of each sequence, if wanted, and the likeliest tokens.
  std::vector<float> step(const std::vector<int32_t>& tokens, const std::vector<int32_t>& start,
                          const std::vector<int32_t>& context, const int32_t* tables, bool want, int32_t* out) {
    std::vector<int32_t> positions, last;
    for (size_t s = 0; s < context.size(); ++s) {
      for (int t = start[s]; t < start[s + 1]; ++t) positions.push_back(context[s] - start[s + 1] + t);
      if (want) last.push_back(start[s + 1] - 1);
    }
    const size_t rows = last.size();
    const std::vector<float> zeros(rows), ones(rows, 1.0f);
    const std::vector<int32_t> none(rows + 1), no_logprobs(rows, -1);
    const std::vector<uint64_t> seeds(rows);
    std::vector<float> logits(rows * 150);
    const std::span<const int32_t> ints(none.data(), rows);
    Step step;
    step.token_ids = tokens, step.positions = positions, step.query_start = start, step.context_len = context;
    step.block_tables = {{tables, kTable}}, step.logits_rows = last, step.out_logits = logits.data();
    Sampling& s = step.sampling;
    s.temperature = zeros, s.top_p = ones, s.min_p = zeros, s.top_k = ints, s.seed = seeds, s.position = ints;
    s.repetition_penalty = ones, s.presence_penalty = zeros, s.frequency_penalty = zeros, s.num_logprobs = no_logprobs;
    s.history_start = none, s.bias_start = none, s.prompt_len = ints, s.out_tokens = {out, rows};
    executor.step(step);
    return logits;
  }

  Random random_;
  std::vector<std::unique_ptr<std::vector<float>>> values_;
  std::vector<Source> sources_;
};

}  // namespace tidewheel::test
