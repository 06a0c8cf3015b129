// Memory that is multiplied next: it comes to the second-level cache meanwhile, a part with each step.
#pragma once

#include "kernels/layout.h"

namespace tidewheel::TW_ISA {

class Ahead {
 public:
  void bring(const char* from, size_t bytes) { from_ = from, bytes_ = bytes; }
  void begin(int steps) { lines_ = static_cast<int>((bytes_ / kLineBytes + steps - 1) / steps); }
  void step() {
    for (int i = 0; i < lines_; ++i) prefetch_later(from_ + i * kLineBytes);
    from_ += lines_ * kLineBytes;
  }

 private:
  const char* from_ = nullptr;
  size_t bytes_ = 0;
  int lines_ = 0;
};

}  // namespace tidewheel::TW_ISA
