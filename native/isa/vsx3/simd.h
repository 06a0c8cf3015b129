// POWER9: the same vector vocabulary. This level's compiler flags switch on its conversions of binary16 and its loads.
#pragma once

#include "isa/vsx/simd.h"
