// NEON with dot products of int8 quads: the same vector vocabulary. This level's compiler flags switch on these
// instructions.
#pragma once

#include "isa/neon/simd.h"
