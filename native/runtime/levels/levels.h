// What each architecture's file in this folder defines.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// The levels that this processor can run, best first, without scalar.
std::vector<const Kernels*> architecture_levels();

// Why a level is behind one with fewer instructions on this processor; empty if none is.
std::string architecture_note();

// Whether a cache line that is prefetched brings the next one along.
bool architecture_brings_line_pairs();

}  // namespace tidewheel
