// Packs a tensor's rows into a matrix.
#pragma once

#include "model/weights/linear.h"
#include "model/weights/source.h"

namespace tidewheel {

// The bytes needed for a panel's rows if they have to be copied before they are packed, because they have another byte
// order or another row order.
size_t room_for(const Source& source, int cols);

// Packs rows of a matrix [rows, cols] into a slice of `linear`, at most as many rows as a panel has.
void pack_rows(const Kernels& kernels, const Linear& linear, const Linear::Slice& slice, const Source& source,
               const Columns& columns, int rows, int row_begin, int row_end, char* room);

// Packs a panel of an unpacked matrix (Linear::Part) into `room`, which has `panel_room` bytes. The bits are the same
// as if the whole matrix were packed. Returns the panel.
const char* pack_panel(const Kernels& kernels, const Linear& linear, int panel, char* room);
size_t panel_room(const Kernels& kernels, const Linear& linear);

}  // namespace tidewheel
