// A processor's tiles in software, instruction by instruction as Intel's Software Developer's Manual has them: shapes, what
// lies outside a shape, and the order and the rounding of every sum. Each thread has its own, as with the processor. What
// would be an exception there is one here.
#pragma once

#include <cstddef>
#include <stdexcept>

namespace tidewheel::tile_model {

// #UD, an invalid opcode, and #GP, a general protection fault.
struct InvalidOpcode : std::logic_error {
  using logic_error::logic_error;
};
struct GeneralProtection : std::logic_error {
  using logic_error::logic_error;
};

void ldtilecfg(const void* config);
void sttilecfg(void* config);
void tilerelease();
void tilezero(int tile);
void tileloadd(int tile, const void* p, size_t stride);
void tilestored(int tile, void* p, size_t stride);

// c += a b: pairs of bfloat16 into float32, quads of signed and of unsigned bytes into 32 bits.
void tdpbf16ps(int c, int a, int b);
void tdpbssd(int c, int a, int b);
void tdpbsud(int c, int a, int b);
void tdpbusd(int c, int a, int b);
void tdpbuud(int c, int a, int b);

// How often this thread has loaded a configuration.
int configurations();
// Whether one is loaded.
bool configured();

}  // namespace tidewheel::tile_model
