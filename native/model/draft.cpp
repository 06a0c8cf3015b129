#include "model/draft.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/require.h"

namespace tidewheel {

namespace {

template <typename T>
std::vector<T> gathered(std::span<const T> values, std::span<const int> rows) {
  std::vector<T> result(rows.size());
  std::transform(rows.begin(), rows.end(), result.begin(), [&](int row) { return values[row]; });
  return result;
}

// The sampling parameters of some rows of another Sampling, advanced by the draft tokens that each row has so far.
// Masks depend on the tokens before, so they are used only for the first draft token. Reports are left out, except for
// the tokens' log-probabilities if they are wanted.
class DraftedRows {
 public:
  // `drafted` [rows of `from`][offset]: the draft tokens so far.
  DraftedRows(const Sampling& from, std::span<const int> rows, const std::vector<std::vector<int32_t>>& drafted, int offset,
              bool with_logprobs)
      : temperature_(gathered(from.temperature, rows)), top_p_(gathered(from.top_p, rows)),
        min_p_(gathered(from.min_p, rows)), repetition_(gathered(from.repetition_penalty, rows)),
        presence_(gathered(from.presence_penalty, rows)), frequency_(gathered(from.frequency_penalty, rows)),
        top_k_(gathered(from.top_k, rows)), position_(gathered(from.position, rows)),
        prompt_len_(gathered(from.prompt_len, rows)),
        num_logprobs_(rows.size(), with_logprobs ? 0 : -1), history_start_(1), bias_start_(1),
        seed_(gathered(from.seed, rows)), tokens_(rows.size()), logprobs_(rows.size()), masks_(from.masks),
        num_masks_(from.num_masks), mask_words_(from.mask_words) {
    if (offset == 0 && !from.mask_index.empty()) mask_index_ = gathered(from.mask_index, rows);
    for (int32_t& position : position_) position += offset;
    for (const int row : rows) {
      const int begin = from.bias_start[row], count = from.bias_start[row + 1] - begin;
      const auto ids = from.bias_ids.subspan(begin, count);
      const auto values = from.bias_values.subspan(begin, count);
      bias_ids_.insert(bias_ids_.end(), ids.begin(), ids.end());
      bias_values_.insert(bias_values_.end(), values.begin(), values.end());
      bias_start_.push_back(static_cast<int32_t>(bias_ids_.size()));
      if (const int history = from.history_start[row + 1] - from.history_start[row]; history > 0) {
        const auto before = from.history_ids.subspan(from.history_start[row], history);
        history_ids_.insert(history_ids_.end(), before.begin(), before.end());
        history_ids_.insert(history_ids_.end(), drafted[row].begin(), drafted[row].end());
      }
      history_start_.push_back(static_cast<int32_t>(history_ids_.size()));
    }
  }

  Sampling sampling() {
    Sampling s;
    s.temperature = temperature_, s.top_p = top_p_, s.min_p = min_p_, s.top_k = top_k_;
    s.seed = seed_, s.position = position_, s.num_logprobs = num_logprobs_;
    s.repetition_penalty = repetition_, s.presence_penalty = presence_, s.frequency_penalty = frequency_;
    s.history_start = history_start_, s.history_ids = history_ids_, s.prompt_len = prompt_len_;
    s.bias_start = bias_start_, s.bias_ids = bias_ids_, s.bias_values = bias_values_;
    s.out_tokens = tokens_, s.out_logprobs = logprobs_;
    s.mask_index = mask_index_, s.masks = masks_, s.num_masks = num_masks_, s.mask_words = mask_words_;
    return s;
  }
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const float> logprobs() const { return logprobs_; }

