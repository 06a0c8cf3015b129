// Which kernel tables this processor can run.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// Best first; scalar is always the last.
std::vector<const Kernels*> available_kernels();

// Why a level ranks behind one with fewer instructions on this processor; empty if none does.
std::string kernels_note();

// Whether prefetching a cache line also brings the next one.
bool brings_line_pairs();

// The kernel table of a level, by name. "" or "auto" gives the best level, unless TIDEWHEEL_ISA names another. Throws
// std::invalid_argument, which lists the levels that this processor has.
const Kernels& choose_kernels(const std::string& name);

}  // namespace tidewheel
