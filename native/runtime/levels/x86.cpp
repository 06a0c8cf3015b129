#include "runtime/levels/x86.h"

#include <cpuid.h>

#include <cstring>
#include <utility>

#include "runtime/levels/levels.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tidewheel {

namespace avx2 { extern const Kernels kKernels; }
namespace avx2_vnni { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_vnni { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }
namespace amx { extern const Kernels kKernels; }

namespace {

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

unsigned family_of(unsigned signature) { return (signature >> 8 & 0xf) + (signature >> 20 & 0xff); }
unsigned model_of(unsigned signature) { return (signature >> 4 & 0xf) | (signature >> 12 & 0xf0); }

std::string vendor() {
  const Cpuid id(0, 0);
  char name[12];
  std::memcpy(name, &id.ebx, 4);
  std::memcpy(name + 4, &id.edx, 4);
  std::memcpy(name + 8, &id.ecx, 4);
  return {name, sizeof name};
}

bool slow_bfloat16_dots() { return has_slow_bfloat16_dots(vendor(), Cpuid(1, 0).eax); }

// Checks for tiles of 16 rows of 64 bytes, and for their products of int8 and bfloat16. Then asks Linux for permission:
// a process must ask, because each thread that uses tiles needs 8 KiB more for its state.
bool allowed_tiles() {
#if defined(__linux__)
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBFloat16 | kTile | kInt8;
  if ((Cpuid(7, 0).edx & kAll) != kAll) return false;
  const Cpuid palettes(0x1d, 0), palette(0x1d, 1);
  const bool has_eight = palettes.eax >= 1 && palette.ebx == (8u << 16 | 64) && (palette.ecx & 0xffff) == 16;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_eight && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

// native/performance-log.md has the measurements, under "bfloat16 on Emerald Rapids".
bool has_slow_bfloat16_dots(const std::string& vendor, unsigned signature) {
  constexpr unsigned kEmeraldRapids = 207;
  return vendor == "GenuineIntel" && family_of(signature) == 6 && model_of(signature) == kEmeraldRapids;
}

// native/performance-log.md has the measurements, under "Attention".
bool brings_line_pairs(const std::string& vendor, unsigned signature) {
  const unsigned model = model_of(signature);
  const bool zen4 = (model >= 0x10 && model < 0x20) || (model >= 0x60 && model < 0x80) || (model >= 0xa0 && model < 0xb0);
  return vendor == "AuthenticAMD" && family_of(signature) == 25 && zen4;
}

bool architecture_brings_line_pairs() { return brings_line_pairs(vendor(), Cpuid(1, 0).eax); }

std::vector<const Kernels*> architecture_levels() {
  std::vector<const Kernels*> levels;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
  static const bool amx = avx512_bf16 && allowed_tiles();  // the system is asked once
  constexpr unsigned kAvxVnni = 1u << 4;
  if (amx) levels.push_back(&amx::kKernels);
  if (avx512_bf16) levels.push_back(&avx512_bf16::kKernels);
  if (avx512_vnni) levels.push_back(&avx512_vnni::kKernels);
  // These two levels differ only in products of bfloat16, in GEMMs and in attention.
  if (avx512_bf16 && slow_bfloat16_dots()) std::swap(levels.back(), levels.end()[-2]);
  if (avx512) levels.push_back(&avx512::kKernels);
  if (avx2 && Cpuid(7, 1).eax & kAvxVnni) levels.push_back(&avx2_vnni::kKernels);
  if (avx2) levels.push_back(&avx2::kKernels);
  return levels;
}

std::string architecture_note() {
  const bool swapped = __builtin_cpu_supports("avx512bf16") && slow_bfloat16_dots();
  return swapped ? "avx512_bf16 is behind avx512_vnni: this processor's bfloat16 dot products are slower than float32" : "";
}

}  // namespace tidewheel
