// The search of x = scale * q.
#pragma once

#include "quantize/batch.h"

namespace tidewheel::TW_ISA {

// Codes are the whole numbers from LOW to HIGH.
template <int LOW, int HIGH>
struct Evenly {
  static constexpr float kLow = LOW, kHigh = HIGH;
  [[gnu::always_inline]] static F nearest(F y) { return round(clamp(y, kLow, kHigh)); }
};

// Codes stand for the numbers of a table, as IQ4_NL and IQ4_XS have it.
struct Unevenly {
  static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr float kLow = kValues[0], kHigh = kValues[15];
  [[gnu::always_inline]] static F nearest(F y) {
    F value = set1(kValues[15]);
    for (int i = 14; i >= 0; --i) value = select_less(y, set1((kValues[i] + kValues[i + 1]) / 2), set1(kValues[i]), value);
    return value;
  }
};

struct ScaleSums {
  F qq, qx;
};

// Some lanes of a batch.
template <int SIZE, typename Codes>
class ScaleLanes {
 public:
  template <typename B>
  ScaleLanes(const B& batch, int lane) : x_(batch.x[0].v + lane), w_(batch.w[0].v + lane) {
    F low = load(x_), high = low;
    for (int i = 1; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch);
      low = min(x, low);
      high = max(x, high);
    }
    low_ = low, high_ = high;
  }

  // The scale that just reaches the extremes: the longer side gets the code that is farther from 0.
  F whole_scale() const {
    const F opposite = sub(zero(), low_), longer = select_less(high_, opposite, low_, high_);
    return mul(longer, set1(1.0f / Codes::kLow));
  }

  // Tries several scales, and for each fits a scale to the codes and chooses codes by that in turn.
  F search(const Starts& starts) const {
    const F whole = whole_scale();
    F best = whole, most = set1(-1.0f);
    for (int p = 0; p < starts.all(); ++p) {
      F scale = mul(whole, set1(starts.part(p)));
      for (int r = 0; r < starts.rounds; ++r) {
        const ScaleSums sums = sums_of(scale);
        scale = mul(sums.qx, inverse_or_zero(sums.qq));
        const F gain = mul(scale, sums.qx);
        best = select_less(most, gain, scale, best);
        most = max(gain, most);
      }
    }
    return best;
  }

  // The same for a scale that is stored as binary16 itself.
  F search_half(const Starts& starts) const {
    const F whole = whole_scale();
    F best = half_of(whole), least = error_of(best);
    for (int p = 0; p < starts.all(); ++p) {
      F scale = mul(whole, set1(starts.part(p)));
      for (int r = 0; r < starts.rounds; ++r) {
        const ScaleSums sums = sums_of(scale);
        scale = half_of(mul(sums.qx, inverse_or_zero(sums.qq)));
        const F error = error_of(scale);
        best = select_less(error, least, scale, best);
        least = min(error, least);
      }
    }
    return best;
  }

  ScaleSums sums_of(F scale) const {
    const F inverse = inverse_or_zero(scale);
    ScaleSums sums{zero(), zero()};
    for (int i = 0; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch), q = Codes::nearest(mul(x, inverse));
      const F weighted = mul(load(w_ + i * kBatch), q);
      sums.qq = add(sums.qq, mul(weighted, q));
      sums.qx = add(sums.qx, mul(weighted, x));
    }
    return sums;
  }

  F error_of(F scale) const {
    const F inverse = inverse_or_zero(scale);
    F error = zero();
    for (int i = 0; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch), rest = sub(x, mul(scale, Codes::nearest(mul(x, inverse))));
      error = add(error, mul(load(w_ + i * kBatch), mul(rest, rest)));
    }
    return error;
  }

  template <typename B>
  void put_codes(F scale, B& batch, int lane) const {
    const F inverse = inverse_or_zero(scale);
    for (int i = 0; i < SIZE; ++i) store(batch.q[i].v + lane, Codes::nearest(mul(load(x_ + i * kBatch), inverse)));
  }

 private:
  const float *x_, *w_;
  F low_, high_;
};

}  // namespace tidewheel::TW_ISA
