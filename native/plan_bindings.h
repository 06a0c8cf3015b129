#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace tidewheel {

// Returns a copy of a table of 256 numbers that lives as long as the process. Equal tables share one copy: a checkpoint
// has one table for all its matrices. Throws std::invalid_argument if the table has another size.
const float* kept_scale_table(const std::vector<float>& table);

// Binds the classes of model/plan.h, which engine/devices/cpu/lowering.py constructs.
void bind_plans(nanobind::module_& m);

}  // namespace tidewheel
