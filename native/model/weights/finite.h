// Whether the numbers of a checkpoint are finite. Once they are packed nothing would show it: a NaN that is quantized
// becomes some number.
#pragma once

#include "model/weights/source.h"

namespace tidewheel {

// Looks at rows of a tensor that holds floats, or at the scales of its blocks as far as `StoredBlocks::scales_at` says
// where they are. Reads them in the order of memory, so that whoever reads the rows next finds them in a cache.
bool are_finite(const Source& source, int row_begin, int row_end);

}  // namespace tidewheel
