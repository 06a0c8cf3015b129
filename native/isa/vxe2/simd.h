// IBM Z with vector enhancements facility 2: the same vocabulary, whose conversions this level's compiler flags switch on.
#pragma once

#include "isa/vxe/simd.h"
