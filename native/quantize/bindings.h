#pragma once

#include <nanobind/nanobind.h>

namespace tidewheel {

// `quantize`, which makes blocks of floats.
void bind_quantize(nanobind::module_& m);

}  // namespace tidewheel
