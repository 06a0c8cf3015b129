#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace tidewheel {

// A copy of a table of 256 numbers that lives as long as the process: the same one for equal tables. A checkpoint has one table
// for all its matrices. Throws std::invalid_argument if it has another size.
const float* kept_scale_table(const std::vector<float>& table);

// The classes of model/plan.h, which engine/devices/cpu/lowering.py makes.
void bind_plans(nanobind::module_& m);

}  // namespace tidewheel
