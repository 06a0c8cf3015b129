#include "models.h"

namespace tidewheel::test {

std::vector<const Kernels*> modelled_kernels() { return {}; }

}  // namespace tidewheel::test
