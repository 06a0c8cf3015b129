// IBM Z with vector enhancements facility 2: the same vector vocabulary. This level's compiler flags switch on its
// conversions.
#pragma once

#include "isa/vxe/simd.h"
