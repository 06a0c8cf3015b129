#pragma once

#include <nanobind/nanobind.h>

namespace tidewheel {

// The classes of model/plan.h, which engine/devices/cpu/lowering.py makes.
void bind_plans(nanobind::module_& m);

}  // namespace tidewheel
