// Samples a token from logits, bit for bit as engine/devices/sampling.py does. That file explains each step and names
// its source. Compiled without contraction of a * b + c, because numpy does not contract either.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/table.h"
#include "simd.h"

namespace tidewheel::TW_ISA {
namespace {

constexpr int kSumLanes = 16;
constexpr int kBlock = kSumLanes * kSumLanes;
constexpr int kNoToken = -1;
constexpr float kUnderflow = -87.0f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// If two exponents differ by more than this, rounding cannot change the order of their powers.
constexpr float kExponentMargin = 1e-4f;

int block_count(int vocab) { return (vocab + kBlock - 1) / kBlock; }

// Logits in blocks of 256. The last block is filled up with -inf.
class Row {
 public:
  Row(const float* logits, int vocab) : logits_(logits), vocab_(vocab) {
    const int whole = vocab / kBlock * kBlock;
    std::fill(std::copy(logits + whole, logits + vocab, tail_), tail_ + kBlock, kMinusInfinity);
  }

  int blocks() const { return block_count(vocab_); }
  int block_size(int b) const { return std::min(kBlock, vocab_ - b * kBlock); }
  const float* block(int b) const { return b < vocab_ / kBlock ? logits_ + b * kBlock : tail_; }
  float operator[](int i) const { return logits_[i]; }

