#include "model/state_slots.h"

#include <algorithm>

namespace tidewheel {
namespace {

constexpr size_t kCacheLineFloats = 16;
constexpr int64_t kPieceFloats = 16384;  // of a copy

}  // namespace

size_t StateSlots::add(size_t floats) {
  const size_t offset = floats_;
  floats_ += (floats + kCacheLineFloats - 1) / kCacheLineFloats * kCacheLineFloats;
  return offset;
}

void StateSlots::allocate(int num_slots) { memory_ = Arena(num_slots * floats_ * sizeof(float)); }

void StateSlots::copy(Worker& worker, int from, int to) const {
  worker.share(static_cast<int64_t>(floats_), kPieceFloats, [&](int64_t begin, int64_t end) {
    std::copy(at(from, begin), at(from, end), at(to, begin));
  });
}

}  // namespace tidewheel