 private:
  std::vector<float> temperature_, top_p_, min_p_, repetition_, presence_, frequency_;
  std::vector<int32_t> top_k_, position_, prompt_len_, num_logprobs_, history_start_, history_ids_, bias_start_, bias_ids_;
  std::vector<float> bias_values_;
  std::vector<uint64_t> seed_;
  std::vector<int32_t> tokens_;
  std::vector<float> logprobs_;
  std::vector<int32_t> mask_index_;
  const uint32_t* masks_;
  size_t num_masks_, mask_words_;
};

void check(const Executor& executor, const Step& known, const DraftTokens& wanted) {
  const size_t sequences = known.context_len.size();
  require(wanted.counts.size() == sequences, "every sequence needs a number of draft tokens");
  require(known.query_start.size() == sequences + 1, "query_start must have one entry more than context_len");
  require(known.block_tables.size() == 1 && known.state_slots.empty(), "draft tokens need one cache group, and no recurrent layers");
  if (executor.predicts()) {
    require(known.token_ids.size() == sequences && known.positions.size() == sequences &&
                known.query_start[sequences] == static_cast<int>(sequences),
            "a layer that predicts takes one token of each sequence");
    require(known.adapters.empty() || known.adapters.size() == sequences, "every sequence needs the number of an adapter, or -1");
    for (size_t s = 0; s < sequences; ++s) {
      require(known.query_start[s] == static_cast<int>(s) && known.positions[s] == known.context_len[s] - 1 && known.positions[s] >= 0,
              "a layer that predicts takes one token of each sequence");
    }
  } else {
    require(known.adapters.empty(), "a draft model has no adapters");
  }
  require(wanted.tokens.size() >= sequences * wanted.stride, "there is no room for the draft tokens");
  size_t row = 0;
  for (size_t s = 0; s < sequences; ++s) {
    require(wanted.counts[s] >= 0 && size_t(wanted.counts[s]) <= wanted.stride, "there is no room for the draft tokens");
    if (wanted.counts[s] == 0) continue;
    require(row < known.logits_rows.size() && known.logits_rows[row] == known.query_start[s + 1] - 1,
            "the rows must be the last tokens of the sequences that want draft tokens");
    executor.check_room(known, static_cast<int>(s), known.context_len[s] + wanted.counts[s] - 1);
    ++row;
  }
  require(row == known.logits_rows.size(), "the rows must be the last tokens of the sequences that want draft tokens");
  const Sampling& sampling = known.sampling;
  for (const size_t size : {sampling.temperature.size(), sampling.top_p.size(), sampling.min_p.size(),
                            sampling.top_k.size(), sampling.position.size(), sampling.seed.size(),
                            sampling.repetition_penalty.size(), sampling.presence_penalty.size(),
                            sampling.frequency_penalty.size(), sampling.prompt_len.size()}) {
    require(size == row, "every sampling array must have one entry a row");
  }
  require(sampling.mask_index.empty() || sampling.mask_index.size() == row, "the masks' index must have one entry a row");
  const auto is_ragged = [row](std::span<const int32_t> start, size_t values) {
    return start.size() == row + 1 && start[0] == 0 && std::is_sorted(start.begin(), start.end()) && size_t(start[row]) == values;
  };
  require(is_ragged(sampling.bias_start, sampling.bias_ids.size()) && sampling.bias_values.size() == sampling.bias_ids.size(),
          "bias_start must ascend from 0 to the number of values");
  require(is_ragged(sampling.history_start, sampling.history_ids.size()),
          "history_start must ascend from 0 to the number of values");
}

// Makes steps with one token for each of some sequences of another step.
class OneEach {
 public:
  explicit OneEach(const Step& known) : known_(known), stride_(static_cast<size_t>(known.block_tables[0].stride)) {}

