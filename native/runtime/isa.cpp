#include "runtime/isa.h"

#include <cstdlib>
#include <stdexcept>

#include "runtime/levels/levels.h"

namespace tidewheel {

namespace scalar { extern const Kernels kKernels; }

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> levels = architecture_levels();
  levels.push_back(&scalar::kKernels);
  return levels;
}

std::string kernels_note() { return architecture_note(); }

bool brings_line_pairs() {
  static const bool brings = architecture_brings_line_pairs();
  return brings;
}

const Kernels& choose_kernels(const std::string& name) {
  std::string wanted = name;
  if (wanted.empty() || wanted == "auto") {
    const char* forced = std::getenv("TIDEWHEEL_ISA");
    wanted = forced ? forced : "";
  }
  const auto levels = available_kernels();
  if (wanted.empty() || wanted == "auto") return *levels.front();
  std::string names;
  for (const Kernels* level : levels) {
    if (wanted == level->name) return *level;
    names += (names.empty() ? "" : ", ") + std::string(level->name);
  }
  throw std::invalid_argument("ISA level '" + wanted + "' is not available on this processor; it has: " + names);
}

}  // namespace tidewheel
