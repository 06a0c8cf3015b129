#include "runtime/levels/levels.h"

#include <cstdint>

#include <sys/auxv.h>

namespace tidewheel {

namespace vxe { extern const Kernels kKernels; }
namespace vxe2 { extern const Kernels kKernels; }

namespace {

// Facilities, by their numbers in the Principles of Operation. Each level is compiled for a whole processor model, so
// the general instructions that came with its vector instructions must be present too.
constexpr int kMiscellaneous2 = 58, kMiscellaneous3 = 61, kVectorEnhancements1 = 135, kVectorEnhancements2 = 148;

// What STORE FACILITY LIST EXTENDED stores: one bit for each facility, from the highest bit down.
struct Facilities {
  uint64_t words[4] = {};

  Facilities() {
    register uint64_t last_word asm("0") = 3;
    asm volatile(".insn s,0xb2b00000,%0" : "+Q"(words), "+d"(last_word) : : "cc");
  }
  bool has(int facility) const { return words[facility / 64] >> (63 - facility % 64) & 1; }
};

}  // namespace

std::vector<const Kernels*> architecture_levels() {
  std::vector<const Kernels*> levels;
  // The kernel reports whether it saves vector registers. Only recent kernels report what they can do.
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if (!(capabilities & HWCAP_S390_STFLE) || !(capabilities & HWCAP_S390_VXRS)) return levels;
  const Facilities facilities;
  const bool vxe = facilities.has(kVectorEnhancements1) && facilities.has(kMiscellaneous2);
  if (vxe && facilities.has(kVectorEnhancements2) && facilities.has(kMiscellaneous3)) levels.push_back(&vxe2::kKernels);
  if (vxe) levels.push_back(&vxe::kKernels);
  return levels;
}

std::string architecture_note() { return {}; }

bool architecture_brings_line_pairs() { return false; }

}  // namespace tidewheel
