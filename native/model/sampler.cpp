#include "model/sampler.h"

#include <algorithm>

#include "model/require.h"

namespace tidewheel {

Sampler::Sampler(const Kernels& kernels, int vocab_size, int workers)
    : kernels_(kernels), vocab_size_(vocab_size), padded_(round_up(vocab_size, 256)),
      stride_(padded_ * (2 * sizeof(float) + sizeof(int32_t)) +
              round_up(padded_ / 256 * (sizeof(double) + 2 * sizeof(float)), 64)),
      scratch_(stride_ * workers) {}

void Sampler::check(const Sampling& s, size_t rows) const {
  for (const size_t size : {s.temperature.size(), s.top_p.size(), s.min_p.size(), s.top_k.size(), s.seed.size(),
                            s.position.size(), s.repetition_penalty.size(), s.presence_penalty.size(),
                            s.frequency_penalty.size(), s.num_logprobs.size(), s.prompt_len.size()}) {
    require(size == rows, "every sampling array must have one entry a row");
  }
  require(s.out_tokens.size() >= rows, "token_ids has too few rows");
  const auto check_ragged = [rows](std::span<const int32_t> start, size_t values, const char* name) {
    const bool ok = start.size() == rows + 1 && start[0] == 0 && size_t(start[rows]) == values &&
                    std::is_sorted(start.begin(), start.end());
    if (!ok) fail(std::string(name) + "_start must ascend from 0 to the number of values");
  };
  check_ragged(s.history_start, s.history_ids.size(), "history");
  check_ragged(s.bias_start, s.bias_ids.size(), "bias");
  require(s.bias_values.size() == s.bias_ids.size(), "bias_values must have one entry for each of bias_ids");
  for (const auto ids : {s.history_ids, s.bias_ids}) {
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size_) fail("token id " + std::to_string(id) + " is outside the vocabulary");
    }
  }
  require(s.target.empty() || s.target.size() == rows, "target must have one entry a row");
  require(s.logprob_temperature.empty() || s.logprob_temperature.size() == rows,
          "logprob_temperature must have one entry a row");
  for (const int32_t id : s.target) {
    if (id < -1 || id >= vocab_size_) fail("token id " + std::to_string(id) + " is outside the vocabulary");
  }
  require(s.target.empty() || s.out_ranks.size() >= rows, "a row has a target but there is no room for ranks");
  for (const float temperature : s.logprob_temperature) {
    require(temperature > 0, "logprob_temperature must be above 0");
  }
  require(s.mask_index.empty() || s.mask_index.size() == rows, "the masks' index must have one entry a row");
  require(s.mask_index.empty() || s.mask_words * 32 >= size_t(vocab_size_), "a mask must have a bit for every token");
  for (const int32_t mask : s.mask_index) {
    require(mask >= -1 && mask < static_cast<int64_t>(s.num_masks), "the masks' index names a mask that does not exist");
  }
  for (size_t r = 0; r < rows; ++r) {
    const int history = s.history_start[r + 1] - s.history_start[r];
    require(s.prompt_len[r] >= 0 && (history == 0 || s.prompt_len[r] <= history), "prompt_len is longer than the history");
    require(s.num_logprobs[r] <= s.top_stride || s.num_logprobs[r] < 0, "num_logprobs is more than the output has room for");
    require(s.num_logprobs[r] < 0 || (s.out_logprobs.size() >= rows && s.out_top_ids.size() >= rows * s.top_stride &&
                                      s.out_top_logprobs.size() >= rows * s.top_stride),
            "a row asks for log-probabilities but there is no room for them");
    require(s.temperature[r] >= 0 && s.top_k[r] >= 0, "temperature and top_k must not be negative");
    require(!(s.min_p[r] > 1), "min_p must not be above 1");
  }
}

void Sampler::sample(const Sampling& s, size_t r, const float* logits, int worker) const {
  float* row = reinterpret_cast<float*>(scratch_.data() + worker * stride_);
  float* weights = row + padded_;
  int32_t* indices = reinterpret_cast<int32_t*>(weights + padded_);
  double* sums = reinterpret_cast<double*>(indices + padded_);
  float* maxima = reinterpret_cast<float*>(sums + padded_ / 256);
  const int history = s.history_start[r], bias = s.bias_start[r];
  const bool report = s.num_logprobs[r] >= 0;
  const int mask = s.mask_index.empty() ? -1 : s.mask_index[r];
  kernels_.sample({logits, vocab_size_, s.temperature[r], s.top_p[r], s.min_p[r], s.top_k[r], s.seed[r], s.position[r],
                   s.repetition_penalty[r], s.presence_penalty[r], s.frequency_penalty[r],
                   s.history_ids.data() + history, s.history_start[r + 1] - history, s.prompt_len[r],
                   s.bias_ids.data() + bias, s.bias_values.data() + bias, s.bias_start[r + 1] - bias,
                   mask < 0 ? nullptr : s.masks + mask * s.mask_words, s.target.empty() ? -1 : s.target[r],
                   s.num_logprobs[r], s.logprob_temperature.empty() ? 1.0f : s.logprob_temperature[r],
                   row, weights, sums, maxima, indices, &s.out_tokens[r], report ? &s.out_logprobs[r] : nullptr,
                   s.target.empty() ? nullptr : &s.out_ranks[r],
                   report ? s.out_top_ids.data() + r * s.top_stride : nullptr,
                   report ? s.out_top_logprobs.data() + r * s.top_stride : nullptr});
}

}  // namespace tidewheel