 private:
  const float* logits_;
  int vocab_;
  float tail_[kBlock];
};

TW_INLINE F exp_nonpositive(F x) {
  const F clamped = keep_if(x, x, set1(kUnderflow));
  const F n = round(mul(clamped, set1(1.44269504088896341f)));
  F r = sub(clamped, mul(n, set1(0.693359375f)));
  r = sub(r, mul(n, set1(-2.12194440e-4f)));
  F p = set1(1.9875691500e-4f);
  p = add(mul(p, r), set1(1.3981999507e-3f));
  p = add(mul(p, r), set1(8.3334519073e-3f));
  p = add(mul(p, r), set1(4.1665795894e-2f));
  p = add(mul(p, r), set1(1.6666665459e-1f));
  p = add(mul(p, r), set1(5.0000001201e-1f));
  p = add(mul(p, mul(r, r)), r);
  p = add(p, set1(1.0f));
  return keep_if(mul(p, pow2(n)), x, set1(kUnderflow));
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

// Computes e^((x - maximum) / temperature) for a block.
void soften(const float* x, float temperature, float maximum, float* weights) {
  if (temperature == 1.0f) {
    for (int i = 0; i < kBlock; i += kLanes) store(weights + i, exp_nonpositive(sub(load(x + i), set1(maximum))));
  } else {
    for (int i = 0; i < kBlock; i += kLanes) {
      store(weights + i, exp_nonpositive(div(sub(load(x + i), set1(maximum)), set1(temperature))));
    }
  }
}

double block_sum(const float* weights) {
  double lanes[kSumLanes];
  for (int i = 0; i < kSumLanes; ++i) lanes[i] = weights[i];
  for (int row = 1; row < kSumLanes; ++row) {
    for (int i = 0; i < kSumLanes; ++i) lanes[i] = lanes[i] + weights[row * kSumLanes + i];
  }
  double total = lanes[0];
  for (int i = 1; i < kSumLanes; ++i) total = total + lanes[i];
  return total;
}

// Returns the lowest index of the largest value, and writes the largest value of every block. Returns kNoToken if the
// largest value is infinite, or any value is NaN.
int scan(const Row& row, float* maxima) {
  uint32_t nan = 0;
  float best = kMinusInfinity;
  int best_block = 0;
  for (int b = 0; b < row.blocks(); ++b) {
    const float* x = row.block(b);
    F even = set1(kMinusInfinity), odd = even;
    for (int i = 0; i < kBlock; i += 2 * kLanes) {
      const F x0 = load(x + i), x1 = load(x + i + kLanes);
      nan |= unordered(x0, x1);
      even = max(even, x0);
      odd = max(odd, x1);
    }
    maxima[b] = hmax(max(even, odd));
    if (maxima[b] > best) {
      best = maxima[b];
      best_block = b;
    }
  }
  if (nan || !std::isfinite(best)) return kNoToken;
  int i = 0;
  while (row.block(best_block)[i] != best) ++i;
  return best_block * kBlock + i;
}

// A value such that at least `count` values are equal to it or larger.
float floor_of_largest(const float* maxima, int blocks, int count, float* scratch) {
  if (count > blocks) return kMinusInfinity;
  std::copy(maxima, maxima + blocks, scratch);
  std::nth_element(scratch, scratch + count - 1, scratch + blocks, [](float a, float b) { return a > b; });
  return scratch[count - 1];
}

// A weight's share in top-p, in whole multiples of 2^-40, so that the sum does not depend on the order.
TW_INLINE int64_t mass(float weight) {
  const double shifted = static_cast<double>(weight) * 0x1p40 + 0x1p52;  // rounds to an integer, in the low bits
  int64_t bits;
  std::memcpy(&bits, &shifted, 8);
  return bits - (int64_t{0x433} << 52);
}

// The weights of the blocks that may hold a token to draw, one block after the other.
struct Candidates {
  const int32_t* ids;  // the blocks' numbers, ascending
  int blocks;
  float* weights;
  float* scratch;      // as large as weights
  int size() const { return blocks * kBlock; }
};

// Keeps the largest weights and sets all others to 0. It keeps as many as are needed for the sum of their `measure` to
// reach `target`; among equal weights, those with the lower index first. None of the kept weights is below `floor`. The
// largest weight is 1.
template <typename Measure>
void keep_largest(const Candidates& all, float floor, int64_t target, Measure measure) {
  constexpr int kBuckets = 1024;
  float* values = all.scratch;
  int count = 0;
  for (int i = 0; i < all.size(); i += kLanes) {
    count += compress(values + count, load(all.weights + i), set1(floor), set1(1.0f));
  }
  // Positive floats have the same order as their bits. Narrow the range down to the smallest weight that is kept.
  uint32_t low, high;
  for (;;) {
    low = ~0u;
    high = 0;
    for (int i = 0; i < count; ++i) {
      low = std::min(low, float_bits(values[i]));
      high = std::max(high, float_bits(values[i]));
    }
    if (low == high) break;
    int shift = 0;
    while ((high - low) >> shift >= kBuckets) ++shift;
    int64_t sums[kBuckets] = {};
    for (int i = 0; i < count; ++i) sums[(float_bits(values[i]) - low) >> shift] += measure(values[i]);
    int bucket = kBuckets - 1;
    for (; bucket > 0 && sums[bucket] < target; --bucket) target -= sums[bucket];
    if (sums[bucket] < target) return;
    low += static_cast<uint32_t>(bucket) << shift;
    high = std::min(high, low + (1u << shift) - 1);
    const int end = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(values + count, values + end, 0.0f);  // otherwise values of the previous round would count again
    int left = 0;
    for (int i = 0; i < end; i += kLanes) {
      left += compress(values + left, load(values + i), set1(bits_float(low)), set1(bits_float(high)));
    }
    count = left;
  }
  const float smallest = values[0];
  const int64_t each = measure(smallest);
  int64_t ties = (target + each - 1) / each;
  for (int i = 0; i < all.size(); i += kLanes) {
    const F weights = load(all.weights + i);
    store(all.weights + i, keep_if(weights, weights, set1(smallest)));
  }
  if (ties >= count) return;
  int end = 0;
  for (;; end += kBlock) {
    int found = 0;
    for (int i = 0; i < kBlock; ++i) found += all.weights[end + i] == smallest;
    if (found >= ties) break;
    ties -= found;
  }
  while (ties > 0) ties -= all.weights[end++] == smallest;
  for (; end < all.size(); ++end) all.weights[end] = all.weights[end] == smallest ? 0.0f : all.weights[end];
}

void filter(const SampleArgs& args, const Candidates& all, float bound) {
  float* weights = all.weights;
  if (args.min_p > 0.0f) {
    for (int i = 0; i < all.size(); i += kLanes) {
      const F weight = load(weights + i);
      store(weights + i, keep_if(weight, weight, set1(args.min_p)));
    }
  }
  if (args.top_k > 0 && args.top_k < args.vocab) {
    float floor[kLanes];
    store(floor, exp_nonpositive(set1(bound)));
    keep_largest(all, 0.999f * floor[0], args.top_k, [](float) { return int64_t{1}; });
  }
  if (args.top_p < 1.0f) {
    int64_t total = 0;
    for (int i = 0; i < all.size(); ++i) total += mass(weights[i]);
    const double top_p = args.top_p;
    const int64_t enough = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total)));
    // All weights below this one add up to at most half of what may be left out.
    const double floor = (1.0 - top_p) * static_cast<double>(total) * 0x1p-40 / (4.0 * args.vocab);
    keep_largest(all, static_cast<float>(floor), std::max<int64_t>(enough, 1), mass);
  }
}

int draw(const Candidates& all, double* sums, double uniform) {
  double running = 0.0;
  for (int b = 0; b < all.blocks; ++b) {
    running = running + block_sum(all.weights + b * kBlock);
    sums[b] = running;
  }
  const double total = running, target = uniform * total;
  double* const end = sums + all.blocks;
  const int last = static_cast<int>(std::lower_bound(sums, end, total) - sums);
  const int block = std::min(static_cast<int>(std::upper_bound(sums, end, target) - sums), last);
  running = block ? sums[block - 1] : 0.0;
  int chosen = kNoToken;
  const float* weights = all.weights + block * kBlock;
  for (int i = 0; i < kBlock; ++i) {
    running = running + weights[i];
    if (weights[i] > 0.0f) {
      chosen = all.ids[block] * kBlock + i;
      if (running > target) break;
    }
  }
  return chosen;
}

