// Architectures without levels of their own run the scalar kernels.
#include "runtime/levels/levels.h"

namespace tidewheel {

std::vector<const Kernels*> architecture_levels() { return {}; }

std::string architecture_note() { return {}; }

bool architecture_brings_line_pairs() { return false; }

}  // namespace tidewheel
