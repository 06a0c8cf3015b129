// The way of a tensor's rows into a packed matrix.
#pragma once

#include "model/weights/linear.h"
#include "model/weights/source.h"

namespace tidewheel {

// Bytes for the rows of a panel that have to be copied before they are packed: those in another byte order, or in an order of
// their own.
size_t room_for(const Source& source, int cols);

// Packs rows of a matrix [rows, cols], at most as many as a panel has, into a slice of `linear`.
void pack_rows(const Kernels& kernels, const Linear& linear, const Linear::Slice& slice, const Source& source,
               const Columns& columns, int rows, int row_begin, int row_end, char* room);

// A panel of a matrix that stays as it lies (Linear::Part), packed into `room` of `panel_room` bytes. The same bits as if it
// had been packed with all others. Returns the panel.
const char* pack_panel(const Kernels& kernels, const Linear& linear, int panel, char* room);
size_t panel_room(const Kernels& kernels, const Linear& linear);

}  // namespace tidewheel
