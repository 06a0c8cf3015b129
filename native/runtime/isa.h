// Which kernel tables this processor can run.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// Best first; scalar is always the last.
std::vector<const Kernels*> available_kernels();

// By name; "" or "auto" is the best there is, unless TIDEWHEEL_ISA names another. Throws std::invalid_argument, naming
// the levels that this processor has.
const Kernels& choose_kernels(const std::string& name);

}  // namespace tidewheel