  // A step with `token_ids`, `offset` positions after the last known tokens. Every token wants logits.
  Step step(std::span<const int> sequences, std::vector<int32_t> token_ids, int offset) {
    const size_t count = sequences.size();
    token_ids_ = std::move(token_ids);
    positions_.resize(count), context_len_.resize(count), query_start_.resize(count + 1), tables_.resize(count * stride_);
    adapters_.clear();
    for (size_t j = 0; j < count; ++j) {
      const int s = sequences[j];
      positions_[j] = known_.context_len[s] - 1 + offset;
      context_len_[j] = positions_[j] + 1;
      query_start_[j + 1] = static_cast<int32_t>(j + 1);
      std::copy_n(known_.block_tables[0].of(s), (context_len_[j] + kBlockTokens - 1) / kBlockTokens,
                  tables_.begin() + j * stride_);
      if (!known_.adapters.empty()) adapters_.push_back(known_.adapters[s]);
    }
    last_.assign(query_start_.begin(), query_start_.end() - 1);
    const size_t axes = known_.rope_positions.size() / std::max<size_t>(known_.token_ids.size(), 1);
    rope_positions_.resize(axes * count);
    for (size_t axis = 0; axis < axes; ++axis) {
      for (size_t j = 0; j < count; ++j) {
        const int last = known_.query_start[sequences[j] + 1] - 1;
        rope_positions_[axis * count + j] = known_.rope_positions[axis * known_.token_ids.size() + last] + offset;
      }
    }
    Step step = known_;
    step.token_ids = token_ids_, step.positions = positions_, step.query_start = query_start_;
    step.context_len = context_len_, step.logits_rows = last_, step.adapters = adapters_;
    step.rope_positions = rope_positions_, step.visible_until = {};
    step.media_rows = {}, step.media_width = 0, step.media_index = {}, step.media_layers = {};
    step.block_tables[0] = {tables_.data(), static_cast<int64_t>(stride_)};
    return step;
  }

 private:
  const Step& known_;
  const size_t stride_;
  std::vector<int32_t> token_ids_, positions_, query_start_, context_len_, tables_, last_, adapters_, rope_positions_;
};

}  // namespace

void draft(Executor& executor, const Step& known, const DraftTokens& wanted) {
  check(executor, known, wanted);
  std::fill(wanted.tokens.begin(), wanted.tokens.end(), -1);
  const float least = wanted.min_probability > 0 ? std::log(wanted.min_probability) : 0;
  const bool stops_early = wanted.min_probability > 0, predicts = executor.predicts();
  std::vector<int> sequences, rows;  // the sequences that get more draft tokens, and their rows in `known`
  std::vector<int32_t> token_ids;
  int num_rows = 0;
  for (size_t s = 0; s < wanted.counts.size(); ++s) {
    if (wanted.counts[s] == 0) continue;
    const int row = num_rows++, sequence = static_cast<int>(s);
    if (predicts && !executor.can_predict(known, sequence)) continue;
    rows.push_back(row), sequences.push_back(sequence);
    if (predicts) token_ids.push_back(known.token_ids[s]);
  }
  if (predicts && rows.empty()) return;
  std::vector<float> logprobs(num_rows);  // for each row of `known`, the sum over its draft tokens so far
  std::vector<std::vector<int32_t>> drafted(num_rows);
  OneEach next(known);
  Step step = predicts ? next.step(sequences, std::move(token_ids), 0) : known;
  std::vector<int> from;  // the last predictions' rows of the sequences that continue
  for (int i = 0;; ++i) {
    DraftedRows sampled(known.sampling, rows, drafted, i, stops_early);
    step.sampling = sampled.sampling();
    if (predicts) {
      executor.predict(step, from);
    } else {
      executor.step(step);
    }
    std::vector<int> next_sequences, next_rows;
    token_ids.clear(), from.clear();
    for (size_t j = 0; j < rows.size(); ++j) {
      const int s = sequences[j], row = rows[j];
      const int32_t token = sampled.tokens()[j];
      if (token < 0) continue;  // no token is allowed there
      logprobs[row] += sampled.logprobs()[j];
      const bool is_unsure = stops_early && !(logprobs[row] >= least);
      // A randomly drawn token may be an unlikely one, but the same noise usually draws it in both models.
      if (is_unsure && known.sampling.temperature[row] == 0) continue;
      wanted.tokens[s * wanted.stride + i] = token;
      if (is_unsure || i + 1 >= wanted.counts[s]) continue;
      next_sequences.push_back(s), next_rows.push_back(row), token_ids.push_back(token);
      drafted[row].push_back(token);
      from.push_back(static_cast<int>(j));
    }
    if (next_rows.empty()) return;
    sequences = std::move(next_sequences), rows = std::move(next_rows);
    step = next.step(sequences, token_ids, i + 1);
  }
}

}  // namespace tidewheel
