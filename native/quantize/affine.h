// The search of x = scale * q + offset, for codes from 0 to MAX.
#pragma once

#include "quantize/batch.h"

namespace tidewheel::TW_ISA {

// Where the codes of a start lie relative to the middle of the values, in steps: each start in turn has the next one.
constexpr float kShifts[] = {-0.35f, 0.0f, 0.35f};

struct Line {
  F scale, offset;
};

// Weighted sums over the codes that a line chooses.
struct LineSums {
  F q, qq, qx;
};

// Some lanes of a batch. With BELOW, an offset is not above 0.
template <int SIZE, int MAX, bool BELOW>
class LineLanes {
 public:
  template <typename B>
  LineLanes(const B& batch, int lane) : x_(batch.x[0].v + lane), w_(batch.w[0].v + lane) {
    F sum_w = zero(), sum_x = zero(), low = load(x_), high = low;
    for (int i = 0; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch), w = load(w_ + i * kBatch);
      low = min(x, low);
      high = max(x, high);
      sum_w = add(sum_w, w);
      sum_x = add(sum_x, mul(w, x));
    }
    sum_w_ = sum_w, sum_x_ = sum_x;
    inverse_w_ = inverse_or_zero(sum_w);
    low_ = BELOW ? min(low, zero()) : low;
    high_ = high;
  }

  // Tries several step sizes, and for each fits a line to the codes and chooses codes by that line in turn.
  Line search(const Starts& starts) const {
    const F span = mul(sub(high_, low_), set1(1.0f / MAX)), middle = mul(add(low_, high_), set1(0.5f));
    Line best{span, low_};
    F most = set1(-1.0f);
    for (int p = 0; p < starts.all(); ++p) {
      const F scale = mul(span, set1(starts.part(p)));
      Line line{scale, sub(middle, mul(scale, set1(0.5f * MAX + kShifts[p % 3])))};
      if (BELOW) line.offset = min(line.offset, zero());
      for (int r = 0; r < starts.rounds; ++r) {
        const LineSums sums = sums_of(line);
        line = fit(sums);
        const F gain = add(mul(line.scale, sums.qx), mul(line.offset, sum_x_));
        best.scale = select_less(most, gain, line.scale, best.scale);
        best.offset = select_less(most, gain, line.offset, best.offset);
        most = max(gain, most);
      }
    }
    return best;
  }

  LineSums sums_of(const Line& line) const {
    const F inverse = inverse_or_zero(line.scale);
    LineSums sums{zero(), zero(), zero()};
    for (int i = 0; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch), q = code(x, line.offset, inverse);
      const F weighted = mul(load(w_ + i * kBatch), q);
      sums.q = add(sums.q, weighted);
      sums.qq = add(sums.qq, mul(weighted, q));
      sums.qx = add(sums.qx, mul(weighted, x));
    }
    return sums;
  }

  // The line with the least sum of squares for those codes.
  Line fit(const LineSums& sums) const {
    const F determinant = sub(mul(sum_w_, sums.qq), mul(sums.q, sums.q));
    // Codes that are all alike leave only what rounding makes of 0.
    const F inverse = select_less(determinant, mul(mul(sum_w_, sums.qq), set1(4e-6f)), zero(), inverse_or_zero(determinant));
    Line line;
    line.scale = mul(sub(mul(sum_w_, sums.qx), mul(sums.q, sum_x_)), inverse);
    line.offset = offset_for(line.scale, sums);
    if (BELOW) {
      const F through_zero = mul(sums.qx, inverse_or_zero(sums.qq));
      line.scale = select_less(zero(), line.offset, through_zero, line.scale);
      line.offset = min(line.offset, zero());
    }
    line.scale = max(line.scale, zero());
    return line;
  }

  F offset_for(F scale, const LineSums& sums) const { return mul(sub(sum_x_, mul(scale, sums.q)), inverse_w_); }

  F error_of(const Line& line) const {
    const F inverse = inverse_or_zero(line.scale);
    F error = zero();
    for (int i = 0; i < SIZE; ++i) {
      const F x = load(x_ + i * kBatch), q = code(x, line.offset, inverse);
      const F rest = sub(sub(x, line.offset), mul(line.scale, q));
      error = add(error, mul(load(w_ + i * kBatch), mul(rest, rest)));
    }
    return error;
  }

  template <typename B>
  void put_codes(const Line& line, B& batch, int lane) const {
    const F inverse = inverse_or_zero(line.scale);
    for (int i = 0; i < SIZE; ++i) store(batch.q[i].v + lane, code(load(x_ + i * kBatch), line.offset, inverse));
  }

  F sum_w() const { return sum_w_; }
  F sum_x() const { return sum_x_; }

 private:
  [[gnu::always_inline]] static F code(F x, F offset, F inverse) {
    return round(clamp(mul(sub(x, offset), inverse), 0.0f, MAX));
  }

  const float *x_, *w_;
  F sum_w_, sum_x_, inverse_w_, low_, high_;
};

}  // namespace tidewheel::TW_ISA
