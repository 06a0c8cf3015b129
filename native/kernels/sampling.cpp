// Logits to a token, bit for bit what tidewheel/engine/sampling.py computes; that file says what each step is and where
// it comes from. Compiled without contraction of a * b + c, because numpy does not contract.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/table.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kLaneCount = 16;
constexpr int kSumBlock = kLaneCount * kLaneCount;
constexpr int kNoToken = -1;
constexpr float kUnderflow = -87.0f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int padded(int vocab) { return (vocab + kSumBlock - 1) / kSumBlock * kSumBlock; }

TW_INLINE float exp_nonpositive(float x) {
  const float clamped = x > kUnderflow ? x : kUnderflow;
  const float rounder = 12582912.0f;
  const float n = (clamped * 1.44269504088896341f + rounder) - rounder;
  float r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  const float power = bits_float(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23);
  return x < kUnderflow ? 0.0f : p * power;
}

double log_positive(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.70710678118654752) {
    mantissa *= 2.0;
    exponent -= 1;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double series = 0.0;
  for (int k = 21; k > 0; k -= 2) series = series * square + 1.0 / k;
  return exponent * 0.69314718055994531 + (2.0 * s) * series;
}

double philox_uniform(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return static_cast<double>(((uint64_t{c1} << 32) | c0) >> 11) * 0x1p-53;
}

// Running totals over blocks of 256; returns the total. `weights` is zero-padded to whole blocks.
double block_sums(const float* weights, int vocab, double* sums) {
  double running = 0.0;
  for (int start = 0; start < vocab; start += kSumBlock) {
    double lanes[kLaneCount];
    for (int i = 0; i < kLaneCount; ++i) lanes[i] = weights[start + i];
    for (int row = 1; row < kLaneCount; ++row) {
      for (int i = 0; i < kLaneCount; ++i) lanes[i] = lanes[i] + weights[start + row * kLaneCount + i];
    }
    double total = lanes[0];
    for (int i = 1; i < kLaneCount; ++i) total = total + lanes[i];
    running = start == 0 ? total : running + total;
    sums[start / kSumBlock] = running;
  }
  return running;
}

// The lowest index of the largest value; -1 if a value is NaN.
int argmax(const float* x, int n) {
  float lanes[kLaneCount];
  for (float& lane : lanes) lane = kMinusInfinity;
  int bad = 0;
  int i = 0;
  for (; i + kLaneCount <= n; i += kLaneCount) {
    for (int j = 0; j < kLaneCount; ++j) {
      bad |= x[i + j] != x[i + j];
      lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    }
  }
  float best = kMinusInfinity;
  for (const float lane : lanes) best = lane > best ? lane : best;
  for (; i < n; ++i) {
    bad |= x[i] != x[i];
    best = x[i] > best ? x[i] : best;
  }
  if (bad) return -1;
  for (i = 0; i < n; ++i) {
    if (x[i] == best) return i;
  }
  return -1;
}

// Visits the indices of positive weights, largest weight first and ties to the lower index, until `visit` says stop.
// Sorts no more than it must: 64 at first, then eight times as many.
template <typename Visit>
void descend(const float* values, int32_t* indices, int count, Visit visit) {
  const auto before = [values](int32_t a, int32_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  };
  int sorted = 0;
  for (int step = 64; sorted < count; step *= 8) {
    const int end = std::min(count, sorted + step);
    if (end < count) std::nth_element(indices + sorted, indices + end, indices + count, before);
    std::sort(indices + sorted, indices + end, before);
    for (; sorted < end; ++sorted) {
      if (!visit(indices[sorted])) return;
    }
  }
}

int positive_indices(const float* weights, int vocab, int32_t* indices) {
  int count = 0;
  for (int i = 0; i < vocab; ++i) {
    indices[count] = i;
    count += weights[i] > 0.0f;
  }
  return count;
}

// The index list after a descent that kept a prefix of it: everything from `kept` on gets weight 0.
void zero_rest(float* weights, const int32_t* indices, int kept, int count) {
  for (int i = kept; i < count; ++i) weights[indices[i]] = 0.0f;
}

void keep(const SampleArgs& args) {
  float* weights = args.weights;
  if (args.min_p > 0.0f) {
    for (int i = 0; i < args.vocab; ++i) weights[i] = weights[i] < args.min_p ? 0.0f : weights[i];
  }
  if (args.top_k > 0 && args.top_k < args.vocab) {
    const int count = positive_indices(weights, args.vocab, args.indices);
    int kept = 0;
    descend(weights, args.indices, count, [&](int32_t) { return ++kept < args.top_k; });
    zero_rest(weights, args.indices, std::min(args.top_k, count), count);
  }
  if (args.top_p < 1.0f) {
    const double enough = static_cast<double>(args.top_p) * block_sums(weights, args.vocab, args.block_sums);
    const int count = positive_indices(weights, args.vocab, args.indices);
    double running = 0.0;
    int kept = 0;
    descend(weights, args.indices, count, [&](int32_t i) {
      running = kept ? running + weights[i] : static_cast<double>(weights[i]);
      ++kept;
      return running < enough;
    });
    zero_rest(weights, args.indices, kept, count);
  }
}

