#include "runtime/levels/levels.h"

#include <sys/auxv.h>

namespace tidewheel {

namespace vsx { extern const Kernels kKernels; }
namespace vsx3 { extern const Kernels kKernels; }
namespace mma { extern const Kernels kKernels; }

namespace {

// Versions of the instruction set, and what each may lack: linux/arch/powerpc/include/uapi/asm/cputable.h.
constexpr unsigned long kVsx = 0x00000080;  // in AT_HWCAP, the others in AT_HWCAP2
constexpr unsigned long kPower8 = 0x80000000, kPower9 = 0x00800000, kPower10 = 0x00040000 | 0x00020000;  // with MMA

}  // namespace

std::vector<const Kernels*> architecture_levels() {
  std::vector<const Kernels*> levels;
  const unsigned long versions = getauxval(AT_HWCAP2);
  if (!(getauxval(AT_HWCAP) & kVsx)) return levels;
  if ((versions & kPower10) == kPower10) levels.push_back(&mma::kKernels);
  if (versions & kPower9) levels.push_back(&vsx3::kKernels);
  if (versions & kPower8) levels.push_back(&vsx::kKernels);
  return levels;
}

std::string architecture_note() { return {}; }

// A cache line has 128 bytes, two of those that kernels prefetch.
bool architecture_brings_line_pairs() { return true; }

}  // namespace tidewheel