int pick(const SampleArgs& args, const Row& row, int best, const float* maxima) {
  const float maximum = row[best], temperature = args.temperature;
  // Exponents below the bound belong to tokens that a filter removes anyway.
  float bound = kUnderflow;
  if (args.min_p > 0.0f) bound = std::max(bound, static_cast<float>(log_positive(args.min_p)) - kExponentMargin);
  if (args.top_k > 0) {
    const float floor = floor_of_largest(maxima, row.blocks(), args.top_k, args.weights);
    bound = std::max(bound, (floor - maximum) / temperature - kExponentMargin);
  }
  Candidates all = {args.indices, 0, args.weights, args.row};
  for (int b = 0; b < row.blocks(); ++b) {
    if ((maxima[b] - maximum) / temperature < bound) continue;
    args.indices[all.blocks] = b;
    soften(row.block(b), temperature, maximum, args.weights + all.size());
    ++all.blocks;
  }
  filter(args, all, bound);
  return draw(all, args.block_sums, philox_uniform(args.seed, static_cast<uint32_t>(args.position)));
}

// Keeps the allowed tokens' logits, and sets the others to -inf.
void apply_mask(const SampleArgs& args) {
  const F forbidden = set1(kMinusInfinity);
  const int whole = args.vocab / 32;
  for (int word = 0; word < whole; ++word) {
    const float* logits = args.logits + word * 32;
    float* row = args.row + word * 32;
    for (int i = 0; i < 32; i += kLanes) store(row + i, choose(args.mask[word] >> i, load(logits + i), forbidden));
  }
  for (int i = whole * 32; i < args.vocab; ++i) {
    args.row[i] = args.mask[whole] >> (i % 32) & 1u ? args.logits[i] : kMinusInfinity;
  }
}

void penalize(const SampleArgs& args) {
  // `weights` is unused until the penalties are applied. Here it counts how often each token was output.
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

// Finds the indices of the `wanted` largest values, in descending order, ties by lower index.
void find_largest(const Row& row, const float* maxima, int wanted, float* scratch, int32_t* indices) {
  const float floor = floor_of_largest(maxima, row.blocks(), wanted, scratch);
  int count = 0, ties = 0;
  for (int b = 0; b < row.blocks(); ++b) {
    if (maxima[b] < floor || (maxima[b] == floor && ties >= wanted)) continue;
    const float* x = row.block(b);
    for (int i = 0; i < row.block_size(b); ++i) {
      if (x[i] > floor || (x[i] == floor && ties++ < wanted)) indices[count++] = b * kBlock + i;
    }
  }
  std::partial_sort(indices, indices + wanted, indices + count,
                    [&](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
}

// How many values are larger than this one.
int count_larger(const Row& row, const float* maxima, float value) {
  int count = 0;
  for (int b = 0; b < row.blocks(); ++b) {
    if (maxima[b] <= value) continue;
    const float* x = row.block(b);
    for (int i = 0; i < kBlock; ++i) count += x[i] > value;
  }
  return count;
}

void report(const SampleArgs& args, const Row& row, int best, const float* maxima) {
  const float temperature = args.logprob_temperature;
  const double maximum = row[best];
  double total = 0.0;
  for (int b = 0; b < row.blocks(); ++b) {
    if ((maxima[b] - row[best]) / temperature < kUnderflow) continue;
    soften(row.block(b), temperature, row[best], args.weights);
    total = total + block_sum(args.weights);
  }
  const double log_total = log_positive(total);
  const auto normalized = [&](int i) {
    return static_cast<float>((static_cast<double>(row[i]) - maximum) / temperature - log_total);
  };
  *args.logprob = normalized(*args.token);
  if (args.target >= 0) *args.rank = 1 + count_larger(row, maxima, row[args.target]);
  const int wanted = std::min(args.num_logprobs, args.vocab);
  if (wanted == 0) return;
  find_largest(row, maxima, wanted, args.weights, args.indices);
  for (int i = 0; i < wanted; ++i) {
    args.top_ids[i] = args.indices[i];
    args.top_logprobs[i] = normalized(args.indices[i]);
  }
}

}  // namespace

void sample(const SampleArgs& args) {
  *args.token = kNoToken;
  const Row raw(args.logits, args.vocab);
  const int raw_best = scan(raw, args.maxima);
  if (raw_best == kNoToken) return;
  if (args.target >= 0) {
    *args.token = args.target;
  } else if (args.mask || args.history_len || args.bias_len) {
    if (args.mask) {
      apply_mask(args);
    } else {
      std::copy(args.logits, args.logits + args.vocab, args.row);
    }
    if (args.history_len) penalize(args);
    for (int i = 0; i < args.bias_len; ++i) {
      float& logit = args.row[args.bias_ids[i]];
      logit = logit + args.bias_values[i];
    }
    const Row changed(args.row, args.vocab);
    float* maxima = args.maxima + raw.blocks();
    const int best = scan(changed, maxima);
    if (best == kNoToken) return;
    *args.token = args.temperature == 0.0f ? best : pick(args, changed, best, maxima);
  } else {
    *args.token = args.temperature == 0.0f ? raw_best : pick(args, raw, raw_best, args.maxima);
  }
  if (args.num_logprobs >= 0) report(args, raw, raw_best, args.maxima);
}

}  // namespace tidewheel::TW_ISA
