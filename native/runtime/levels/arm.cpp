#include "runtime/levels/levels.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace tidewheel {

namespace neon { extern const Kernels kKernels; }
namespace neon_dotprod { extern const Kernels kKernels; }
namespace neon_i8mm { extern const Kernels kKernels; }

namespace {

struct Features {
  bool dotprod, bf16, i8mm;
};

#if defined(__APPLE__)

bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

Features detect() {
  return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_BF16"), has("hw.optional.arm.FEAT_I8MM")};
}

#elif defined(__linux__)

// Bits of the Linux kernel that older headers lack: linux/arch/arm64/include/uapi/asm/hwcap.h.
constexpr unsigned long kDotProd = 1UL << 20;              // in AT_HWCAP
constexpr unsigned long kI8mm = 1UL << 13, kBf16 = 1UL << 14;  // in AT_HWCAP2

Features detect() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  return {(first & kDotProd) != 0, (second & kBf16) != 0, (second & kI8mm) != 0};
}

#else

Features detect() { return {}; }

#endif

}  // namespace

std::vector<const Kernels*> architecture_levels() {
  std::vector<const Kernels*> levels;
  const Features features = detect();
  if (features.dotprod && features.bf16 && features.i8mm) levels.push_back(&neon_i8mm::kKernels);
  if (features.dotprod) levels.push_back(&neon_dotprod::kKernels);
  levels.push_back(&neon::kKernels);  // every 64-bit ARM has it
  return levels;
}

std::string architecture_note() { return {}; }

bool architecture_brings_line_pairs() {
#if defined(__APPLE__)
  return true;  // a cache line has 128 bytes, two of those that kernels prefetch
#else
  return false;
#endif
}

}  // namespace tidewheel
