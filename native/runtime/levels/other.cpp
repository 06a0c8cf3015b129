// An architecture without levels of its own: the compiler's plain code serves it.
#include "runtime/levels/levels.h"

namespace tidewheel {

std::vector<const Kernels*> architecture_levels() { return {}; }

}  // namespace tidewheel
