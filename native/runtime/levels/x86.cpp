#include "runtime/levels/levels.h"

namespace tidewheel {

namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }

std::vector<const Kernels*> architecture_levels() {
  std::vector<const Kernels*> levels;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    levels.push_back(&avx512_bf16::kKernels);
  }
  if (avx512) levels.push_back(&avx512::kKernels);
  if (avx2) levels.push_back(&avx2::kKernels);
  return levels;
}

}  // namespace tidewheel
