// What each architecture's file in this folder defines.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// The levels that this processor can run, best first, without scalar.
std::vector<const Kernels*> architecture_levels();

}  // namespace tidewheel
