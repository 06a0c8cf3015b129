#include "model/workspace.h"

namespace tidewheel {

void Workspace::allocate(const Ownership& ownership) {
  memory_ = Arena(bytes_);
  for (int group = 0; group < ownership.groups(); ++group) scratch_.emplace_back(scratch_stride_ * ownership.workers(group));
}

void Workspace::forget() {
  memory_.forget();
  for (Arena& scratch : scratch_) scratch.forget();
}

}  // namespace tidewheel
