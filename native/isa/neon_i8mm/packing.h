#pragma once

#include "isa/neon/packing.h"
