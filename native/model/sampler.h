// Picks the tokens of a step's rows from their logits.
#pragma once

#include <span>
#include <string>

#include "kernels/kernels.h"
#include "runtime/arena.h"

namespace tidewheel {

// The arrays of engine/devices/batch.py's SamplingBatch, with one entry per row, and the arrays for results.
struct Sampling {
  std::span<const float> temperature, top_p, min_p;
  std::span<const int32_t> top_k;
  std::span<const uint64_t> seed;
  std::span<const int32_t> position;
  std::span<const float> repetition_penalty, presence_penalty, frequency_penalty;
  std::span<const int32_t> num_logprobs, history_start, history_ids, prompt_len, bias_start, bias_ids;
  std::span<const float> bias_values;
  std::span<const int32_t> target;             // [R], or empty if every row samples
  std::span<const float> logprob_temperature;  // [R], or empty if it is 1 for all
  std::span<const int32_t> mask_index;         // [R], row of `masks` or -1; empty if no row has a mask
  const uint32_t* masks = nullptr;             // [num_masks, mask_words]
  size_t num_masks = 0, mask_words = 0;
  std::span<int32_t> out_tokens;
  std::span<float> out_logprobs;        // [R], or empty if no row requests them
  std::span<int32_t> out_ranks;         // [R], or empty if no row has a target
  std::span<int32_t> out_top_ids;       // [R, top_stride], or empty if no row requests them
  std::span<float> out_top_logprobs;
  int top_stride = 0;
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab_size, int workers);

  // Throws std::invalid_argument if an array does not fit the vocabulary or the others.
  void check(const Sampling& sampling, size_t rows) const;

  // `worker` selects the scratch memory: concurrent calls must not share it.
  void sample(const Sampling& sampling, size_t row, const float* logits, int worker) const;

 private:
  const Kernels& kernels_;
  const int vocab_size_;
  const size_t padded_, stride_;
  Arena scratch_;
};

}  // namespace tidewheel
