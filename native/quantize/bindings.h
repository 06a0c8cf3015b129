#pragma once

#include <nanobind/nanobind.h>

namespace tidewheel {

// `quantize`, which makes blocks of floats, and `search_grid` and `round_inputs`, which make codes of grids.
void bind_quantize(nanobind::module_& m);

}  // namespace tidewheel