int draw(const SampleArgs& args, double uniform) {
  const int blocks = padded(args.vocab) / kSumBlock;
  const double total = block_sums(args.weights, args.vocab, args.block_sums);
  const double* sums = args.block_sums;
  const double target = uniform * total;
  const int last = static_cast<int>(std::lower_bound(sums, sums + blocks, total) - sums);
  const int block = std::min(static_cast<int>(std::upper_bound(sums, sums + blocks, target) - sums), last);
  double running = block ? sums[block - 1] : 0.0;
  int chosen = kNoToken;
  for (int i = block * kSumBlock; i < std::min(args.vocab, (block + 1) * kSumBlock); ++i) {
    running = running + args.weights[i];
    if (args.weights[i] > 0.0f) {
      chosen = i;
      if (running > target) break;
    }
  }
  return chosen;
}

void penalize(const SampleArgs& args) {
  // `weights` is free until the penalties are done: it counts how often each token was output.
  float* counts = args.weights;
  float* row = args.row;
  const auto once = [&](int begin, auto&& change) {
    for (int i = begin; i < args.history_len; ++i) counts[args.history[i]] = 0.0f;
    for (int i = begin; i < args.history_len; ++i) counts[args.history[i]] += 1.0f;
    for (int i = begin; i < args.history_len; ++i) {
      const int token = args.history[i];
      if (counts[token] > 0.0f) change(token, counts[token]);
      counts[token] = 0.0f;
    }
  };
  once(0, [&](int token, float) {
    row[token] = row[token] > 0.0f ? row[token] / args.repetition_penalty : row[token] * args.repetition_penalty;
  });
  once(args.prompt_len, [&](int token, float count) {
    const float frequency = args.frequency_penalty * count;
    row[token] = row[token] - frequency;
    row[token] = row[token] - args.presence_penalty;
  });
}

void soften(const float* logits, int vocab, float maximum, float* weights) {
  for (int i = 0; i < vocab; ++i) weights[i] = exp_nonpositive(logits[i] - maximum);
  for (int i = vocab; i < padded(vocab); ++i) weights[i] = 0.0f;
}

void report(const SampleArgs& args, float maximum) {
  soften(args.logits, args.vocab, maximum, args.weights);
  const double log_total = log_positive(block_sums(args.weights, args.vocab, args.block_sums));
  const auto normalized = [&](int i) {
    return static_cast<float>(static_cast<double>(args.logits[i]) - static_cast<double>(maximum) - log_total);
  };
  *args.logprob = normalized(*args.token);
  const int wanted = std::min(args.num_logprobs, args.vocab);
  if (wanted == 0) return;
  for (int i = 0; i < args.vocab; ++i) args.indices[i] = i;
  int found = 0;
  descend(args.logits, args.indices, args.vocab, [&](int32_t i) {
    args.top_ids[found] = i;
    args.top_logprobs[found] = normalized(i);
    return ++found < wanted;
  });
}

}  // namespace

void sample(const SampleArgs& args) {
  *args.token = kNoToken;
  const int raw_best = argmax(args.logits, args.vocab);
  if (raw_best < 0 || !std::isfinite(args.logits[raw_best])) return;
  int best = raw_best;
  const float* logits = args.logits;
  if (args.history_len || args.bias_len) {
    std::copy(args.logits, args.logits + args.vocab, args.row);
    logits = args.row;
    if (args.history_len) penalize(args);
    for (int i = 0; i < args.bias_len; ++i) {
      float& logit = args.row[args.bias_ids[i]];
      logit = logit + args.bias_values[i];
    }
    best = argmax(logits, args.vocab);
    if (best < 0 || !std::isfinite(logits[best])) return;
  }
  if (args.temperature == 0.0f) {
    *args.token = best;
  } else {
    const float temperature = args.temperature;
    for (int i = 0; i < args.vocab; ++i) args.row[i] = logits[i] / temperature;
    soften(args.row, args.vocab, args.row[best], args.weights);
    keep(args);
    *args.token = draw(args, philox_uniform(args.seed, static_cast<uint32_t>(args.position)));
  }
  if (args.num_logprobs >= 0) report(args, args.logits[raw_best]);
}

}  // namespace tidewheel::TW_ISA
