// Helpers of the model files: refusing bad arguments, and rounding sizes up.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace tidewheel {

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

// The message is built only when it is needed, because these checks run at every step.
inline void require(bool ok, const char* message) {
  if (!ok) fail(message);
}

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace tidewheel
