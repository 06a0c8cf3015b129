#include "runtime/isa.h"

#include <cstdlib>
#include <stdexcept>

namespace tidewheel {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    levels.push_back(&avx512_bf16::kKernels);
  }
  if (avx512) levels.push_back(&avx512::kKernels);
  if (avx2) levels.push_back(&avx2::kKernels);
#endif
  levels.push_back(&scalar::kKernels);
  return levels;
}

const Kernels& choose_kernels(const std::string& name) {
  std::string wanted = name;
  if (wanted.empty() || wanted == "auto") {
    const char* forced = std::getenv("TIDEWHEEL_ISA");
    wanted = forced ? forced : "";
  }
  const auto levels = available_kernels();
  if (wanted.empty() || wanted == "auto") return *levels.front();
  std::string names;
  for (const Kernels* level : levels) {
    if (wanted == level->name) return *level;
    names += (names.empty() ? "" : ", ") + std::string(level->name);
  }
  throw std::invalid_argument("ISA level '" + wanted + "' is not available on this processor; it has: " + names);
}

}  // namespace tidewheel
