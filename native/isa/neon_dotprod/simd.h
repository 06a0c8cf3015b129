// NEON with dot products of int8 quads: the same vocabulary, whose integers this level's compiler flags switch on.
#pragma once

#include "isa/neon/simd.h"
