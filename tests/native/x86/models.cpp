// Levels that this processor may lack, in ways that it can run.
#include "../models.h"

#include <cstring>

#include "runtime/isa.h"

namespace tidewheel {

namespace amx_model { extern const Kernels kKernels; }
namespace avx2_vnni_model { extern const Kernels kKernels; }

namespace test {

std::vector<const Kernels*> modelled_kernels() {
  for (const Kernels* level : available_kernels()) {
    if (std::strcmp(level->name, "avx512_bf16") == 0) return {&amx_model::kKernels, &avx2_vnni_model::kKernels};
  }
  return {};
}

}  // namespace test
}  // namespace tidewheel
