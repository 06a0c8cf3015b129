// What each architecture's file in this folder defines.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tidewheel {

// The levels that this processor can run, best first, without scalar.
std::vector<const Kernels*> architecture_levels();

// Why a level ranks behind one with fewer instructions on this processor; empty if none does.
std::string architecture_note();

// Whether prefetching a cache line also brings the next one.
bool architecture_brings_line_pairs();

}  // namespace tidewheel
