// How long the phases of a step take, as worker 0 sees them: its computing time, and its wait for the others.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "runtime/thread_pool.h"

namespace tidewheel {

enum class Phase : int { kEmbed, kQkv, kRope, kAttention, kOut, kUp, kDown, kNorm, kHead, kSample, kConvolution,
  kRecurrence, kRoute, kCount };

constexpr const char* kPhaseNames[] = {"embed", "qkv", "rope", "attention", "out", "up", "down", "norm", "head", "sample",
                                       "convolution", "recurrence", "route"};

class Profile {
 public:
  struct Entry {
    int64_t calls = 0;
    double seconds = 0;
  };

  // Starts to record, from zero.
  void start() {
    entries_ = {};
    on_ = true;
  }
  void stop() { on_ = false; }
  const Entry& entry(Phase phase) const { return entries_[static_cast<int>(phase)]; }

  void begin(const Worker& worker) {
    if (on_ && worker.index() == 0) last_ = Clock::now();
  }
  // Adds the time since the last `end`, or since `begin`, to this phase.
  void end(const Worker& worker, Phase phase) {
    if (!on_ || worker.index() != 0) return;
    const Clock::time_point now = Clock::now();
    Entry& entry = entries_[static_cast<int>(phase)];
    entry.calls += 1;
    entry.seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool on_ = false;
  Clock::time_point last_;
  std::array<Entry, static_cast<int>(Phase::kCount)> entries_{};
};

}  // namespace tidewheel
