// Which kernel tables this processor can run.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// Best first; scalar is always the last.
std::vector<const Kernels*> available_kernels();

// Why a level is behind one with fewer instructions on this processor; empty if none is.
std::string kernels_note();

// Whether a cache line that is prefetched brings the next one along.
bool brings_line_pairs();

// The table of a level by name. "" or "auto" is the best one, unless TIDEWHEEL_ISA names another. Throws
// std::invalid_argument, which lists the levels that this processor has.
const Kernels& choose_kernels(const std::string& name);

}  // namespace tidewheel
